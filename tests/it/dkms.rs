//! The shipped `dkms` template with third-party drivers: unmodified DKMS packages of Debian 12 on Debian 12's kernels, and a
//! `dkms.conf` that uses every directive that dkms(8) documents.
use std::{fs, os::unix::fs::PermissionsExt as _};

use crate::support::{
    kernels,
    site::{Run, Site},
    virtual_machine::entrypoint,
};

/// Writes a definition like a new user's.
fn define(site: &Site, package: &str, more: &str) {
    let from = format!("{{apt: {{package: {package}, suites: [bookworm]}}}}\n      subdir: usr/src/*");
    define_from(site, package.trim_end_matches("-dkms"), "{source: driver}", &from, more);
}

fn define_from(site: &Site, name: &str, version: &str, from: &str, more: &str) {
    site.define(
        &format!("images/{name}.yaml"),
        &format!(
            "apiVersion: farrier.dev/v1alpha1\nkind: DriverImage\nmetadata: {{name: {name}}}\nspec:\n  version: {version}\n  \
             template: dkms\n  vars: {{directory: ., makeArgs: ''}}\n  sources:\n    - name: driver\n      from: {from}\n{more}"
        ),
    );
}

fn build(site: &Site, image: &str, kernel: &str) -> Run {
    let entrypoint = entrypoint().display().to_string();
    site.build(image, kernel, &["--engine", "sandbox", "--entrypoint", &entrypoint, "-o", "json"])
}

/// Returns the path and the verdict of each module in a build's report.
fn modules(run: &Run) -> Vec<String> {
    let report = run.json();
    let modules = report["check"]["modules"].as_array().unwrap_or_else(|| panic!("{run}")).iter();
    modules.map(|module| format!("{} {}", module["path"], module["verdict"]).replace('"', "")).collect()
}

/// The package's `MAKE` names dkms(8)'s build directory.
#[test]
fn a_conf_that_names_its_build_directory() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    define(&site, "acpi-call-dkms", "  modules: [acpi_call]\n  check: {boot: true}\n");
    let run = build(&site, "acpi-call", &kernel).exits(0);
    assert_eq!(modules(&run), [format!("lib/modules/{kernel}/updates/dkms/acpi_call.ko loads")]);
    run.line("booting the kernel to load the modules");
}

/// The package's `PRE_BUILD` is a configure script that looks for user-space headers.
#[test]
fn a_conf_with_a_configure_script_that_needs_packages() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    let more = "  modules: [ipt_NETFLOW]\n  buildPackages: [libxtables-dev, pkg-config, iptables]\n";
    define(&site, "iptables-netflow-dkms", more);
    let run = build(&site, "iptables-netflow", &kernel).exits(0);
    assert_eq!(modules(&run), [format!("lib/modules/{kernel}/updates/dkms/ipt_NETFLOW.ko loads")]);
}

/// The package's `MAKE` builds below `/usr/src` and needs the sources of another DKMS package there, which `buildPackages`
/// unpacks.
#[test]
fn a_conf_that_builds_where_its_package_is_unpacked() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    let more = "  modules: [xt_gfw]\n  buildPackages: [xtables-addons-dkms]\n";
    define(&site, "west-chamber-dkms", more);
    let run = build(&site, "west-chamber", &kernel).exits(0);
    let place = format!("lib/modules/{kernel}/updates/dkms");
    assert_eq!(
        modules(&run),
        ["xt_CUI", "xt_ZHANG", "xt_gfw"].map(|name| format!("{place}/{name}.ko loads"))
    );
}

/// One module finds no hardware in the virtual machine. The other modules depend on it, so their outcome is unknown.
#[test]
fn a_driver_for_hardware_that_a_virtual_machine_has_not() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    define(&site, "tp-smapi-dkms", "  check: {boot: true}\n");
    let run = build(&site, "tp-smapi", &kernel).exits(0);
    let report = run.json();
    let booted = report["check"]["boot"]["modules"].as_array().unwrap_or_else(|| panic!("{run}")).iter();
    let mut outcomes: Vec<_> =
        booted.map(|module| format!("{} {}", module["name"], module["outcome"])).collect();
    outcomes.sort();
    let wanted = ["hdaps notReached", "thinkpad_ec notPresent", "tp_smapi notReached"];
    assert_eq!(outcomes.join("\n").replace('"', ""), wanted.join("\n"));
}

