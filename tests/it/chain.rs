//! Images that are compiled against each other, with the real binary, engine, registry and compilers. `b` and `c` use the
//! exports of `a`, and `d` uses the exports of `b` and `c`. The nodes request only `d`.
use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use farrier_core::{facts::ImageFacts, image::Digest};

use crate::support::{
    kernels,
    published::{publish, publish_with},
    site::{FIRST_IMAGE, Run, Site, skopeo},
};
use kmod::Verdict;
use serde_json::Value;

/// Returns the images that a reconcile built, in order of publication.
fn built(run: &Run) -> Vec<String> {
    let lines = run.stdout.lines().filter_map(|line| line.strip_prefix("built "));
    lines.map(|line| line.split_whitespace().next().unwrap().to_owned()).collect()
}

/// Returns the position of the first log line that contains `words`.
fn place(run: &Run, words: &str) -> usize {
    run.stderr.lines().position(|line| line.contains(words)).unwrap_or_else(|| panic!("no {words:?}: {run}"))
}

/// Runs one reconcile with resources for two concurrent builds.
fn reconcile(site: &Site) -> Run {
    site.farrier(&["run", "--once", "--build-cpus", "2", "--build-memory", "2Gi"])
}

fn exposed(site: &Site, image: &str, kernel: &str) -> String {
    let manifest = site.inspect_raw(&format!("{image}:1.0-{kernel}-debian12-amd64"));
    manifest["annotations"]["farrier.dev/exposed-digest"].as_str().unwrap().to_owned()
}

