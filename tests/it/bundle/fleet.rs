//! Bundles for fleets with several operating systems and architectures.

use std::{collections::BTreeSet, fs, path::Path};

use farrier_core::facts::ImageFacts;
use serde_json::Value;

use super::{KERNEL, Site, farrier, text};

const UBUNTU_KERNEL: &str = "6.8.0-51-generic";
const NEXT_KERNEL: &str = "6.1.0-48-amd64";

/// Writes definitions of `one` for nodes with the label `a`, and `two` for nodes with the label `c`.
fn definitions(directory: &Path) -> String {
    for (name, label) in [("one", "a"), ("two", "c")] {
        let text = format!(
            "apiVersion: farrier.dev/v1alpha1\nkind: DriverImage\nmetadata: {{name: {name}}}\nspec:\n  version: '1'\n  \
             template: kbuild\n  vars: {{directory: s, makeArgs: ''}}\n  modules: [m]\n  sources: [{{name: s, from: {{path: {{path: s}}}}}}]\n  \
             nodes: {{matchLabels: {{{label}: b}}}}\n  rollout: []\n"
        );
        fs::create_dir_all(directory.join("images")).unwrap();
        fs::write(directory.join(format!("images/{name}.yaml")), text).unwrap();
    }
    directory.to_str().unwrap().to_owned()
}

/// Publishes images for one kernel of Debian and one of Ubuntu. The kernel of Ubuntu has the same name on both architectures.
async fn published() -> Site {
    let site = Site::start();
    for (name, tag, kernel, os, architecture) in [
        ("one", "debian", KERNEL, "debian 12", "amd64"),
        ("one", "next", NEXT_KERNEL, "debian 12", "amd64"),
        ("two", "ubuntu-amd64", UBUNTU_KERNEL, "ubuntu 24.04", "amd64"),
        ("two", "ubuntu-arm64", UBUNTU_KERNEL, "ubuntu 24.04", "arm64"),
        ("two", "mint", UBUNTU_KERNEL, "mint 22", "arm64"),
    ] {
        let facts = ImageFacts {
            kernel_release: Some(kernel.parse().unwrap()),
            os: Some(os.to_owned()),
            ..ImageFacts::default()
        };
        let files: [(&str, &[u8]); 1] = [("driver.ko", tag.as_bytes())];
        site.publish_for((name, tag), &files, &facts, architecture).await;
    }
    site
}

/// Exports without the inputs, and returns the exit code, the messages, and the tags of the images in the bundle.
fn export(site: &Site, definitions: &str, words: &[&str]) -> (Option<i32>, String, BTreeSet<String>) {
    let directory = tempfile::tempdir().unwrap();
    let (registry, file) = (site.location.to_string(), directory.path().join("site.bundle"));
    let command = [
        "--offline",
        "bundle",
        "export",
        "--registry",
        &registry,
        "--definitions",
        definitions,
        "--incomplete",
    ];
    let to = ["-o", "json", "--to", file.to_str().unwrap()];
    let output = farrier(&[&command[..], words, &to].concat());
    let printed: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let contents = printed["contents"].as_array().into_iter().flatten();
    let images = contents.filter(|row| row["kind"] == "image");
    let tag =
        |row: &Value| format!("{}:{}", row["repository"].as_str().unwrap(), row["tag"].as_str().unwrap());
    (output.status.code(), text(&output.stderr), images.map(tag).collect())
}

fn tags(expected: &[&str]) -> BTreeSet<String> {
    expected.iter().map(ToString::to_string).collect()
}

