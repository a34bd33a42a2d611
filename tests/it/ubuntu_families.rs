//! farrier's Ubuntu families, each with stand-in packages in the release's suites behind the site's mirror. Names and
//! dependencies follow Ubuntu's kernels (`debian.*/control.stub.in` of its sources). These tests do not cover Ubuntu's own
//! packages.
use std::collections::BTreeSet;

use farrier_core::kernel::{Architecture, HeaderSource, KernelTarget, match_family};
use farrier_definitions as definitions;
use farrier_inputs::{FetchOptions, Fetcher, Lookup};
use farrier_local::cache::Cache;
use farrier_net::{Net, NetOptions};
use oci::error_chain;
use serde_json::json;

use crate::support::{
    certificates::{Authority, LATER},
    rpm_repository::tiny_headers,
    tls_archive::{Deb, TlsArchive},
};

/// Family, version, suite, release, architecture, and the package with the flavors' common headers. That package is named after
/// the kernel's source package, which differs for cloud and hardware-enablement kernels.
const KERNELS: [(&str, &str, &str, &str, Architecture, &str); 12] = [
    ("ubuntu-20-04", "20.04", "focal", "5.4.0-26-generic", AMD64, "linux-headers-5.4.0-26"),
    ("ubuntu-20-04", "20.04", "focal-updates", "5.4.0-1148-aws", AMD64, "linux-aws-headers-5.4.0-1148"),
    (
        "ubuntu-20-04",
        "20.04",
        "focal-security",
        "5.15.0-139-generic",
        AMD64,
        "linux-hwe-5.15-headers-5.15.0-139",
    ),
    ("ubuntu-22-04", "22.04", "jammy", "5.15.0-25-lowlatency", AMD64, "linux-headers-5.15.0-25"),
    (
        "ubuntu-22-04",
        "22.04",
        "jammy-updates",
        "6.8.0-1040-azure",
        AMD64,
        "linux-azure-6.8-headers-6.8.0-1040",
    ),
    (
        "ubuntu-22-04",
        "22.04",
        "jammy-security",
        "6.8.0-1039-nvidia-64k",
        ARM64,
        "linux-nvidia-6.8-headers-6.8.0-1039",
    ),
    ("ubuntu-24-04", "24.04", "noble", "6.8.0-31-generic-64k", ARM64, "linux-headers-6.8.0-31"),
    (
        "ubuntu-24-04",
        "24.04",
        "noble-updates",
        "6.14.0-1012-gcp",
        AMD64,
        "linux-gcp-6.14-headers-6.14.0-1012",
    ),
    (
        "ubuntu-24-04",
        "24.04",
        "noble-security",
        "6.8.0-1035-oracle",
        AMD64,
        "linux-oracle-headers-6.8.0-1035",
    ),
    ("ubuntu-26-04", "26.04", "resolute", "7.0.0-14-generic", AMD64, "linux-headers-7.0.0-14"),
    (
        "ubuntu-26-04",
        "26.04",
        "resolute-updates",
        "7.0.0-1003-oracle-64k",
        ARM64,
        "linux-oracle-headers-7.0.0-1003",
    ),
    ("ubuntu-26-04", "26.04", "resolute-security", "7.0.0-15-realtime", AMD64, "linux-headers-7.0.0-15"),
];

const AMD64: Architecture = Architecture::Amd64;
const ARM64: Architecture = Architecture::Arm64;

/// Returns the packages of a kernel's headers: the flavor's package and the common one that it depends on.
fn packages(release: &str, arch: Architecture, common: &str) -> [Deb; 2] {
    let build = format!("usr/src/linux-headers-{release}");
    let mut files = tiny_headers(&build, release);
    if arch == ARM64 {
        for (_, text) in &mut files {
            *text = text.replace("CONFIG_X86_64=y", "CONFIG_ARM64=y");
        }
    }
    let flavor = Deb {
        name: format!("linux-headers-{release}"),
        source: "linux",
        architecture: if arch == ARM64 { "arm64" } else { "amd64" },
        depends: common.to_owned(),
        files,
        link: Some((format!("lib/modules/{release}/build"), format!("/{build}"))),
    };
    let common = Deb {
        name: common.to_owned(),
        source: "linux",
        architecture: "all",
        depends: String::new(),
        files: vec![(format!("usr/src/{common}/Makefile"), String::new())],
        link: None,
    };
    [flavor, common]
}

#[tokio::test]
async fn each_finds_headers_of_each_flavor_in_its_suites() {
    let authority = Authority::new();
    authority.issue("server", "IP:127.0.0.1", LATER);
    authority.issue("client", "DNS:farrier.test", LATER);
    let suites =
        KERNELS.map(|(_, _, suite, release, arch, common)| (suite, packages(release, arch, common).into()));
    let archive = TlsArchive::of(&authority, &suites);
    let file = |name: &str| authority.path(name).display().to_string();
    let site = json!({
        "mirrors": [{"from": "https://ubuntu.invalid/ubuntu/", "to": [format!("https://{}/", archive.host())]}],
        "hosts": [{
            "host": archive.host(), "caFile": file("ca.pem"), "clientCertificate": file("client.pem"),
            "clientKey": {"file": file("client.key")},
        }],
    });
    let directory = tempfile::tempdir().unwrap();
    let options = NetOptions {
        site: serde_json::from_value(site).unwrap(),
        root: directory.path().to_owned(),
        ..NetOptions::default()
    };
    let cache = Cache::open(directory.path().join("cache")).unwrap();
    let fetcher = Fetcher::new(cache, FetchOptions::default()).with_net(Net::new(options).unwrap());

    let families = definitions::load(None).unwrap().families;
    for (name, os_version, _, release, arch, common) in KERNELS {
        let target = KernelTarget {
            os: "ubuntu".parse().unwrap(),
            os_version: os_version.parse().unwrap(),
            release: release.parse().unwrap(),
            arch,
        };
        let family = match_family(&families, &target).unwrap();
        assert_eq!(family.metadata.name, name);
        // The family's own header source, except for the key.
        let mut headers = serde_json::to_value(&family.spec.headers).unwrap();
        headers["apt"]["signedBy"] = json!(archive.keyring());
        let headers: HeaderSource = serde_json::from_value(headers).unwrap();
        let found = fetcher.headers().find(&headers, &target).await;
        let found = found.unwrap_or_else(|error| panic!("{release}: {}", error_chain(&error)));
        let Lookup::Found(set) = found else { panic!("{release}: {found:?}") };
        assert_eq!(set.facts.release.as_str(), release);
        let origin: BTreeSet<&str> =
            set.origin.iter().filter_map(|package| package.split(['=', ' ']).next()).collect();
        assert_eq!(
            origin,
            BTreeSet::from([format!("linux-headers-{release}").as_str(), common]),
            "{release}"
        );
    }
    // Every Ubuntu family must appear in the list of kernels.
    let shipped: BTreeSet<&str> = families
        .iter()
        .map(|family| family.metadata.name.as_str())
        .filter(|name| name.starts_with("ubuntu-"))
        .collect();
    assert_eq!(shipped, KERNELS.map(|kernel| kernel.0).into());
}
