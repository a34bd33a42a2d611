//! Pure: packages of RPM repositories: their kernels, and the choice of the newest.

use std::cmp::Ordering;

use farrier_core::{image::checked::fits, kernel::rpm_version};
use serde::{Deserialize, Serialize};

use crate::inputs::checksum::Checksum;

/// A package as described by a repository's metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RpmPackage {
    /// Package name.
    pub name: String,
    /// Epoch; 0 if there is none.
    pub epoch: u64,
    /// Version and release, joined by `-`.
    pub version: String,
    /// RPM's architecture name: `x86_64`, `noarch`.
    pub arch: String,
    /// Checksum of the file.
    pub checksum: Checksum,
    /// Location relative to the repository's address, or to `base`.
    pub location: String,
    /// Address of the original repository, if it differs: merged repositories name it (`xml:base`).
    #[serde(default)]
    pub base: Option<String>,
    /// Kernel releases that the package is for, as `uname -r` prints them. One that ends in `-*` covers every flavor.
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
        let without_flavour = release.rsplit_once('-').map(|(version, _)| version);
        self.releases.iter().any(|known| {
            known == release || known.strip_suffix("-*").is_some_and(|known| Some(known) == without_flavour)
        })
    }

    /// Compares two packages in RPM's version order.
    pub fn compare(&self, other: &Self) -> Ordering {
        self.epoch.cmp(&other.epoch).then_with(|| rpm_version::compare(&self.version, &other.version))
    }

    /// Sets the package's own version as its kernel release, if neither its provides nor its files name one.
    pub fn releases_by_version(&mut self) {
        if self.releases.is_empty() {
            let Self { version, arch, .. } = self;
            self.releases = vec![format!("{version}.{arch}"), version.clone()];
        }
    }
}

/// Returns the kernel release that a file path of a package names, in the distributions' layouts of modules and headers.
pub fn release_in(path: &str) -> Option<String> {
    let path = path.strip_prefix('/').unwrap_or(path);
    let below = |start: &str| path.strip_prefix(start)?.split('/').next().filter(|name| !name.is_empty());
    // Modules; headers of RHEL and Fedora, of Azure Linux, and of `make binrpm-pkg`.
    let places = ["lib/modules/", "usr/lib/modules/", "usr/src/kernels/", "usr/src/linux-headers-"];
    if let Some(release) = places.into_iter().find_map(below) {
        return Some(release.to_owned());
    }
    // SUSE: `linux-<version>-obj/<architecture>/<flavour>`, and the sources in `linux-<version>` next to it.
    let version = below("usr/src/linux-")?;
    if !version.starts_with(|c: char| c.is_ascii_digit()) {
        return None;
    }
    match version.strip_suffix("-obj") {
        Some(version) => path.split('/').nth(4).map(|flavour| format!("{version}-{flavour}")),
        None => Some(format!("{version}-*")),
    }
}

/// Returns the names of a group for a release. `{{flavour}}` is the part after the release's last `-`; `{{release}}` matches any
/// text, because names shorten it in different ways. A name with a flavor is skipped if the release has none.
pub fn names_for(group: &str, release: &str) -> Vec<String> {
    let flavour = release.rsplit_once('-').map(|(_, flavour)| flavour);
    let named = |name: &str| match flavour {
        Some(flavour) => Some(name.replace("{{flavour}}", flavour)),
        None => (!name.contains("{{flavour}}")).then(|| name.to_owned()),
    };
    group.split(" | ").filter_map(named).map(|name| name.replace("{{release}}", "*")).collect()
}

/// Returns the newest package for this kernel, of the first name that has one.
pub fn choose<'a>(packages: &'a [RpmPackage], names: &[String], release: &str) -> Option<&'a RpmPackage> {
    names.iter().find_map(|name| {
        // Of equals take the first, like the repositories' order; `max_by` takes the last.
        let fit =
            packages.iter().rev().filter(|package| fits(name, &package.name) && package.is_for(release));
        fit.max_by(|a, b| a.compare(b))
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
    fn files_tell_the_release() {
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
    fn the_package_of_a_kernel() {
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
            chosen("kernel-{{flavour}}-devel", suse).unwrap(),
            "kernel-default-devel=6.4.0-150600.23.60.5"
        );
        assert_eq!(
            chosen("kernel-devel", suse).unwrap(),
            "kernel-devel=6.4.0-150600.23.60.3",
            "the epoch counts first"
        );
        assert_eq!(chosen("kernel-{{flavour}}-devel", "6.4.0-150600.23.60-azure"), None);
        assert_eq!(names_for("kernel-{{flavour}} | kernel", "6.12"), ["kernel"]);
    }

    #[test]
    fn without_a_word_the_version_is_the_release() {
        let mut azure = package("kernel-devel", 0, "6.6.57.1-2.azl3", &[]);
        azure.releases_by_version();
        assert!(azure.is_for("6.6.57.1-2.azl3") && azure.is_for("6.6.57.1-2.azl3.x86_64"));
        assert_eq!(
            azure.identity(),
            format!("kernel-devel=6.6.57.1-2.azl3.x86_64 sha256:{}", "0".repeat(64))
        );
    }
}