#[tokio::test]
async fn one_bundle_has_the_kernels_of_several_systems_and_architectures() {
    let site = published().await;
    let directory = tempfile::tempdir().unwrap();
    let definitions = definitions(directory.path());
    let words = ["--kernel", UBUNTU_KERNEL, "--os", "ubuntu", "--os-version", "24.04", "--arch"];
    for (arch, expected) in
        [("arm64", &["two:ubuntu-arm64"][..]), ("amd64,arm64", &["two:ubuntu-amd64", "two:ubuntu-arm64"][..])]
    {
        let (code, said, found) = export(&site, &definitions, &[&words[..], &[arch]].concat());
        assert_eq!((code, found), (Some(0), tags(expected)), "{said}");
        assert!(said.contains(&format!("missing: one for {UBUNTU_KERNEL} (ubuntu 24.04, arm64)")), "{said}");
        assert!(!said.contains("missing: two for"), "{said}");
    }
    let words =
        ["--kernel", KERNEL, "--kernel", UBUNTU_KERNEL, "--os", "debian,ubuntu", "--os-version", "12"];
    let each = [&words[..], &["--os-version", "24.04", "--arch", "amd64"]].concat();
    let (code, said, found) = export(&site, &definitions, &each);
    assert_eq!((code, found), (Some(0), tags(&["one:debian", "two:ubuntu-amd64"])), "{said}");
    assert!(!said.contains(&format!("{KERNEL} (ubuntu")), "{said}");
    let (code, said, _) =
        export(&site, &definitions, &[&words[..], &["--arch", "amd64,amd64,arm64"]].concat());
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("--kernel has 2 values: give one for all kernels, or 3, one for each"), "{said}");
}

fn node(directory: &Path, name: &str, (os, os_version, arch): (&str, &str, &str), kernel: &str, label: &str) {
    let text = format!(
        "apiVersion: v1\nkind: Node\nmetadata:\n  name: {name}\n  labels:\n    {label}: b\n    \
         feature.node.kubernetes.io/kernel-version.full: {kernel}\n    \
         feature.node.kubernetes.io/system-os_release.ID: {os}\n    \
         feature.node.kubernetes.io/system-os_release.VERSION_ID: '{os_version}'\n\
         status:\n  nodeInfo: {{architecture: {arch}, kernelVersion: {kernel}, operatingSystem: linux}}\n"
    );
    fs::write(directory.join(format!("{name}.yaml")), text).unwrap();
}

#[tokio::test]
async fn a_bundle_for_a_cluster_has_what_its_nodes_run_and_will_boot() {
    let site = published().await;
    let directory = tempfile::tempdir().unwrap();
    let (definitions, cluster) = (definitions(directory.path()), directory.path().join("cluster"));
    fs::create_dir(&cluster).unwrap();
    node(&cluster, "n1", ("debian", "12", "amd64"), KERNEL, "a");
    node(&cluster, "n2", ("ubuntu", "24.04", "arm64"), UBUNTU_KERNEL, "c");
    let cluster = format!("dir:{}", cluster.display());
    let words = ["--cluster", &cluster];
    let (code, said, found) = export(&site, &definitions, &words);
    assert_eq!((code, found), (Some(0), tags(&["one:debian", "two:ubuntu-arm64"])), "{said}");
    assert!(!said.contains("missing: one for") && !said.contains("missing: two for"), "{said}");

    fs::create_dir(directory.path().join("announced")).unwrap();
    let announced = format!(
        "apiVersion: farrier.dev/v1alpha1\nkind: AnnouncedKernels\nmetadata: {{name: next}}\nspec:\n  kernels:\n  \
         - {{os: debian, osVersion: '12', release: {NEXT_KERNEL}, arch: amd64}}\n"
    );
    fs::write(directory.path().join("announced/next.yaml"), announced).unwrap();
    let (code, said, found) = export(&site, &definitions, &words);
    assert_eq!((code, found), (Some(0), tags(&["one:debian", "one:next", "two:ubuntu-arm64"])), "{said}");
    let (.., found) = export(&site, &definitions, &[&words[..], &["--image", "two"]].concat());
    assert_eq!(found, tags(&["two:ubuntu-arm64"]));
    let (code, said, _) = export(&site, &definitions, &[&words[..], &["--kernel", KERNEL]].concat());
    assert_eq!(code, Some(2), "{said}");
}