const CONF: &str = r#"PACKAGE_NAME="strange"
PACKAGE_VERSION="1.0"
echo "this is thrown away"
PRE_BUILD="configure
  --kernel=$kernelver
  --module=$module-$module_version"
PATCH[0]="absent.patch"
PATCH_MATCH[0]="^2\."
PATCH[1]="makefile.patch"
MAKE[0]="false"
MAKE_MATCH[0]="^2\."
MAKE[1]="make -C $kernel_source_dir M=$dkms_tree/$PACKAGE_NAME/$PACKAGE_VERSION/build/src modules"
MAKE_MATCH[1]="^[3-9]\."
i=0
BUILT_MODULE_NAME[$i]="strange_second"
BUILT_MODULE_LOCATION[$i]="src"
i=$((i + 1))
BUILT_MODULE_NAME[$i]="strange"
BUILT_MODULE_LOCATION[$i]="src/"
DEST_MODULE_NAME[$i]="strange_first"
for ((i = 0; i < ${#BUILT_MODULE_NAME[@]}; i++)); do
    DEST_MODULE_LOCATION[$i]="/kernel/drivers/misc"
done
POST_BUILD="after $arch"
BUILD_EXCLUSIVE_KERNEL_MIN="4.18"
BUILD_EXCLUSIVE_CONFIG="CONFIG_MODULES !CONFIG_NONESUCH"
AUTOINSTALL="yes"
[ -e /nonesuch ]
"#;

const SOURCE: &str = r#"#include <linux/module.h>
#ifndef CONFIGURED
#error "configure has not run"
#endif
#if !defined(FIRST) || !defined(SECOND)
#error "makeArgs has lost its quotes"
#endif
static int __init strange_init(void) { return 0; }
static void __exit strange_exit(void) {}
module_init(strange_init);
module_exit(strange_exit);
MODULE_LICENSE("GPL");
"#;

const PATCH: &str = "--- a/src/Makefile\n+++ b/src/Makefile\n@@ -1 +1,2 @@\n obj-m := strange.o\n+obj-m += strange_second.o\n";

/// Creates a site with a driver whose `dkms.conf` is [`CONF`].
fn strange() -> Site {
    let site = Site::new();
    define_from(&site, "strange", "'1.0'", "{path: {path: sources/strange}}", "  check: {boot: true}\n");
    // Quotes as docs/dkms.md describes them.
    site.edit("images/strange.yaml", "makeArgs: ''", r#"makeArgs: 'KCFLAGS=\"-DFIRST -DSECOND\"'"#);
    // The script checks its arguments and the directory that dkms(8) guarantees.
    let configure = "#!/bin/sh -e\n[ \"$1 $2 $#\" = \"--kernel=$kernelver --module=strange-1.0 2\" ]\n\
                     [ \"$PWD\" = /var/lib/dkms/strange/1.0/build ]\n[ ../source/dkms.conf -ef /usr/src/strange-1.0/dkms.conf ]\n\
                     [ -n \"$(find /usr/src/strange-1.0 -name strange.c)\" ]\n\
                     echo 'ccflags-y := -DCONFIGURED' >> src/Makefile\n";
    let after =
        "#!/bin/sh -e\n[ -e ../$kernelver/$1/module/strange_first.ko ]\necho POST_BUILD has seen it\n";
    for (file, text) in [
        ("dkms.conf", CONF),
        ("configure", configure),
        ("after", after),
        ("patches/makefile.patch", PATCH),
        ("src/Makefile", "obj-m := strange.o\n"),
        ("src/strange.c", SOURCE),
        ("src/strange_second.c", SOURCE),
    ] {
        site.define(&format!("sources/strange/{file}"), text);
    }
    for script in ["configure", "after"] {
        let file = site.definitions().join("sources/strange").join(script);
        fs::set_permissions(file, fs::Permissions::from_mode(0o755)).unwrap();
    }
    site
}

#[test]
fn a_conf_with_all_that_it_may_say() {
    let (site, kernel) = (strange(), kernels::newest().newer);
    let run = build(&site, "strange", &kernel).exits(0);
    let place = format!("lib/modules/{kernel}/updates/dkms");
    let wanted = ["strange_first", "strange_second"].map(|name| format!("{place}/{name}.ko loads"));
    assert_eq!(modules(&run), wanted);
    run.line("booting the kernel to load the modules");
}

/// The error message names the directive that excludes the kernel, and nothing is compiled.
#[test]
fn a_conf_that_excludes_the_kernel() {
    let (site, kernel) = (strange(), kernels::newest().newer);
    for (line, words) in [
        ("BUILD_EXCLUSIVE_KERNEL_MAX=\"5.4\"", "it is for kernels up to 5.4"),
        ("BUILD_EXCLUSIVE_KERNEL_MIN=\"19.1\"", "it is for 19.1 and later"),
        ("BUILD_EXCLUSIVE_KERNEL=\"^5\\.\"", r"it is for releases that match BUILD_EXCLUSIVE_KERNEL=^5\."),
        (
            "BUILD_EXCLUSIVE_ARCH=\"s390x\"",
            "it is for processors that match BUILD_EXCLUSIVE_ARCH=s390x, and this one is x86_64",
        ),
        ("BUILD_EXCLUSIVE_CONFIG=\"CONFIG_NONESUCH\"", "it is for kernels with CONFIG_NONESUCH"),
        ("BUILD_EXCLUSIVE_CONFIG=\"!CONFIG_MODULES\"", "it is for kernels without CONFIG_MODULES"),
        ("build_exclude=\"yes\"", "it sets build_exclude, and gives no reason"),
    ] {
        site.define("sources/strange/dkms.conf", &format!("{CONF}{line}\n"));
        let run = build(&site, "strange", &kernel).exits(1);
        run.line(&format!("compile failed: dkms.conf excludes kernel {kernel}: {words}"));
    }
    site.define("sources/strange/dkms.conf", &format!("{CONF}BUILD_DEPENDS[0]=\"nvidia-current\"\n"));
    let run = build(&site, "strange", &kernel).exits(1);
    run.line("dkms.conf has BUILD_DEPENDS=nvidia-current: name the image that exposes what it is compiled against in needs");
}

/// As with dkms 3.3, entry 0 of `BUILD_EXCLUSIVE_*` counts for all modules and entry N for module N.
#[test]
fn a_conf_that_excludes_one_module_of_several() {
    let (site, kernel) = (strange(), kernels::newest().newer);
    let more = "BUILD_EXCLUSIVE_KERNEL_MAX[1]=\"5.4\"\nCLEAN=\"make clean\"\nif [ unfinished\n";
    site.define("sources/strange/dkms.conf", &format!("{CONF}{more}"));
    site.define("sources/strange/after", "#!/bin/sh\n");
    let run = build(&site, "strange", &kernel).exits(0);
    assert_eq!(modules(&run), [format!("lib/modules/{kernel}/updates/dkms/strange_second.ko loads")]);
    // The same warnings come before a build.
    let lint = site.farrier(&["lint"]).exits(0);
    for warning in [
        "dkms.conf sets CLEAN=make clean: it is left out",
        "dkms.conf sets BUILD_EXCLUSIVE_KERNEL_MAX[1]=5.4: other kernels get an image without module 1",
        "dkms.conf has a syntax error (line ",
    ] {
        assert!(run.stderr.contains(&format!("strange: warning: source driver: {warning}")), "{run}");
        assert!(lint.stdout.contains(&format!("warning: image strange: source driver: {warning}")), "{lint}");
    }
}

#[test]
fn a_conf_whose_script_fails() {
    let (site, kernel) = (strange(), kernels::newest().newer);
    site.define("sources/strange/configure", "#!/bin/sh\nexit 3\n");
    build(&site, "strange", &kernel)
        .exits(1)
        .line("compile failed: PRE_BUILD failed with exit code 3: configure");
    let file = site.definitions().join("sources/strange/configure");
    fs::set_permissions(file, fs::Permissions::from_mode(0o644)).unwrap();
    build(&site, "strange", &kernel).exits(1).line("hint: the script is not executable in the sources");
    site.edit("images/strange.yaml", "directory: .", "directory: src");
    let run = build(&site, "strange", &kernel).exits(1);
    run.line("compile failed: there is no dkms.conf in src of the sources: set vars.directory, or subdir of the source");
}
