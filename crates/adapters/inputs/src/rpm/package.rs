//! Packages of RPM repositories, the kernels they are for, and the choice of the newest package for a kernel.

use std::cmp::Ordering;

use farrier_core::{image::checked::matches_glob, kernel::rpm_version};
use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;

/// A package as described by a repository's metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RpmPackage {
    pub name: String,
    /// Epoch; 0 if there is none.
    pub epoch: u64,
    /// Version and release, joined by `-`.
    pub version: String,
    /// RPM's architecture name: `x86_64`, `noarch`.
    pub arch: String,
    /// Checksum of the file.
    pub checksum: Checksum,
    /// Location relative to `base`, or to the repository's address if there is no `base`.
    pub location: String,
    /// Address of the original repository (`xml:base`), which merged repositories name.
    #[serde(default)]
    pub base: Option<String>,
    /// Kernel releases that the package is for, as `uname -r` prints them. A trailing `-*` stands for every flavor.
    pub releases: Vec<String>,
}

impl RpmPackage {
    /// Returns `name=version-release.arch sha256:...`.
    pub fn identity(&self) -> String {
        let Self { name, version, arch, checksum, .. } = self;
        format!("{name}={version}.{arch} {checksum}")
    }

    /// Whether the package is for this kernel.
    pub fn is_for(&self, release: &str) -> bool {
        let without_flavor = release.rsplit_once('-').map(|(version, _)| version);
        self.releases.iter().any(|known| {
            known == release || known.strip_suffix("-*").is_some_and(|prefix| Some(prefix) == without_flavor)
        })
    }

    /// Compares two packages in RPM's version order.
    pub fn compare(&self, other: &Self) -> Ordering {
        self.epoch.cmp(&other.epoch).then_with(|| rpm_version::compare(&self.version, &other.version))
    }

    /// Uses the package's version as the kernel release if neither the package's provides nor its files name a release.
    pub(crate) fn fill_missing_releases(&mut self) {
        if self.releases.is_empty() {
            let Self { version, arch, .. } = self;
            self.releases = vec![format!("{version}.{arch}"), version.clone()];
        }
    }
}

/// Extracts the kernel release from the path of a packaged file. Knows the directories of modules and headers in each distribution.
pub fn release_in(path: &str) -> Option<String> {
    let path = path.strip_prefix('/').unwrap_or(path);
    let component_after =
        |prefix: &str| path.strip_prefix(prefix)?.split('/').next().filter(|name| !name.is_empty());
    // Modules, then headers of RHEL, Fedora and `make binrpm-pkg`, then headers of Azure Linux.
    let prefixes = ["lib/modules/", "usr/lib/modules/", "usr/src/kernels/", "usr/src/linux-headers-"];
    if let Some(release) = prefixes.into_iter().find_map(component_after) {
        return Some(release.to_owned());
    }
    // SUSE: `linux-<version>-obj/<architecture>/<flavor>`, next to the sources in `linux-<version>`.
    let version = component_after("usr/src/linux-")?;
    if !version.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    match version.strip_suffix("-obj") {
        Some(version) => path.split('/').nth(4).map(|flavor| format!("{version}-{flavor}")),
        None => Some(format!("{version}-*")),
    }
}

/// Expands a list of alternative package names, separated by ` | `, for a release.
///
/// `{{flavor}}` becomes the part after the release's last `-`; a name that contains `{{flavor}}` is dropped if the release
/// has no flavor. `{{release}}` becomes `*`, because package names shorten the release in different ways.
pub fn names_for(alternatives: &str, release: &str) -> Vec<String> {
    let flavor = release.rsplit_once('-').map(|(_, flavor)| flavor);
    let with_flavor = |name: &str| match flavor {
        Some(flavor) => Some(name.replace("{{flavor}}", flavor)),
        None => (!name.contains("{{flavor}}")).then(|| name.to_owned()),
    };
    alternatives.split(" | ").filter_map(with_flavor).map(|name| name.replace("{{release}}", "*")).collect()
}

