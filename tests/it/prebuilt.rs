//! Prebuilt modules with real components: an image in KMM's layout, and a Debian kernel package.
use std::fs;

use farrier_core::{
    facts::media_type,
    image::SourceSpec,
    kernel::{Architecture, KernelTarget},
};
use farrier_inputs::FetchError;
use oci::error_chain;
use serde_json::{Value, json};

use crate::{
    rpm::{ROCKY, World, archive},
    support::{
        fake_http::{FakeHttp, answer},
        kernels,
        kube_api::objects::node,
        live::{DRIVER, Live, NAMESPACE, OLD_IMAGE},
        packages::{fixture_modules, run},
        rpm_repository::{SigningKey, StandIn, index},
        site::{Run, Site},
        tiny_image,
    },
};

/// Writes a definition that takes modules from `from`.
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

/// Returns the path and the verdict of each module in a build's report.
fn modules(run: &Run) -> Vec<String> {
    let report = run.json();
    let modules = report["check"]["modules"].as_array().unwrap_or_else(|| panic!("{run}")).iter();
    modules.map(|module| format!("{} {}", module["path"], module["verdict"]).replace('"', "")).collect()
}

/// Returns the source's entry in the bill of materials.
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

/// Pushes an image like KMM's builds, under a separate tag, with modules for a kernel.
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

    // The plan skips a kernel without an image and gives the reason.
    let plan = site.farrier(&["plan"]);
    plan.line("1 to build");
    plan.line(&format!("no prebuilt image {}/kmm/acme:{}", site.registry.host, kernels.older));

    let built = build(&site, &kernels.newer).exits(0);
    assert_eq!(modules(&built), [format!("lib/modules/{}/acme/farrier_good.ko loads", kernels.newer)]);
    let source = source_in_bill(&site, &kernels.newer, "1.0");
    let digest = image.rsplit(':').next().unwrap();
    let purl = source["purl"].as_str().unwrap();
    assert!(purl.starts_with(&format!("pkg:oci/acme@sha256:{digest}?repository_url=")), "{purl}");
    assert_eq!(source["hashes"][0]["content"], digest);

    // The image's modules are for another kernel than its tag and directories claim. Kernels of one flavor may load each
    // other's modules.
    let realtime = kernels.newer.replace("-amd64", "-rt-amd64");
    push(&site, &realtime, &realtime, &kernels.newer).await;
    let refused = build(&site, &realtime).exits(1);
    refused.line(&format!("found {} SMP preempt mod_unload modversions, wanted {realtime} ", kernels.newer));
    assert_eq!(site.tags("acme"), [format!("1.0-{}-debian12-amd64", kernels.newer)]);

    // A site that signs modules does not sign third-party modules unless the definition allows it.
    let options = "req -x509 -newkey rsa:2048 -nodes -keyout ours.pem -out ours.crt -subj /CN=acme -days 1";
    run(std::process::Command::new("openssl").args(options.split(' ')).current_dir(site.definitions()));
    site.define(
        "site.yaml",
        "apiVersion: farrier.dev/v1alpha1\nkind: Site\nmetadata: {name: acme}\nspec:\n  \
         moduleSigning: {key: {file: ours.pem}, certificate: ours.crt}\n  imageSigning: {key: {file: ours.pem}}\n",
    );
    define(&site, "1.1", &from(""), "*", "farrier_good");
    build(&site, &kernels.newer).exits(2).line("those of a third party's image are untrusted");
    assert_eq!(site.tags("acme").len(), 1);
    define(&site, "1.1", &from(", adoptUnsigned: true"), "*", "farrier_good");
    let signed = build(&site, &kernels.newer).exits(0).json();
    assert_eq!(signed["check"]["modules"][0]["signedBy"]["signer"], "acme", "{signed}");
}

/// Takes the kernel's own modules from its package, which differs for each kernel.
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
    build(&site, "6.1.0-1-amd64").exits(2).line("cannot find package linux-image-6.1.0-1-amd64 in bookworm");
}

/// Writes the definition of a KMM image in the site's own registry.
fn define_as_kmm_has_it(site: &Site) {
    let reference = format!("{}/kmm/acme:{{{{kernel_label}}}}", site.registry.host);
    let from = format!("{{image: {{reference: '{reference}', path: /opt/lib/modules}}}}");
    define(site, "1.0", &from, "*", "farrier_good");
}

