//! Modules that others compiled, with the real parts: an image as KMM has them, and a kernel's own package of Debian.
use std::fs;

use serde_json::Value;

use crate::support::{
    kernels,
    packages::{fixture_modules, run},
    site::{Run, Site},
    tiny_image,
};

/// A definition that takes modules from `from`.
fn define(site: &Site, version: &str, from: &str, files: &str, module: &str) {
    site.define(
        "images/acme.yaml",
        &format!(
            "apiVersion: farrier.dev/v1alpha1\nkind: DriverImage\nmetadata: {{name: acme}}\nspec:\n  version: '{version}'\n  \
             template: prebuilt\n  vars: {{files: '{files}'}}\n  sources:\n    - {{name: vendor, from: {from}}}\n  \
             nodes: {{matchLabels: {{test.farrier.dev/hello: 'true'}}}}\n  modules: [{module}]\n"
        ),
    );
}

fn build(site: &Site, kernel: &str) -> Run {
    site.build("acme", kernel, &["--engine", "sandbox", "--push", "-o", "json"])
}

/// Files, verdicts and signers of the modules in a build's report.
fn modules(run: &Run) -> Vec<String> {
    let report = run.json();
    let modules = report["check"]["modules"].as_array().unwrap_or_else(|| panic!("{run}")).iter();
    modules.map(|module| format!("{} {}", module["path"], module["verdict"]).replace('"', "")).collect()
}

/// What the bill of materials says of the source.
fn source_in_bill(site: &Site, kernel: &str, version: &str) -> Value {
    let tag = format!("acme:{version}-{kernel}-debian12-amd64");
    let digest = site.inspect(&tag)["Digest"].as_str().unwrap().replace(':', "-");
    let beside = site.inspect_raw(&format!("acme:{digest}"));
    let mut entries = beside["manifests"].as_array().unwrap().iter();
    let bill = entries.find(|entry| entry["artifactType"] == "application/vnd.cyclonedx+json").unwrap();
    let manifest = site.inspect_raw(&format!("acme@{}", bill["digest"].as_str().unwrap()));
    let layer = manifest["layers"][0]["digest"].as_str().unwrap().to_owned();
    let url = format!("http://{}/v2/drivers/acme/blobs/{layer}", site.registry.host);
    let bill: Value =
        serde_json::from_str(&run(std::process::Command::new("curl").args(["-sSfL", &url]))).unwrap();
    let mut components = bill["components"].as_array().unwrap().iter();
    components.find(|one| one["bom-ref"].as_str().unwrap().starts_with("source:")).unwrap().clone()
}

/// An image as KMM's builds leave it, under a tag of its own, with modules for a kernel.
async fn push(site: &Site, tag: &str, directory: &str, kernel: &str) -> String {
    let module = fs::read(fixture_modules(&kernel.parse().unwrap()).join("farrier_good.ko")).unwrap();
    let files = [
        (format!("opt/lib/modules/{directory}/acme/farrier_good.ko"), module),
        ("opt/run".to_owned(), b"#!".to_vec()),
    ];
    tiny_image::push_files(&site.registry.host, "kmm/acme", tag, &files).await
}

#[tokio::test]
async fn an_image_with_modules_is_checked_published_and_signed_at_a_word() {
    let (site, kernels) = (Site::new(), kernels::newest());
    fs::remove_file(site.definitions().join("images/hello.yaml")).unwrap();
    site.manifest("edge-1.yaml", &kernels.older);
    site.manifest("edge-2.yaml", &kernels.newer);
    let image = push(&site, &kernels.newer, &kernels.newer, &kernels.newer).await;
    let from = |more: &str| {
        let host = &site.registry.host;
        format!(
            "{{image: {{reference: '{host}/kmm/acme:{{{{kernel_label}}}}', path: /opt/lib/modules{more}}}}}"
        )
    };
    define(&site, "1.0", &from(""), "*", "farrier_good");

    // A kernel for which there is none has a reason in the plan, and is no build.
    let plan = site.farrier(&["plan"]);
    plan.line("1 to build");
    plan.line(&format!("no prebuilt image {}/kmm/acme:{}", site.registry.host, kernels.older));

    let built = build(&site, &kernels.newer).exits(0);
    assert_eq!(modules(&built), [format!("lib/modules/{}/acme/farrier_good.ko loads", kernels.newer)]);
    let source = source_in_bill(&site, &kernels.newer, "1.0");
    let digest = image.rsplit(':').next().unwrap();
    let purl = source["purl"].as_str().unwrap();
    assert!(purl.starts_with(&format!("pkg:oci/acme@sha256%3A{digest}?repository_url=")), "{purl}");
    assert_eq!(source["hashes"][0]["content"], digest);

    // An image that is of another kernel, whatever its tag and directories say. Kernels of one flavour may load each other's.
    let realtime = kernels.newer.replace("-amd64", "-rt-amd64");
    push(&site, &realtime, &realtime, &kernels.newer).await;
    let refused = build(&site, &realtime).exits(1);
    refused.line(&format!("found {} SMP preempt mod_unload modversions, wanted {realtime} ", kernels.newer));
    assert_eq!(site.tags("acme"), [format!("1.0-{}-debian12-amd64", kernels.newer)]);

    // A site that signs does not sign what others built, unless the definition says so.
    let options = "req -x509 -newkey rsa:2048 -nodes -keyout ours.pem -out ours.crt -subj /CN=acme -days 1";
    run(std::process::Command::new("openssl").args(options.split(' ')).current_dir(site.definitions()));
    site.define(
        "site.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: acme}\nspec:\n  \
         moduleSigning: {key: {file: ours.pem}, certificate: ours.crt}\n  imageSigning: {key: {file: ours.pem}}\n",
    );
    define(&site, "1.1", &from(""), "*", "farrier_good");
    build(&site, &kernels.newer).exits(2).line("nothing vouches for modules out of another's image");
    assert_eq!(site.tags("acme").len(), 1);
    define(&site, "1.1", &from(", adoptUnsigned: true"), "*", "farrier_good");
    let signed = build(&site, &kernels.newer).exits(0).json();
    assert_eq!(signed["check"]["modules"][0]["signedBy"]["signer"], "acme", "{signed}");
}

/// The kernel's own modules, out of its package: another package for each kernel.
#[test]
fn a_package_with_modules_of_each_kernel() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    let from = "{apt: {package: 'linux-image-{{release}}', suites: [bookworm, bookworm-security]}}, subdir: lib/modules";
    define(&site, "6.1", from, "kernel/drivers/net/dummy.ko kernel/drivers/net/veth.ko", "dummy");
    let built = build(&site, &kernel).exits(0);
    let wanted =
        ["dummy", "veth"].map(|name| format!("lib/modules/{kernel}/kernel/drivers/net/{name}.ko loads"));
    assert_eq!(modules(&built), wanted);
    let purl = source_in_bill(&site, &kernel, "6.1")["purl"].as_str().unwrap().to_owned();
    assert!(purl.starts_with(&format!("pkg:deb/debian/linux-image-{kernel}@6.1.")), "{purl}");
    build(&site, "6.1.0-1-amd64").exits(2).line("find package linux-image-6.1.0-1-amd64 in bookworm");
}
