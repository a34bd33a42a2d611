//! Conflicts of a published image with changed inputs.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::support::{kernels, site::Site};

const IMAGE: &str = "images/hello.yaml";
const TEMPLATE: &str = "templates/own.Dockerfile.hbs";
const FAMILY: &str = "kernels/10-debian-12.yaml";

/// Publishes image `hello`, and returns the site and the kernel. The site has its own copies of a template and a family.
fn published() -> (Site, String) {
    let kernel = kernels::newest().newer;
    let site = Site::new();
    site.canary(&kernel);
    for (own, shipped) in [(TEMPLATE, "templates/kbuild.Dockerfile.hbs"), (FAMILY, FAMILY)] {
        let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(shipped)).unwrap();
        site.define(own, &text);
    }
    site.edit(IMAGE, "template: kbuild", "template: own");
    site.run_once().exits(0);
    (site, kernel)
}

/// Edits the source of image `hello`, as a developer does first, and returns the source's path.
fn edit_source(site: &Site) -> PathBuf {
    let source = site.definitions().join("sources/hello/farrier_hello.c");
    let text = fs::read_to_string(&source).unwrap();
    fs::write(&source, text + "/* edited */\n").unwrap();
    source
}

/// Returns the changes that a conflict names.
fn changes(site: &Site) -> String {
    let report = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    let changed = report["conflicts"][0]["changed"].as_array().unwrap_or_else(|| panic!("{report}")).iter();
    changed.map(|text| text.as_str().unwrap()).collect::<Vec<_>>().join("; ")
}

#[test]
fn each_changed_input_is_named() {
    let (site, _) = published();
    site.define("patches/fix.patch", "--- a/Makefile\n+++ b/Makefile\n");
    for (file, from, to, named) in [
        (IMAGE, "makeArgs: \"\"", "makeArgs: V=1", "vars.makeArgs changed (empty -> V=1)"),
        (
            IMAGE,
            "  modules:",
            "  patches: [{path: patches/fix.patch}]\n  modules:",
            "patch 001-fix.patch changed (none -> sha256:",
        ),
        (
            IMAGE,
            "  modules:",
            "  exposes: [/usr/src/hello]\n  modules:",
            "exposes changed (none -> [\"/usr/src/hello\"])",
        ),
        (IMAGE, "  modules:", "  buildPackages: [file]\n  modules:", "toolchain changed ("),
        (
            IMAGE,
            "  modules:",
            "  runtime: {base: {minimal: {suites: [bookworm]}}}\n  modules:",
            "base changed (none -> ",
        ),
        (IMAGE, "  modules:", "  runtime: {env: {A: b}}\n  modules:", "env changed ({} -> {\"A\":\"b\"})"),
        (IMAGE, "modules: [farrier_hello]", "modules: []", "modules changed ([\"farrier_hello\"] -> [])"),
        (TEMPLATE, "FROM scratch", "# edited\nFROM scratch", "template own changed (sha256:"),
        (
            FAMILY,
            "[\"linux-headers-{{release}}\"]",
            "[\"linux-headers-{{release}}\", file]",
            "headers changed (",
        ),
    ] {
        let text = fs::read_to_string(site.definitions().join(file)).unwrap();
        site.edit(file, from, to);
        let found = changes(&site);
        assert!(found.starts_with(named), "{named}: {found}");
        assert!(file != IMAGE || !found.contains("; "), "one change: {found}");
        site.define(file, &text);
    }
    site.farrier(&["plan", "--exit-code"]).exits(0).line("1 up to date");
}

#[test]
fn a_changed_source_is_a_conflict_with_two_remedies() {
    let (site, kernel) = published();
    edit_source(&site);
    let changed = "built from other inputs: source hello changed (tree sha256:";
    let plan = site.farrier(&["plan", "--exit-code"]).exits(1);
    assert!(plan.line("conflict  ").contains(changed), "{plan}");
    for words in
        ["raise `version`", "git describe", "`onConflict: overwrite`", "`farrier build hello --kernel "]
    {
        assert!(plan.line("conflict  ").contains(words), "{words}: {plan}");
    }
    site.build("hello", &kernel, &["--push"]).exits(1).line(changed);
    // Both remedies of the message work.
    site.build("hello", &kernel, &[]).exits(0);
    site.edit(IMAGE, "  version:", "  onConflict: overwrite\n  version:");
    site.run_once().exits(0).line("rewrote");
}

/// `make` in the source leaves products of the build.
#[test]
fn products_of_a_build_are_pointed_out() {
    let (site, kernel) = published();
    let product = edit_source(&site).with_file_name("farrier_hello.o");
    fs::write(&product, "").unwrap();
    let products =
        "source hello contains products of a build, such as farrier_hello.o: run `make clean` there";
    assert!(site.farrier(&["plan"]).exits(0).line("conflict  ").contains(products));
    site.build("hello", &kernel, &["--push"]).exits(1).line(products);
    fs::remove_file(product).unwrap();
    assert!(!site.farrier(&["plan"]).exits(0).to_string().contains("make clean"));
    let found = changes(&site);
    assert!(found.starts_with("source hello changed"), "{found}");
}
