//! Reads the packages and the distribution of a root file system from its layers. The sources are dpkg's status with the copyright
//! files, the list of RPM packages in images without RPM's database, and `os-release`.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, Read},
    ops::ControlFlow,
    path::Path,
};

use deb822_fast::{Deb822, Paragraph};
use farrier_core::{
    provenance::{Distribution, Package, PackageList},
    text,
};
use oci::{LayerReader, each_entry, plain_path};

/// Number of bytes that are read of a package list or copyright file; the rest is ignored. The status of 900 packages has 0.8 MB.
const MAX_FILE: u64 = 32 << 20;
/// Path of the list of RPM packages in Azure Linux' distroless images. Scanners read the list there (Syft, Trivy).
pub(crate) const RPM_LIST: &str = "var/lib/rpmmanifest/container-manifest-2";
/// Format of a line in that list, as rpm's `--queryformat`.
pub(crate) const RPM_LIST_FORMAT: &str = r"%{NAME}\t%{VERSION}-%{RELEASE}\t%{INSTALLTIME}\t%{BUILDTIME}\t%{VENDOR}\t%{EPOCH}\t%{SIZE}\t%{ARCH}\t%{EPOCHNUM}\t%{SOURCERPM}\n";
/// Paths of `os-release(5)`. A symbolic link is not followed, because its target is the other path.
const OS_RELEASE: [&str; 2] = ["etc/os-release", "usr/lib/os-release"];
/// Maximum number of licenses of one package. Debian's kernel header packages have about 20.
const MAX_LICENSES: usize = 64;

/// Collects packages from the layers of one image, the lowest layer first.
#[derive(Debug, Default)]
pub struct PackageReader {
    /// Distribution in each `os-release`. In the order of paths, `/etc` precedes `/usr/lib`.
    distributions: BTreeMap<&'static str, Option<Distribution>>,
    /// Packages in each package list, by its path.
    package_lists: BTreeMap<String, Vec<Package>>,
    /// Licenses by package.
    licenses: BTreeMap<String, BTreeSet<String>>,
}

impl PackageReader {
    /// Reads a layer's blob.
    pub fn read_layer(&mut self, blob: impl Read + Send) -> io::Result<()> {
        each_entry(LayerReader::new(blob)?, |names, entry| {
            let path = plain_path(Path::new(&names.path));
            let Some(path) = path.filter(|_| entry.header().entry_type().is_file()) else {
                return Ok(ControlFlow::<()>::Continue(()));
            };
            if path == Path::new(RPM_LIST) {
                self.package_lists.insert(RPM_LIST.to_owned(), parse_rpm_list(&read(entry)?));
            } else if let Some(file) = OS_RELEASE.into_iter().find(|file| path == Path::new(file)) {
                self.distributions.insert(file, Distribution::parse(&read(entry)?));
            } else if let Some(file) = status_file(&path) {
                self.package_lists.insert(file, parse_status(&read(entry)?));
            } else if let Some(name) = copyright_owner(&path) {
                self.licenses.insert(name, parse_licenses(&read(entry)?));
            }
            Ok(ControlFlow::Continue(()))
        })
        .map(drop)
    }

    /// Returns the packages and the distribution.
    pub fn finish(self) -> PackageList {
        let Self { distributions, package_lists, licenses } = self;
        let mut packages: Vec<Package> = package_lists.into_values().flatten().collect();
        for package in &mut packages {
            let names = licenses.get(&package.name).into_iter().flatten();
            package.licenses = names.take(MAX_LICENSES).cloned().collect();
        }
        packages.sort();
        packages.dedup();
        PackageList { packages, distribution: distributions.into_values().flatten().next() }
    }
}

/// Returns the path of a dpkg status file relative to `var/lib/dpkg`: `status`, or `status.d/PACKAGE` in distroless images. `None`
/// for other files.
fn status_file(path: &Path) -> Option<String> {
    let path = path.to_str()?;
    let file = path.strip_prefix("var/lib/dpkg/")?;
    let is_single_package = file.strip_prefix("status.d/").is_some_and(|name| !name.contains(['/', '.']));
    (file == "status" || is_single_package).then(|| file.to_owned())
}

/// Returns the package that a copyright file belongs to.
fn copyright_owner(path: &Path) -> Option<String> {
    let name = path.to_str()?.strip_prefix("usr/share/doc/")?.strip_suffix("/copyright")?;
    (!name.contains('/')).then(|| name.to_owned())
}

