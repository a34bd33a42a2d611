//! Reproducible builds: equal inputs give the same image, bill of materials and provenance on another day, in another directory
//! and with another cache. Another engine gives the same image and bill of materials.
use std::collections::BTreeMap;

use farrier_core::{
    image::Digest,
    kernel::{Architecture, BootstrapSpec},
};
use farrier_inputs::{FetchOptions, Fetcher, PackageRoot};

use crate::support::{
    kernels::{self, new_cache},
    site::Site,
};

/// Returns the digests of the image and of its referrers by kind.
fn built(engine: &str, kernel: &str) -> BTreeMap<String, String> {
    let site = Site::new();
    let modules = "  modules: [farrier_hello]\n";
    site.edit(
        "images/hello.yaml",
        modules,
        &format!("{modules}  outputs: [deb, deb-meta, initramfs, sysext]\n"),
    );
    let target = ["build", "hello", "--kernel", kernel, "--os", "debian", "--os-version", "12"];
    let mut command = site.command(&[&target[..], &["--arch", "amd64", "--push", "-o", "json"]].concat());
    command.env("FARRIER_ENGINE", engine).current_dir(site.path("definitions"));
    let run = site.finish(command.spawn().unwrap()).exits(0).json();
    assert_eq!(run["outcome"], "built", "{engine}");
    let image = run["digest"].as_str().unwrap();
    let beside = site.inspect_raw(&format!("hello:{}", image.replace(':', "-")));
    let mut digests = BTreeMap::from([("image".to_owned(), image.to_owned())]);
    for one in beside["manifests"].as_array().unwrap() {
        let kind = one["artifactType"].as_str().unwrap().to_owned();
        digests.insert(kind, one["digest"].as_str().unwrap().to_owned());
    }
    digests
}

#[test]
fn another_directory_time_cache_and_engine() {
    let kernel = kernels::newest().newer;
    let first = built("sandbox", &kernel);
    let kinds: Vec<&str> = first.keys().map(String::as_str).collect();
    assert_eq!(
        kinds,
        [
            "application/spdx+json",
            "application/vnd.cyclonedx+json",
            "application/vnd.farrier.check-report.v1+json",
            "application/vnd.farrier.deb-meta.v1",
            "application/vnd.farrier.deb.v1",
            "application/vnd.farrier.initramfs.v1",
            "application/vnd.farrier.sysext.v1",
            "application/vnd.in-toto+json",
            "image",
        ]
    );
    assert_eq!(built("sandbox", &kernel), first);
    // The provenance records what the sandbox's canary was refused; a daemon's container has no canary.
    let but_provenance = |mut digests: BTreeMap<String, String>| {
        digests.remove("application/vnd.in-toto+json").expect("the image has a provenance");
        digests
    };
    assert_eq!(but_provenance(built("docker", &kernel)), but_provenance(first));
}

/// Builds a root file system twice from the same packages. One machine's cache holds only one copy, so the second build
/// simulates another machine.
#[tokio::test]
async fn a_root_file_system_that_is_made_again() {
    let spec = BootstrapSpec {
        suite: "bookworm".parse().unwrap(),
        extra_suites: Vec::new(),
        components: Vec::new(),
        include: ["make", "perl", "kmod"].map(|name| name.parse().unwrap()).to_vec(),
        mirror: None,
        signed_by: None,
    };
    for root in [PackageRoot::Toolchain(spec.clone()), PackageRoot::RuntimeBase(spec)] {
        let mut made = Vec::new();
        for _ in 0..2 {
            let directory = tempfile::tempdir().unwrap();
            let fetcher = Fetcher::new(new_cache(directory.path()), FetchOptions::default());
            let found = fetcher.root_fs().bootstrap(&root, Architecture::Amd64).await.unwrap();
            assert_eq!(Digest::of(&std::fs::read(&found.file).unwrap()), found.layer.digest);
            made.push(found.layer);
        }
        assert_eq!(made[0], made[1], "{root:?}");
    }
}
