//! Reuse without compilation, with Debian's kernels and a respin of one of them.
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use crate::support::{
    kernels,
    site::{Run, Site},
};
use serde_json::Value;

fn run(program: &str, args: &[&str]) -> String {
    let output = Command::new(program).args(args).output().unwrap_or_else(|e| panic!("run {program}: {e}"));
    assert!(output.status.success(), "{program} {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Unpacks the payload of an image, which is its last layer, and returns each file's SHA-256.
fn payload(site: &Site, image: &str, tag: &str, to: &Path) -> BTreeMap<String, String> {
    let manifest = site.inspect_raw(&format!("{image}:{tag}"));
    let layer = manifest["layers"].as_array().unwrap().last().unwrap()["digest"].as_str().unwrap().to_owned();
    let url = format!("http://{}/v2/drivers/{image}/blobs/{layer}", site.registry.host);
    fs::create_dir(to).unwrap();
    let (place, blob) = (to.display().to_string(), to.with_extension("tar.gz").display().to_string());
    run("curl", &["-sSfL", "-o", &blob, &url]);
    run("tar", &["-xzf", &blob, "-C", &place]);
    let sums = run("find", &[&place, "-type", "f", "-exec", "sha256sum", "{}", "+"]);
    let line = |line: &str| {
        let (sum, path) = line.split_once("  ").unwrap();
        (path.strip_prefix(&place).unwrap().to_owned(), sum.to_owned())
    };
    sums.lines().map(line).collect()
}

fn annotations(site: &Site, image: &str, tag: &str) -> Value {
    site.inspect_raw(&format!("{image}:{tag}"))["annotations"].clone()
}

/// Fetches the headers of a kernel into the cache and returns their directory.
fn headers(site: &Site, kernel: &str) -> PathBuf {
    let target =
        ["--kernel", kernel, "--os", "debian", "--os-version", "12", "--arch", "amd64", "-o", "json"];
    let found = site.farrier(&[&["headers", "fetch"][..], &target].concat()).exits(0).json();
    found[0]["path"].as_str().unwrap().into()
}

/// Compares a module's symbol versions, read by kmod, with the kernel's own table. Returns whether all of them are equal.
fn versions_agree(module: &Path, headers: &Path, kernel: &str) -> bool {
    let table =
        fs::read_to_string(headers.join(format!("usr/src/linux-headers-{kernel}/Module.symvers"))).unwrap();
    let fields = |line: &str| {
        let mut fields = line.split('\t');
        let crc = fields.next().unwrap().trim_start_matches("0x").trim_start_matches('0').to_owned();
        (fields.next().unwrap().to_owned(), crc)
    };
    let table: BTreeMap<String, String> = table.lines().map(fields).collect();
    let versions = run("modprobe", &["--dump-modversions", &module.display().to_string()]);
    assert!(versions.lines().count() > 1, "{versions}");
    versions.lines().all(|line| {
        let (crc, name) = line.split_once('\t').unwrap();
        table.get(name).is_some_and(|wanted| *wanted == crc.trim_start_matches("0x").trim_start_matches('0'))
    })
}

/// Runs `farrier` without an available engine.
fn without_engine(site: &Site, args: &[&str]) -> Run {
    let mut command = site.command(args);
    command
        .env("FARRIER_ENGINE", "docker")
        .env("DOCKER_HOST", format!("unix://{}", site.path("no-engine.sock").display()));
    site.finish(command.spawn().unwrap())
}

const DRIVER: &str = "apiVersion: farrier.dev/v1alpha1
kind: DriverImage
metadata: {name: driver}
spec:
  version: {source: mstflint}
  template: kbuild
  vars: {directory: ., makeArgs: ''}
  reuse: compatible
  sources:
    - name: mstflint
      from: {apt: {package: mstflint-dkms, suites: [sid]}}
      subdir: usr/src/mstflint-*
  nodes: {matchLabels: {test.farrier.dev/driver: 'true'}}
  modules: [mstflint_access]
  tags: ['{{kernel_label}}']
";

/// Debian's kernels share some symbol versions and differ in others. Only the check's verdict on the newest kernel's modules
/// decides whether they are reused.
#[test]
fn debian_kernels_share_a_payload_where_the_check_says_so() {
    let kernels = kernels::all();
    let (newest, others) = kernels.split_last().unwrap();
    assert!(!others.is_empty(), "the suites of Debian 12 have one 6.1 kernel, {newest}, and two are needed");
    let site = Site::new();
    site.define("images/driver.yaml", DRIVER);
    let first = site.build("driver", newest, &["--push", "-o", "json"]).exits(0).json();
    assert_eq!(first["outcome"], "built", "no image exists that could be reused");
    let theirs = payload(&site, "driver", newest, &site.path("newest"));
    let module = site.path("newest").join(format!("lib/modules/{newest}/extra/mstflint_access.ko"));

    // The second newest kernel, which may agree, and the oldest, which hardly agrees.
    for kernel in [others.last().unwrap(), &others[0]] {
        let args = ["check", &module.display().to_string(), "--kernel", kernel, "--os", "debian"];
        let args = [&args[..], &["--os-version", "12", "--arch", "amd64", "-o", "json"]].concat();
        let loads = site.farrier(&args).json()["verdict"] == "loads";
        assert_eq!(
            loads,
            versions_agree(&module, &headers(&site, kernel), kernel),
            "check and modprobe, {kernel}"
        );

        let run = site.build("driver", kernel, &["--push", "-o", "json"]).exits(0);
        let built = run.json();
        println!("{newest} on {kernel}: loads {loads}, {}", built["outcome"]);
        assert_eq!(built["outcome"], if loads { "reused" } else { "built" }, "{run}");
        assert_eq!(built["check"]["verdict"], "loads", "{run}");
        let notes = annotations(&site, "driver", kernel);
        let ours = payload(&site, "driver", kernel, &site.path(kernel.as_str()));
        if loads {
            assert_eq!(notes["farrier.dev/reused-from"], first["digest"]);
            let moved = theirs.iter().map(|(path, sum)| (path.replace(newest.as_str(), kernel), sum.clone()));
            assert_eq!(ours, moved.collect());
        } else {
            assert_eq!(notes.get("farrier.dev/reused-from"), None);
            run.line(&format!("nothing to reuse: the payload of {newest}: the check says refused"));
        }
    }
}

/// Creates definitions whose kernels come from `trees/`, with the newest Debian kernel as the first tree.
fn site_with_trees(kernel: &str) -> Site {
    let site = Site::new();
    site.edit("images/hello.yaml", "  modules:", "  reuse: compatible\n  modules:");
    let debian = headers(&site, kernel);
    // Override the built-in family, so that all its kernels come from these trees.
    let family =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("kernels/10-debian-12.yaml")).unwrap();
    let (before, after) = family.split_once("  headers:\n").unwrap();
    let (_, toolchain) = after.split_once("  toolchain:\n").unwrap();
    let before: String =
        before.lines().filter(|line| !line.contains("release:")).flat_map(|line| [line, "\n"]).collect();
    site.define(
        "kernels/10-debian-12.yaml",
        &format!(
            "{before}  headers: {{tarball: {{path: \"trees/{{{{release}}}}\"}}}}\n  toolchain:\n{toolchain}"
        ),
    );
    fs::create_dir(site.definitions().join("trees")).unwrap();
    let tree = site.definitions().join("trees").join(kernel);
    run("cp", &["-a", &debian.display().to_string(), &tree.display().to_string()]);
    site
}

/// Creates the tree of a respin, which is the same kernel rebuilt under another name.
fn respin(site: &Site, kernel: &str, release: &str) -> PathBuf {
    let trees = site.definitions().join("trees");
    let tree = trees.join(release);
    run("cp", &["-a", &trees.join(kernel).display().to_string(), &tree.display().to_string()]);
    fs::remove_dir_all(tree.join("usr/lib/modules")).unwrap();
    let build = tree.join(format!("usr/src/linux-headers-{release}"));
    fs::rename(tree.join(format!("usr/src/linux-headers-{kernel}")), &build).unwrap();
    for file in ["include/generated/utsrelease.h", ".kernelvariables"] {
        let text = fs::read_to_string(build.join(file)).unwrap();
        assert!(text.contains(kernel), "{file} has no {kernel}");
        fs::write(build.join(file), text.replace(kernel, release)).unwrap();
    }
    build
}

/// Sets the canary's kernel, with the label as NFD writes it.
fn canary(site: &Site, release: &str) {
    site.manifest("edge-2.yaml", release);
    let path = site.cluster().join("edge-2.yaml");
    let text = fs::read_to_string(&path).unwrap();
    let label = "kernel-version.full: ";
    let text = text.replace(&format!("{label}{release}"), &format!("{label}{}", release.replace('+', "_")));
    fs::write(path, text).unwrap();
}

/// A kernel rebuilt from the same source reuses the modules without a compiler, and the rollout follows.
#[test]
fn a_respin_takes_the_modules_of_the_kernel_it_is_made_from() {
    let kernel = kernels::newest().newer;
    let site = site_with_trees(&kernel);
    site.canary(&kernel);
    site.run_once().exits(0).line("built     hello for");
    let first = site.image();

    let local = format!("{kernel}+local");
    respin(&site, &kernel, &local);
    canary(&site, &local);
    let plan = without_engine(&site, &["plan"]).exits(0);
    plan.line("not in the registry; an image for another kernel is reused if the check allows");
    assert_eq!(without_engine(&site, &["run", "--once", "--dry-run"]).exits(0).stdout, plan.stdout);
    let json = without_engine(&site, &["plan", "-o", "json"]).exits(0).json();
    assert_eq!(json["builds"][0]["mayReuse"], true);

    let pass = without_engine(&site, &["run", "--once"]).exits(0);
    pass.line(&format!("reused    hello for {local} from kernel {kernel}: "));
    pass.line("looking for an image to reuse");
    pass.line("rewrote   DaemonSet drivers/hello");
    let image = site.image();
    assert!(image != first && image.starts_with(&format!("{}/hello@sha256:", site.location)), "{image}");
    let (old, new) =
        (format!("1.0-{kernel}-debian12-amd64"), format!("1.0-{}-debian12-amd64", local.replace('+', "_")));
    let theirs = payload(&site, "hello", &old, &site.path("old"));
    let ours = payload(&site, "hello", &new, &site.path("new"));
    let moved = theirs.iter().map(|(path, sum)| (path.replace(kernel.as_str(), &local), sum.clone()));
    assert_eq!(ours, moved.collect());
    assert!(ours.contains_key(&format!("/lib/modules/{local}/extra/farrier_hello.ko")), "{ours:?}");
    let notes = annotations(&site, "hello", &new);
    assert!(first.ends_with(notes["farrier.dev/reused-from"].as_str().unwrap()), "{notes}");
    assert_eq!(notes["farrier.dev/kernel-release"], local);
    without_engine(&site, &["run", "--once"]).exits(0).line("nothing to do");

    // A kernel from another source: one symbol version differs, so farrier needs a compiler.
    let other = format!("{kernel}+other");
    let build = respin(&site, &kernel, &other);
    let table = fs::read_to_string(build.join("Module.symvers")).unwrap();
    let line = table.lines().find(|line| line.split('\t').nth(1) == Some("_printk")).unwrap();
    let (crc, rest) = line.split_once('\t').unwrap();
    let flipped = format!("{:#010x}\t{rest}", !u32::from_str_radix(&crc[2..], 16).unwrap());
    fs::write(build.join("Module.symvers"), table.replace(line, &flipped)).unwrap();
    canary(&site, &other);
    let pass = without_engine(&site, &["run", "--once"]).exits(3);
    pass.line("nothing to reuse: the payload of");
    pass.line("no build engine");
    assert_eq!(site.image(), image, "the last good image is kept");
    site.run_once().exits(0).line(&format!("built     hello for {other}"));
    let tag = format!("1.0-{}-debian12-amd64", other.replace('+', "_"));
    assert_eq!(annotations(&site, "hello", &tag).get("farrier.dev/reused-from"), None);
}
