//! The built-in families of RPM distributions, each with stand-in packages at the paths of the distribution's mirrors. These
//! tests do not cover the distributions' own packages.
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use farrier_core::kernel::{Architecture, HeaderSource, KernelFamily, KernelTarget, match_family};
use farrier_definitions as definitions;
use farrier_inputs::{FetchError, Lookup};
use oci::error_chain;
use serde_json::json;
use url::Url;

use crate::{
    rpm::{World, headers},
    support::rpm_repository::{SigningKey, StandIn, index, tiny_headers},
};

/// Family, distribution, version, release, and the packages that contain the release's headers.
const KERNELS: [(&str, &str, &str, &str, &[&str]); 30] = [
    ("rhel-8", "rhel", "8.10", EL8, KERNEL),
    ("rhel-9", "rhel", "9.5", EL9, KERNEL),
    ("rhel-10", "rhel", "10.0", EL10, KERNEL),
    ("rhcos-8", "rhcos", "4.12", EL8, KERNEL),
    ("rhcos-9", "rhcos", "4.18", EL9, KERNEL),
    ("scos-9", "scos", "4.18", EL9, KERNEL),
    ("scos-10", "scos", "4.20", EL10, KERNEL),
    ("rocky-8", "rocky", "8.10", EL8, KERNEL),
    ("rocky-9", "rocky", "9.5", EL9, KERNEL),
    ("rocky-10", "rocky", "10.0", EL10, KERNEL),
    ("almalinux-8", "almalinux", "8.10", EL8, KERNEL),
    ("almalinux-9", "almalinux", "9.5", EL9, KERNEL),
    ("almalinux-10", "almalinux", "10.0", EL10, KERNEL),
    ("centos-stream-8", "centos", "8", EL8, KERNEL),
    ("centos-stream-9", "centos", "9", EL9, KERNEL),
    ("centos-stream-10", "centos", "10", EL10, KERNEL),
    ("oracle-8", "ol", "8.10", EL8, KERNEL),
    ("oracle-9", "ol", "9.5", EL9, KERNEL),
    ("oracle-10", "ol", "10.0", EL10, KERNEL),
    ("oracle-8-uek-7", "ol", "8.10", "5.15.0-209.161.7.2.el8uek.x86_64", &["kernel-uek-devel"]),
    ("oracle-9-uek-8", "ol", "9.6", "6.12.0-100.28.2.el9uek.x86_64", &["kernel-uek-devel"]),
    ("fedora", "fedora", "42", "6.14.0-63.fc42.x86_64", KERNEL),
    ("sles-15", "sles", "15.6", SUSE, DEFAULT),
    ("sles-16", "sles", "16.0", SUSE, DEFAULT),
    ("opensuse-leap-15", "opensuse-leap", "15.6", SUSE, DEFAULT),
    ("opensuse-leap-16", "opensuse-leap", "16.0", SUSE, DEFAULT),
    ("amazon-linux-2023", "amzn", "2023", "6.1.112-122.189.amzn2023.x86_64", KERNEL),
    ("azure-linux-3", "azurelinux", "3.0", AZURE, KERNEL),
    ("openeuler-22-03", "openEuler", "22.03", "5.10.0-216.0.0.115.oe2203sp4.x86_64", KERNEL),
    ("openeuler-24-03", "openEuler", "24.03", "6.6.0-72.0.0.76.oe2403sp1.x86_64", KERNEL),
];

const KERNEL: &[&str] = &["kernel-devel"];
const DEFAULT: &[&str] = &["kernel-default-devel", "kernel-devel"];
const EL8: &str = "4.18.0-553.el8_10.x86_64";
const EL9: &str = "5.14.0-503.11.1.el9_5.x86_64";
const EL10: &str = "6.12.0-55.9.1.el10_0.x86_64";
const SUSE: &str = "6.4.0-150600.23.60-default";
const AZURE: &str = "6.6.57.1-2.azl3";

/// Builds a signed stand-in, once for each name and release.
fn stand_in(
    world: &World,
    made: &mut BTreeMap<(String, String), PathBuf>,
    name: &str,
    release: &str,
) -> PathBuf {
    let key = (name.to_owned(), release.to_owned());
    let package_of = || {
        let (version, rest) = release.split_once('-').unwrap();
        let is_suse = release.ends_with("-default");
        let build = if is_suse {
            "usr/src/linux-6.4.0-150600.23.60-obj/x86_64/default".to_owned()
        } else {
            format!("usr/src/kernels/{release}")
        };
        let provides = format!("kernel-devel-uname-r = {release}");
        // SUSE ships sources and flavor in separate packages.
        let files = if is_suse && name == "kernel-devel" {
            vec![("usr/src/linux-6.4.0-150600.23.60/Makefile".to_owned(), String::new())]
        } else {
            tiny_headers(&build, release)
        };
        let package = StandIn {
            name,
            version,
            release: rest.trim_end_matches(".x86_64").trim_end_matches("-default"),
            provides: if is_suse { "" } else { &provides },
            requires: "",
            files,
        };
        let package = package.build(&world.definitions().join("made"));
        world.key.sign_package(&package);
        package
    };
    made.entry(key).or_insert_with(package_of).clone()
}