#[tokio::test]
async fn prebuilt_modules_are_loaded_by_their_kernel_before_they_are_published() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    push(&site, &kernel, &kernel, &kernel).await;
    define_as_kmm_has_it(&site);
    site.edit("images/acme.yaml", "  modules: [", "  check: {boot: true}\n  modules: [");
    let built = build(&site, &kernel).exits(0);
    let boot = &built.json()["check"]["boot"];
    assert_eq!(boot["kernel"], kernel.as_str(), "{built}");
    assert_eq!(boot["modules"][0]["outcome"], "loaded", "{built}");
}

#[test]
fn a_prebuilt_image_is_rolled_out() {
    let kernel = kernels::newest().newer;
    let mut live = Live::new([node("n0", &kernel)], "image");
    let pushing = push(&live.site, &kernel, &kernel, &kernel);
    let vendors = tokio::runtime::Runtime::new().unwrap().block_on(pushing);
    define_as_kmm_has_it(&live.site);
    live.site.edit(
        "images/acme.yaml",
        "{test.farrier.dev/hello: 'true'}}\n",
        &format!(
            "{{feature.node.kubernetes.io/pci-15b3.present: 'true'}}}}\n  rollout: [{{strategy: image, namespace: {NAMESPACE}, \
             daemonSet: {DRIVER}, container: driver}}]\n"
        ),
    );
    fs::remove_file(live.site.definitions().join("images/driver.yaml")).unwrap();
    live.start(&[]);
    live.until("the DaemonSet has another image", |live| live.image(DRIVER) != OLD_IMAGE);
    let image = live.image(DRIVER);
    let digest = live.site.inspect(&format!("acme:1.0-{kernel}-debian12-amd64"))["Digest"].clone();
    assert_eq!(image, format!("{}/acme@{}", live.site.location, digest.as_str().unwrap()));
    assert_ne!(image, vendors);
}

/// Finds a kernel's package in an RPM repository by the package's files, whatever form the release has in the package's name.
#[tokio::test(flavor = "multi_thread")]
async fn an_rpm_package_with_modules_of_each_kernel() {
    let (world, others) = (World::new(), "5.14.0-427.13.1.el9_4.x86_64");
    for (name, version, kernel) in [
        ("kmod-acme-5.14.0-503.11.1", "1.4", ROCKY),
        ("kmod-acme-5.14.0-503.11.1", "1.5", ROCKY),
        ("kmod-acme-5.14.0-427.13.1", "1.6", others),
        ("kmod-acme-debuginfo", "1.7", ROCKY),
    ] {
        let place = if name.ends_with("debuginfo") { "usr/lib/debug" } else { "lib/modules" };
        let files = vec![(format!("{place}/{kernel}/extra/acme.ko"), version.to_owned())];
        let package = StandIn { name, version, release: "1.el9", files, ..StandIn::default() };
        let package = package.build(&world.served("os").join("Packages"));
        world.key.sign_package(&package);
    }
    index(&world.served("os"), "gz", "sha256");
    let source = |name: &str| -> SourceSpec {
        let archive = json!({"signedBy": "acme.asc", "repositories": [{"url": "https://acme.invalid/os/"}]});
        let from = json!({"rpm": {"package": name, "from": archive}});
        serde_json::from_value(json!({"name": "acme", "from": from, "subdir": "lib/modules"})).unwrap()
    };
    let kernel = |release: &str| KernelTarget {
        os: "rocky".parse().unwrap(),
        os_version: "9.5".parse().unwrap(),
        release: release.parse().unwrap(),
        arch: Architecture::Amd64,
    };
    let fetcher = world.fetcher();
    let spec = source("kmod-acme-{{release}} | kmod-other");
    for (release, wanted) in
        [(ROCKY, "kmod-acme-5.14.0-503.11.1=1.5-1.el9"), (others, "kmod-acme-5.14.0-427.13.1=1.6-1.el9")]
    {
        let spec = spec.for_kernel(&kernel(release)).unwrap();
        let identity = fetcher.sources().identity(&spec).await.unwrap().identity;
        assert!(identity.starts_with(&format!("{wanted}.x86_64 sha256:")), "{identity}");
        let source = fetcher.sources().fetch(&spec).await.unwrap();
        assert_eq!(source.origin, identity);
        assert!(source.root.join(release).join("extra/acme.ko").is_file(), "{}", source.root.display());
    }
    for (name, release) in [("kmod-acme-{{release}}", "5.14.0-570.12.1.el9_6.x86_64"), ("kmod-other", ROCKY)]
    {
        let spec = source(name);
        let why = fetcher.sources().identity(&spec.for_kernel(&kernel(release)).unwrap()).await;
        let why = error_chain(&why.unwrap_err());
        assert!(why.contains(&format!(" in its repositories for kernel {release}")), "{why}");
    }
    let beside_os = |path: &str| -> SourceSpec {
        let from = json!({"package": "kmod-acme-{{release}}", "from": archive(&["os/", path], "packages")});
        let spec: SourceSpec =
            serde_json::from_value(json!({"name": "acme", "from": {"rpm": from}})).unwrap();
        spec.for_kernel(&kernel(ROCKY)).unwrap()
    };
    // A repository with an invalid answer may contain a newer package.
    fs::create_dir_all(world.served("updates/repodata")).unwrap();
    fs::write(world.served("updates/repodata/repomd.xml"), "<html>busy</html>").unwrap();
    let from = json!({"rpm": {"package": "kmod-other", "from": archive(&["os/", "updates/"], "packages")}});
    let both: SourceSpec = serde_json::from_value(json!({"name": "acme", "from": from})).unwrap();
    let silent = world.fetcher().sources().identity(&both.for_kernel(&kernel(others)).unwrap()).await;
    assert!(matches!(silent, Err(FetchError::Metadata(..))), "{silent:?}");
    // So may a repository that the mirror lacks, or that the site may not use.
    let asking = world.fetcher();
    for (path, why) in [("eus/refused/", "repomd.xml (403)"), ("absent/", "/absent/ (missing)")] {
        let error = asking.sources().identity(&beside_os(path)).await.unwrap_err().to_string();
        assert!(error.contains("choose package kmod-acme-") && error.contains(why), "{error}");
    }
    // A repository that was missing some minutes ago is looked for again.
    for record in fs::read_dir(asking.cache().root().join("records/rpm")).unwrap() {
        let record = record.unwrap().path();
        let mut listing: Value = serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
        listing["asked"] = json!(listing["asked"].as_u64().unwrap() - 600);
        fs::write(record, listing.to_string()).unwrap();
    }
    fs::create_dir_all(world.served("absent/Packages")).unwrap();
    index(&world.served("absent"), "gz", "sha256");
    asking.sources().identity(&beside_os("absent/")).await.unwrap();
    // Packages signed by another key are refused.
    world.define("acme.asc", &SigningKey::new("other").armored());
    let spec = spec.for_kernel(&kernel(ROCKY)).unwrap();
    let error = fetcher.sources().fetch(&spec).await.unwrap_err();
    assert!(matches!(error, FetchError::Signature { .. }), "{error:?}");
}