/// Returns the newest package for this kernel. The first name with such a package wins.
pub fn choose<'a>(packages: &'a [RpmPackage], names: &[String], release: &str) -> Option<&'a RpmPackage> {
    names.iter().find_map(|name| {
        // Among equal versions the first repository wins; `max_by` returns the last, hence `rev`.
        let matching = packages
            .iter()
            .rev()
            .filter(|package| matches_glob(name, &package.name) && package.is_for(release));
        matching.max_by(|a, b| a.compare(b))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn package(name: &str, epoch: u64, version: &str, releases: &[&str]) -> RpmPackage {
        RpmPackage {
            name: name.to_owned(),
            epoch,
            version: version.to_owned(),
            arch: "x86_64".to_owned(),
            checksum: Checksum::sha256(&"0".repeat(64)),
            location: String::new(),
            base: None,
            releases: releases.iter().map(|release| (*release).to_owned()).collect(),
        }
    }

    #[test]
    fn release_comes_from_file_paths() {
        for (path, release) in [
            ("/lib/modules/6.1.176-Acme+/kernel/lib/crc7.ko", Some("6.1.176-Acme+")),
            ("/usr/lib/modules/6.4.0-150600.23.60-default", Some("6.4.0-150600.23.60-default")),
            ("/usr/src/kernels/5.14.0-503.el9.x86_64+rt/Makefile", Some("5.14.0-503.el9.x86_64+rt")),
            ("/usr/src/linux-headers-6.6.57.1-2.azl3/Kconfig", Some("6.6.57.1-2.azl3")),
            ("/usr/src/linux-6.4.0-150600.23.60-obj/x86_64/azure/.config", Some("6.4.0-150600.23.60-azure")),
            ("/usr/src/linux-6.4.0-150600.23.60/Makefile", Some("6.4.0-150600.23.60-*")),
            ("/usr/src/linux-6.4.0-150600.23.60-obj", None),
            ("/usr/src/linux-obj", None),
            ("/usr/share/doc/x", None),
            ("/lib/modules/", None),
        ] {
            assert_eq!(release_in(path).as_deref(), release, "{path}");
        }
    }

    #[test]
    fn newest_package_for_a_kernel() {
        let known = [
            package("kernel-devel", 0, "5.14.0-503.el9", &["5.14.0-503.el9.x86_64"]),
            package("kernel-rt-devel", 0, "5.14.0-503.el9", &["5.14.0-503.el9.x86_64+rt"]),
            package("kernel-default-devel", 0, "6.4.0-150600.23.60.5", &["6.4.0-150600.23.60-default"]),
            package("kernel-devel", 0, "6.4.0-150600.23.60.4", &["6.4.0-150600.23.60-*"]),
            package("kernel-devel", 1, "6.4.0-150600.23.60.3", &["6.4.0-150600.23.60-*"]),
        ];
        let chosen = |group: &str, release: &str| {
            choose(&known, &names_for(group, release), release)
                .map(|found| format!("{}={}", found.name, found.version))
        };
        let rhel = "kernel-devel | kernel-rt-devel";
        assert_eq!(chosen(rhel, "5.14.0-503.el9.x86_64").unwrap(), "kernel-devel=5.14.0-503.el9");
        assert_eq!(chosen(rhel, "5.14.0-503.el9.x86_64+rt").unwrap(), "kernel-rt-devel=5.14.0-503.el9");
        assert_eq!(chosen(rhel, "5.14.0-504.el9.x86_64"), None);
        let suse = "6.4.0-150600.23.60-default";
        assert_eq!(
            chosen("kernel-{{flavor}}-devel", suse).unwrap(),
            "kernel-default-devel=6.4.0-150600.23.60.5"
        );
        assert_eq!(
            chosen("kernel-devel", suse).unwrap(),
            "kernel-devel=6.4.0-150600.23.60.3",
            "the epoch counts first"
        );
        assert_eq!(chosen("kernel-{{flavor}}-devel", "6.4.0-150600.23.60-azure"), None);
        assert_eq!(names_for("kernel-{{flavor}} | kernel", "6.12"), ["kernel"]);
    }

    #[test]
    fn version_is_the_fallback_release() {
        let mut azure = package("kernel-devel", 0, "6.6.57.1-2.azl3", &[]);
        azure.fill_missing_releases();
        assert!(azure.is_for("6.6.57.1-2.azl3") && azure.is_for("6.6.57.1-2.azl3.x86_64"));
        assert_eq!(
            azure.identity(),
            format!("kernel-devel=6.6.57.1-2.azl3.x86_64 sha256:{}", "0".repeat(64))
        );
    }
}