fn read(file: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(MAX_FILE).read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Parses the installed packages in a dpkg status file (`deb-control(5)`, `dpkg(1)`).
fn parse_status(status: &str) -> Vec<Package> {
    Deb822::iter_paragraphs_from_reader(status.as_bytes())
        .filter_map(|paragraph| installed_package(&paragraph.ok()?))
        .collect()
}

fn installed_package(paragraph: &Paragraph) -> Option<Package> {
    let field = |name: &str| paragraph.get(name).map(printable).filter(|value| !value.is_empty());
    let installed = field("Status").is_none_or(|status| status.ends_with(" installed"));
    let (name, version) = (field("Package")?, field("Version")?);
    let architecture = field("Architecture").unwrap_or_default();
    installed.then_some(Package { name, version, architecture, licenses: Vec::new() })
}

/// Parses a package list in [`RPM_LIST_FORMAT`].
fn parse_rpm_list(list: &str) -> Vec<Package> {
    let parse_line = |line: &str| {
        let [name, version, _, _, _, _, _, arch, epoch, _] =
            line.split('\t').map(printable).collect::<Vec<_>>().try_into().ok()?;
        let version = if epoch == "0" { version } else { format!("{epoch}:{version}") };
        Some(Package { name, version, architecture: arch, licenses: Vec::new() })
    };
    list.lines().filter_map(parse_line).collect()
}

/// Returns the short names in the `License:` fields of a DEP 5 file; empty for files in another format.
fn parse_licenses(copyright: &str) -> BTreeSet<String> {
    if !copyright.trim_start().to_ascii_lowercase().starts_with("format:") {
        return BTreeSet::new();
    }
    let names = copyright.lines().filter_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.eq_ignore_ascii_case("license") && !value.trim().is_empty()).then(|| printable(value))
    });
    names.collect()
}

/// Replaces deceptive characters and truncates the text.
fn printable(text: &str) -> String {
    text::printable(text.trim()).chars().take(200).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(files: &[(&str, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (path, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o644);
            header.set_cksum();
            builder.append_data(&mut header, path, content.as_bytes()).unwrap();
        }
        builder.into_inner().unwrap()
    }

    const STATUS: &str = "Package: make\nStatus: install ok installed\nVersion: 4.3-4.1\nArchitecture: amd64\n\
        Description: tool\n Package: not this one\n\nPackage: gone\nStatus: deinstall ok config-files\nVersion: 1\n\n\
        Package: base-files\nStatus: install ok installed\nArchitecture: amd64\nVersion: 12.4\n";

    #[test]
    fn packages_and_licenses() {
        let mut reader = PackageReader::default();
        let copyright = "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/\n\n\
            Files: *\nLicense: GPL-3+\n text\n\nFiles: doc/*\nLicense: GFDL-1.3+\n\nLicense: GPL-3+\n more\n";
        reader
            .read_layer(
                &layer(&[
                    ("./var/lib/dpkg/status", STATUS),
                    ("usr/lib/os-release", "ID=debian\nVERSION_ID=\"12\"\n"),
                    ("usr/share/doc/make/copyright", copyright),
                    ("usr/share/doc/base-files/copyright", "This is free software: License: any\n"),
                ])[..],
            )
            .unwrap();
        let PackageList { packages: found, distribution } = reader.finish();
        assert_eq!(distribution, Distribution::of_suite("bookworm", None));
        let names: Vec<_> = found.iter().map(|p| (p.name.as_str(), p.version.as_str())).collect();
        assert_eq!(names, [("base-files", "12.4"), ("make", "4.3-4.1")]);
        assert_eq!(found[1].licenses, ["GFDL-1.3+", "GPL-3+"]);
        assert!(found[0].licenses.is_empty());
    }

    #[test]
    fn rpm_packages_of_a_list() {
        let mut reader = PackageReader::default();
        let list = "gcc\t11.5.0-2.el9\t(none)\t1700000000\tAcme\t(none)\t9\tx86_64\t0\tgcc-11.5.0-2.el9.src.rpm\n\
            perl\t5.32-1\t(none)\t1\tAcme\t4\t9\tnoarch\t4\tperl.src.rpm\ntoo\tshort\n";
        reader.read_layer(&layer(&[(RPM_LIST, list)])[..]).unwrap();
        let found: Vec<_> =
            reader.finish().packages.into_iter().map(|p| (p.name, p.version, p.architecture)).collect();
        let of =
            |name: &str, version: &str, arch: &str| (name.to_owned(), version.to_owned(), arch.to_owned());
        assert_eq!(found, [of("gcc", "11.5.0-2.el9", "x86_64"), of("perl", "4:5.32-1", "noarch")]);
    }

    #[test]
    fn an_upper_layer_replaces_the_status() {
        let mut reader = PackageReader::default();
        reader.read_layer(&layer(&[("var/lib/dpkg/status", STATUS)])[..]).unwrap();
        let newer = STATUS.replace("4.3-4.1", "4.4-1");
        reader.read_layer(&layer(&[("var/lib/dpkg/status", &newer)])[..]).unwrap();
        let found = reader.finish().packages;
        assert_eq!((found.len(), found[1].version.as_str()), (2, "4.4-1"));
    }

    #[test]
    fn no_dpkg_and_hostile_names() {
        let mut reader = PackageReader::default();
        let hostile = "Package: a\u{1b}[2J\u{202e}\nVersion: 1\n";
        reader
            .read_layer(
                &layer(&[
                    ("var/lib/dpkg/status.d/a", hostile),
                    ("var/lib/dpkg/status.d/a.md5sums", STATUS),
                    ("etc/passwd", STATUS),
                ])[..],
            )
            .unwrap();
        let found = reader.finish().packages;
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].name, "a\u{fffd}[2J\u{fffd}");
        assert_eq!(PackageReader::default().finish(), PackageList::default());
    }
}