#[tokio::test]
async fn each_finds_headers_where_its_distribution_has_them() {
    let world = World::new();
    let families = definitions::load(None).unwrap().families;
    let mut made = BTreeMap::new();
    for (name, os, os_version, release, packages) in KERNELS {
        let target = KernelTarget {
            os: os.parse().unwrap(),
            os_version: os_version.parse().unwrap(),
            release: release.parse().unwrap(),
            arch: Architecture::Amd64,
        };
        let family = match_family(&families, &target).unwrap();
        assert_eq!(family.metadata.name, name);
        let HeaderSource::Rpm(rpm) = &family.spec.headers else { panic!("{name} has no packages") };
        // Each distribution has a separate server directory, addressed by the URL's path.
        let repository = rpm.from.repositories[0].address().expand(&target.repository_version(), "x86_64");
        let url = Url::parse(&repository).unwrap();
        let is_list = Path::new(url.path()).extension().is_some_and(|end| end == "list");
        let place = format!("{name}{}", if is_list { "/core/" } else { url.path() });
        let directory = world.served(&place);
        for package in packages {
            let package = stand_in(&world, &mut made, package, release);
            std::fs::create_dir_all(&directory).unwrap();
            std::fs::copy(&package, directory.join(package.file_name().unwrap())).unwrap();
        }
        index(&directory, "gz", "sha256");
        world.key.sign_file(&directory.join("repodata/repomd.xml"));
        let host = url.host_str().unwrap();
        if is_list {
            let list = world.served(&format!("{name}{}", url.path()));
            std::fs::create_dir_all(list.parent().unwrap()).unwrap();
            std::fs::write(list, format!("https://{host}/core/\n")).unwrap();
        }
        world.define(&rpm.from.signed_by.display().to_string(), &world.key.armored());

        let mut site = world.site();
        let server = site["mirrors"][0]["to"][0].as_str().unwrap().to_owned();
        site["mirrors"] = json!([{"from": format!("https://{host}/"), "to": [format!("{server}{name}/")]}]);
        let found = world.fetcher_of(&site).headers().find(&family.spec.headers, &target).await;
        let found = found.unwrap_or_else(|error| panic!("{name}: {}", error_chain(&error)));
        let Lookup::Found(set) = found else { panic!("{name}: {found:?}") };
        assert_eq!(set.facts.release.as_str(), release, "{name}");
        assert_eq!(set.origin.len(), packages.len(), "{name}: {:?}", set.origin);
    }
    // Every RPM family must appear in the list of kernels.
    let is_rpm = |family: &&KernelFamily| matches!(family.spec.headers, HeaderSource::Rpm(_));
    let names = families.iter().filter(is_rpm).map(|family| family.metadata.name.as_str());
    let untried: Vec<&str> = names.filter(|name| KERNELS.iter().all(|kernel| kernel.0 != *name)).collect();
    assert_eq!(untried, [""; 0]);
}

/// These packages do not declare their kernel in `Provides`; farrier derives the kernel from the files or from the version.
#[tokio::test]
async fn suse_s_and_azure_s_packages_are_told_by_their_files() {
    let world = World::new();
    let build = "usr/src/linux-6.4.0-150600.23.60-obj/x86_64/default";
    let packages = world.served("repo/x86_64");
    let stand_in = |name, version, release, files| {
        StandIn { name, version, release, files, ..StandIn::default() }.build(&packages)
    };
    let source = vec![("usr/src/linux-6.4.0-150600.23.60/Makefile".to_owned(), String::new())];
    for package in [
        stand_in("kernel-default-devel", "6.4.0", "150600.23.60.5", tiny_headers(build, SUSE)),
        stand_in("kernel-devel", "6.4.0", "150600.23.60.5", source),
        stand_in(
            "azl-devel",
            "6.6.57.1",
            "2.azl3",
            tiny_headers(&format!("usr/src/linux-headers-{AZURE}"), AZURE),
        ),
    ] {
        world.key.sign_package(&package);
    }
    // openSUSE's layout: signed metadata, xz compression and SHA-512 checksums.
    index(&world.served("repo"), "xz", "sha512");
    let unsigned = headers(&["kernel-{{flavor}}-devel", "kernel-devel"], &["repo/"], "both");
    let error = world.find(&unsigned, SUSE).await.unwrap_err();
    assert!(error_chain(&error).contains("there is no signature"), "{}", error_chain(&error));
    world.key.sign_file(&world.served("repo/repodata/repomd.xml"));

    let suse = world.find(&unsigned, SUSE).await;
    assert_eq!(
        World::origin(suse),
        ["kernel-default-devel=6.4.0-150600.23.60.5.x86_64", "kernel-devel=6.4.0-150600.23.60.5.x86_64"]
    );
    let azure = headers(&["azl-devel"], &["repo/"], "metadata");
    assert_eq!(World::origin(world.find(&azure, AZURE).await), ["azl-devel=6.6.57.1-2.azl3.x86_64"]);

    // A signature by another key is refused.
    SigningKey::new("stranger").sign_file(&world.served("repo/repodata/repomd.xml"));
    let error = world.find(&azure, AZURE).await.unwrap_err();
    assert!(matches!(error, FetchError::Signature { .. }), "{}", error_chain(&error));
}