/// A registry that fails while farrier reads signatures is unreachable, not unsigned.
#[tokio::test(flavor = "multi_thread")]
async fn a_registry_that_fails_is_out_of_reach_and_not_one_without_signatures() {
    let (site, kernel) = (Site::new(), kernels::newest().newer);
    fs::remove_file(site.definitions().join("images/hello.yaml")).unwrap();
    site.manifest("edge-1.yaml", &kernel);
    push(&site, &kernel, &kernel, &kernel).await;
    let url = format!("http://{}/v2/kmm/acme/manifests/{kernel}", site.registry.host);
    let accept = format!("Accept: {}", media_type::OCI_MANIFEST);
    let manifest = run(std::process::Command::new("curl").args(["-sSfH", &accept, &url]));
    let found = answer(200, manifest).header("Content-Type", media_type::OCI_MANIFEST);
    // Answers for the tag and for the image's digest; later requests fail.
    let vendor = FakeHttp::start(vec![found.clone(), found]).await;
    let options = "genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out k.pem";
    run(std::process::Command::new("openssl").args(options.split(' ')).current_dir(site.definitions()));
    let options = "pkey -in k.pem -pubout -out vendor.pub";
    run(std::process::Command::new("openssl").args(options.split(' ')).current_dir(site.definitions()));
    let from = format!(
        "{{image: {{reference: '{}/kmm/acme:{{{{kernel_label}}}}', path: /opt/lib/modules, signedBy: [vendor.pub]}}}}",
        vendor.host
    );
    define(&site, "1.0", &from, "*", "farrier_good");
    let plan = tokio::task::spawn_blocking(move || (site.farrier(&["plan"]), site)).await.unwrap().0.exits(3);
    plan.line("source vendor: ");
    assert!(!plan.to_string().contains("is not signed"), "{plan}");
}