/// Unpacks the payload of a published image, which is its last layer.
fn payload(site: &Site, image: &str, kernel: &str) -> PathBuf {
    let (files, tree) = (site.path(format!("{image}-files")), site.path(format!("{image}-payload")));
    let from = format!("docker://{}/{image}:1.0-{kernel}-debian12-amd64", site.location);
    let output = skopeo(&["copy", "--src-tls-verify=false", &from, &format!("dir:{}", files.display())]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let manifest: Value = serde_json::from_slice(&fs::read(files.join("manifest.json")).unwrap()).unwrap();
    let layers = manifest["layers"].as_array().unwrap();
    let digest = layers.last().unwrap()["digest"].as_str().unwrap();
    fs::create_dir(&tree).unwrap();
    let layer = files.join(digest.strip_prefix("sha256:").unwrap());
    let unpacked = Command::new("tar").arg("-xzf").arg(layer).arg("-C").arg(&tree).status().unwrap();
    assert!(unpacked.success());
    tree
}

/// Runs `farrier collect` on the exposed headers of the host's `a`.
fn collect(site: &Site, host: &Path, kernel: &str, to: &Path) -> Run {
    let (root, to) = (host.display().to_string(), to.display().to_string());
    site.farrier(&[
        "headers",
        "collect-driver",
        "--root",
        &root,
        "--kernel",
        kernel,
        "--to",
        &to,
        "/usr/src/chain-a",
    ])
}

/// A new kernel builds the chain in dependency order. A change without effect on the exposed headers rebuilds only that image.
/// A changed symbol version rebuilds exactly the images that were compiled against it.
#[test]
fn what_is_rebuilt_is_what_was_compiled_against_the_change() {
    let kernel = kernels::newest().newer;
    let site = Site::chain();
    site.canary(&kernel);
    let first = reconcile(&site).exits(0);
    let order = built(&first);
    assert_eq!((order.len(), order[0].as_str(), order[3].as_str()), (4, "a", "d"), "{first}");
    // `b` and `c` were built concurrently, and `d` started after both were published.
    let subject = |image: &str| format!("{image} for {kernel}: ");
    let began = |image: &str| place(&first, &format!("{}fetching headers", subject(image)));
    let ended = |image: &str| place(&first, &format!("{}published", subject(image)));
    assert!(ended("a") < began("b").min(began("c")), "{first}");
    assert!(began("b").max(began("c")) < ended("b").min(ended("c")), "{first}");
    assert!(ended("b").max(ended("c")) < began("d"), "{first}");
    let image = site.image();
    assert!(image.starts_with(&format!("{}/d@sha256:", site.location)), "{image}");
    reconcile(&site).exits(0).line("nothing to do");

    let before = exposed(&site, "a", &kernel);
    site.edit("sources/a/chain_a.c", "value + 1", "value + 10");
    assert_eq!(built(&reconcile(&site).exits(0)), ["a"]);
    assert_eq!((exposed(&site, "a", &kernel), site.image()), (before.clone(), image.clone()));

    site.edit("sources/b/chain_b.c", "int chain_b(int value)", "int chain_b(int value, int more)");
    site.edit("sources/b/include/chain_b.h", "int value", "int value, int more");
    site.edit("sources/d/chain_d.c", "chain_b(value)", "chain_b(value, 1)");
    assert_eq!(built(&reconcile(&site).exits(0)), ["b", "d"]);

    for file in ["sources/a/chain_a.c", "sources/a/include/chain_a.h"] {
        site.edit(file, "chain_a(int value)", "chain_a(long value)");
    }
    // Both users of the symbol are rebuilt. Their own exports are unchanged, so `d` is not rebuilt.
    let users = built(&reconcile(&site).exits(0));
    assert_eq!((users.len(), users[0].as_str()), (3, "a"), "{users:?}");
    assert!(users.contains(&"b".to_owned()) && users.contains(&"c".to_owned()), "{users:?}");
    assert_ne!(exposed(&site, "a", &kernel), before);
    // Without a cache, farrier fetches the data again.
    fs::remove_dir_all(site.cache()).unwrap();
    reconcile(&site).exits(0).line("nothing to do");
}

/// `b` and `c` export functions whose prototypes contain a structure of `a`. A change of the structure changes their exports
/// and propagates through the whole chain.
#[test]
fn a_structure_that_shows_in_what_dependents_export_rebuilds_all() {
    let kernel = kernels::newest().newer;
    let site = Site::chain();
    site.canary(&kernel);
    site.edit("sources/a/include/chain_a.h", "int chain_a", "struct chain {\n\tint length;\n};\nint chain_a");
    for name in ["b", "c"] {
        let (takes_number, takes_structure) =
            (format!("int chain_{name}(int value)"), format!("int chain_{name}(struct chain *chain)"));
        let declared = format!("struct chain;\n{takes_structure}");
        site.edit(&format!("sources/{name}/include/chain_{name}.h"), &takes_number, &declared);
        let source = format!("sources/{name}/chain_{name}.c");
        site.edit(&source, &takes_number, &takes_structure);
        site.edit(&source, "chain_a(value)", "chain_a(chain->length)");
    }
    site.edit("sources/d/chain_d.c", "chain_b(value) + chain_c(value)", "chain_b(NULL) + chain_c(NULL)");
    assert_eq!(built(&reconcile(&site).exits(0)).len(), 4);
    let images = ["a", "b", "c", "d"];
    let before = images.map(|image| exposed(&site, image, &kernel));
    let rolled_out = site.image();

    site.edit("sources/a/include/chain_a.h", "int length", "long length");
    let order = built(&reconcile(&site).exits(0));
    assert_eq!((order.len(), order[0].as_str(), order[3].as_str()), (4, "a", "d"), "{order:?}");
    let after = images.map(|image| exposed(&site, image, &kernel));
    // `d` exports only its own symbol, which is unchanged: an image built against `d` would not be rebuilt.
    assert_eq!([0, 1, 2, 3].map(|image| before[image] == after[image]), [false, false, false, true]);
    assert_ne!(site.image(), rolled_out);
}

/// Headers collected from a host with its own `a` replace the image `a`.
#[test]
fn a_tree_of_a_host_in_place_of_an_image() {
    let kernels = kernels::newest();
    let kernel = kernels.newer.as_str();
    let site = Site::chain();
    site.edit("images/b.yaml", "[a]", "[{name: a, tree: \"trees/a-{{release}}.tar.gz\"}]");
    let missing = site.build("b", kernel, &["--push"]).exits(2);
    missing.line(&format!("farrier collect --root /host --kernel {kernel}"));

    // The host's driver is a different build: its symbol version matches no image built here.
    let table = format!("usr/src/chain-a/{kernel}/Module.symvers");
    site.build("a", kernel, &["--push"]).exits(0);
    let host = payload(&site, "a", kernel);
    let text = fs::read_to_string(host.join(&table)).unwrap();
    let (version, rest) = text.split_once('\t').unwrap();
    assert!(version.starts_with("0x") && rest.starts_with("chain_a\t"), "{text}");
    fs::write(host.join(&table), format!("0x12345678\t{rest}")).unwrap();
    let tree = site.definitions().join(format!("trees/a-{kernel}.tar.gz"));
    fs::create_dir_all(tree.parent().unwrap()).unwrap();
    collect(&site, &host, kernel, &tree).exits(0);

    // The check uses the host's table as well: without the table `chain_a` would be unknown.
    site.build("b", kernel, &["--push"]).exits(0);
    let module = payload(&site, "b", kernel).join(format!("lib/modules/{kernel}/extra/chain_b.ko"));
    let versions = Command::new("/sbin/modprobe").arg("--dump-modversions").arg(module).output().unwrap();
    let versions = String::from_utf8(versions.stdout).unwrap();
    assert!(versions.lines().any(|line| line == "0x12345678\tchain_a"), "{versions}");
    site.build("b", kernel, &["--push"]).exits(0).line("up to date");
    // A different table is a different input.
    fs::write(host.join(&table), text).unwrap();
    collect(&site, &host, kernel, &tree).exits(0);
    let again = site.build("b", kernel, &["--push"]).exits(0);
    assert!(!again.stdout.contains("up to date"), "{again}");
}

/// farrier neither collects nor compiles against headers that a host exposes for another kernel.
#[test]
fn a_tree_of_a_host_with_another_kernel() {
    let kernels = kernels::newest();
    let (older, newer) = (kernels.older.as_str(), kernels.newer.as_str());
    let site = Site::chain();
    site.edit("images/b.yaml", "[a]", "[{name: a, tree: \"trees/a-{{release}}.tar.gz\"}]");
    let host = site.path("host");
    let exposed = host.join(format!("usr/src/chain-a/{older}"));
    fs::create_dir_all(&exposed).unwrap();
    fs::write(exposed.join("Module.symvers"), "0x12345678\tchain_a\t/build/chain_a\tEXPORT_SYMBOL_GPL\t\n")
        .unwrap();
    let tree = site.definitions().join(format!("trees/a-{newer}.tar.gz"));
    fs::create_dir_all(tree.parent().unwrap()).unwrap();
    let refused = collect(&site, &host, newer, &tree).exits(2);
    refused.line(&format!("for kernel {newer}: it was built for {older}"));
    assert!(!tree.exists());

    // Simulate a tree under the wrong name.
    collect(&site, &host, older, &tree).exits(0);
    let run = site.build("b", newer, &["--push"]).exits(2);
    run.line(&format!("a-{newer}.tar.gz for kernel {newer}: it was built for {older}"));
    assert!(site.tags("b").is_empty());
    site.canary(newer);
    let run = reconcile(&site);
    run.line(&format!("for kernel {newer}: it was built for {older}"));
    assert_eq!((site.tags("b").len(), site.tags("d").len(), site.image().as_str()), (0, 0, FIRST_IMAGE));
}

/// The boot check loads the modules of all direct and transitive needs before the image's own.
#[test]
fn a_boot_check_loads_what_is_needed_first() {
    let kernel = kernels::newest().newer;
    let site = Site::chain();
    site.edit("images/d.yaml", "  onConflict", "  check: {boot: true}\n  onConflict");
    let entrypoint = crate::support::virtual_machine::entrypoint().display().to_string();
    let run = site.build("d", &kernel, &["--push", "--entrypoint", &entrypoint]).exits(0);
    run.line(&format!("d for {kernel}: booting the kernel to load the modules"));
    let tag = format!("d:1.0-{kernel}-debian12-amd64");
    let notes = &site.inspect_raw(&tag)["annotations"];
    assert_eq!(notes["farrier.dev/check-verdict"], "loads", "{notes}");
}

/// farrier builds nothing against an image that another tool published, and rewrites nothing.
#[test]
fn a_need_that_something_else_published() {
    let kernel = kernels::newest().newer;
    let site = Site::chain();
    site.canary(&kernel);
    site.edit("images/a.yaml", "  onConflict: overwrite\n", "");
    let plan = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    let foreign = publish(&plan["builds"][0]["cell"], Verdict::Loads);
    // Republish the image without farrier's annotations.
    let layout = format!("oci:{}:x", site.path("foreign").display());
    let tag = format!("docker://{}/a:1.0-{kernel}-debian12-amd64", site.location);
    for (from, to) in [(format!("docker://{foreign}"), layout.clone()), (layout, tag)] {
        let copy = ["copy", "--src-tls-verify=false", "--dest-tls-verify=false", "--format=v2s2", &from, &to];
        let output =
            skopeo(&copy.map(|word| {
                if word == "--format=v2s2" && to.starts_with("oci:") { "--quiet" } else { word }
            }));
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    let run = reconcile(&site);
    assert_eq!(run.code, Some(1), "{run}");
    assert_eq!((built(&run), site.image().as_str()), (Vec::new(), FIRST_IMAGE));
    run.line("was not published by farrier and exposes no headers");
    assert_eq!((site.tags("a").len(), site.tags("b").len()), (1, 0));
}

/// An image with the right inputs whose layers lack the headers that its annotations claim.
#[test]
fn a_need_that_lacks_the_headers_it_claims() {
    let kernel = kernels::newest().newer;
    let site = Site::chain();
    site.canary(&kernel);
    let plan = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    let exposed_digest = Some(Digest::of(b"nothing like it"));
    let facts = ImageFacts { verdict: Some(Verdict::Loads), exposed_digest, ..ImageFacts::default() };
    publish_with(&plan["builds"][0]["cell"], facts);
    let run = reconcile(&site).exits(1);
    run.line("does not hold the headers that it claims to expose: the payload has no /usr/src/chain-a");
    run.line("hint: delete the needed image's tag");
    assert_eq!((built(&run), site.image().as_str()), (Vec::new(), FIRST_IMAGE));
    // The needed image is at fault and may be repaired at any time, so farrier records no failure.
    assert!(!site.cache().join("records/failures").exists());
    site.build("a", &kernel, &["--push", "--force"]).exits(0);
    assert_eq!(built(&reconcile(&site).exits(0)).len(), 3);
}

#[test]
fn a_range_that_excludes_the_kernel_ends_the_chain() {
    let kernel = kernels::newest().newer;
    let site = Site::chain();
    site.canary(&kernel);
    site.edit("images/a.yaml", "  needs: []\n", "  needs: []\n  kernels: \">=6.2\"\n");
    let run = reconcile(&site);
    assert_eq!((built(&run), site.image().as_str()), (Vec::new(), FIRST_IMAGE));
    run.line("needs a: not built for this kernel");
}

/// Builds one image by name: each need must be published for exactly this kernel or built first.
#[test]
fn one_image_by_name() {
    let kernels = kernels::newest();
    let kernel = kernels.newer.as_str();
    let site = Site::chain();
    let render =
        ["render", "d", "--kernel", kernel, "--os", "debian", "--os-version", "12", "--arch", "amd64"];
    site.farrier(&render).exits(0).line("COPY needs/b/ /");

    // An image for another kernel does not satisfy the need.
    site.build("a", &kernels.older, &["--push"]).exits(0);
    let alone = site.build("b", kernel, &[]).exits(2);
    alone.line("needs a: ");
    alone.line("is not published");
    alone.line("build a with --push first");
    assert!(site.tags("b").is_empty());

    site.build("b", kernel, &["--push"]).exits(0).line("chain_b");
    assert_eq!((site.tags("a").len(), site.tags("b").len()), (2, 1));
    // Without --push the build still resolves needs from the registry, and publishes nothing.
    site.build("c", kernel, &[]).exits(0).line("not published");
    assert!(site.tags("c").is_empty());
}

/// farrier does not publish a payload that lacks a declared exposed directory or contains a link that leaves the payload.
#[test]
fn what_is_exposed_must_be_there() {
    let kernel = kernels::newest().newer;
    let site = Site::chain();
    site.edit("images/a.yaml", "[/usr/src/chain-a]", "[/usr/src/ofa_kernel]");
    let run = site.build("a", &kernel, &["--push"]).exits(1);
    run.line("the payload has no /usr/src/ofa_kernel, which the definition exposes; /usr/src has chain-a");
    run.line("hint: make the template install the tree below /out");

    site.edit("images/a.yaml", "[/usr/src/ofa_kernel]", "[/usr/src/chain-a]");
    site.edit(
        "templates/chain.Dockerfile.hbs",
        "rm -rf /build",
        "ln -s /../etc/passwd \"$exposed/out\"; rm -rf /build",
    );
    let run = site.build("a", &kernel, &["--push"]).exits(1);
    run.line("exposed link /usr/src/chain-a/out -> /../etc/passwd: its target is outside the payload");
    assert!(site.tags("a").is_empty());
}

/// A layout directory as the registry.
#[test]
fn a_layout_directory_holds_a_chain_as_well() {
    let kernel = kernels::newest().newer;
    let mut site = Site::chain();
    site.registry.stop();
    site.location = format!("oci:{}", site.path("layout").display());
    site.build("b", &kernel, &["--push"]).exits(0);
    site.build("c", &kernel, &[]).exits(0);
}
