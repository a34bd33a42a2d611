//! Parses package records and dependencies (Debian Policy, chapters 5 and 7).

use deb822_fast::{Deb822, Paragraph};
use farrier_core::kernel::Architecture;

use super::version;

/// A binary package as described by a signed index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackageRecord {
    pub name: String,
    pub version: String,
    /// Debian architecture name: `amd64`, `all`.
    pub arch: String,
    /// Name of the source package that this package was built from.
    pub source: String,
    /// Groups of alternative dependencies; each group must be met.
    pub depends: Vec<Vec<Dependency>>,
    /// Path of the file in the archive.
    pub filename: String,
    /// SHA-256 of the file, 64 lower-case hexadecimal digits.
    pub sha256: String,
}

/// One alternative of a dependency.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dependency {
    /// Package name, without a suffix such as `:any`.
    pub name: String,
    /// Version constraint: operator and version.
    pub version: Option<(String, String)>,
}

impl PackageRecord {
    /// Returns `name=version sha256:...`.
    pub fn identity(&self) -> String {
        format!("{}={} sha256:{}", self.name, self.version, self.sha256)
    }

    fn from_paragraph(paragraph: &Paragraph) -> Option<Self> {
        let value = |field| Some(paragraph.get(field)?.trim().to_owned());
        let sha256 = value("SHA256")?.to_ascii_lowercase();
        let well_formed = sha256.len() == 64 && sha256.bytes().all(|b| b.is_ascii_hexdigit());
        let name = value("Package")?;
        let source = paragraph.get("Source").and_then(|source| source.split_whitespace().next());
        let source = source.unwrap_or(&name).to_owned();
        let depends = ["Pre-Depends", "Depends"].into_iter().filter_map(|field| paragraph.get(field));
        (well_formed && is_package_name(&name)).then_some(Self {
            version: value("Version")?,
            arch: value("Architecture")?,
            filename: value("Filename")?,
            depends: depends.flat_map(dependencies).collect(),
            name,
            source,
            sha256,
        })
    }
}

/// Parses the output of `apt-cache show` and returns the packages for `arch` or `all`. Unreadable paragraphs are skipped.
pub fn packages(text: &str, arch: Architecture) -> Vec<PackageRecord> {
    Deb822::iter_paragraphs_from_reader(text.as_bytes())
        .filter_map(|paragraph| PackageRecord::from_paragraph(&paragraph.ok()?))
        .filter(|package| package.arch == arch.as_str() || package.arch == "all")
        .collect()
}

/// Parses a dependency field into groups of alternatives. Unreadable parts are skipped.
pub fn dependencies(text: &str) -> Vec<Vec<Dependency>> {
    text.split(',')
        .map(|group| group.split('|').filter_map(dependency).collect::<Vec<_>>())
        .filter(|group| !group.is_empty())
        .collect()
}

fn dependency(text: &str) -> Option<Dependency> {
    let (name, relation) = match text.split_once(['(', '[', '<']) {
        Some((name, _)) => (name, &text[name.len()..]),
        None => (text, ""),
    };
    let name = name.trim().split(':').next().unwrap_or_default().to_owned();
    let constraint = relation.strip_prefix('(').and_then(|relation| relation.split_once(')'));
    let version = constraint.and_then(|(constraint, _)| {
        let constraint = constraint.trim();
        let version = constraint.trim_start_matches(['<', '=', '>']);
        let operator = &constraint[..constraint.len() - version.len()];
        (!operator.is_empty()).then(|| (operator.to_owned(), version.trim().to_owned()))
    });
    is_package_name(&name).then_some(Dependency { name, version })
}

impl Dependency {
    /// Whether the package satisfies this dependency.
    pub fn accepts(&self, package: &PackageRecord) -> bool {
        package.name == self.name
            && self.version.as_ref().is_none_or(|(operator, required)| {
                let order = version::compare(&package.version, required);
                match operator.as_str() {
                    "=" => order.is_eq(),
                    ">=" => order.is_ge(),
                    "<=" => order.is_le(),
                    ">>" => order.is_gt(),
                    "<<" => order.is_lt(),
                    _ => false,
                }
            })
    }
}

/// Whether a name is valid: two or more of `[a-z0-9+.-]`, starting with a letter or digit (Debian Policy, 5.6.7).
pub fn is_package_name(name: &str) -> bool {
    name.len() >= 2
        && name.len() <= 200
        && name.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "+.-".contains(c))
}

/// Returns the newest accepted package; of two equal versions the first one, like apt.
pub fn newest(
    packages: &[PackageRecord],
    accepts: impl Fn(&PackageRecord) -> bool,
) -> Option<&PackageRecord> {
    packages
        .iter()
        .filter(|package| accepts(package))
        .reduce(|best, next| if version::compare(&next.version, &best.version).is_gt() { next } else { best })
}

/// Returns the dependencies of a header package that belong to the header set: those from the same source package. Other
/// dependencies (compiler, C library) belong to the toolchain. `candidates` covers all alternatives.
pub fn same_source<'a>(package: &PackageRecord, candidates: &'a [PackageRecord]) -> Vec<&'a PackageRecord> {
    let choose = |group: &Vec<Dependency>| {
        // Like apt, take the first alternative that exists.
        group.iter().find_map(|alternative| newest(candidates, |package| alternative.accepts(package)))
    };
    package
        .depends
        .iter()
        .filter_map(choose)
        .filter(|dependency| dependency.source == package.source && !is_kernel_package(&dependency.name))
        .collect()
}

/// Since Linux 6.12, Debian's header packages depend on the kernel image, so that DKMS finds both in the same version.
fn is_kernel_package(name: &str) -> bool {
    ["linux-image-", "linux-modules-", "linux-binary-"].iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHOWN: &str = "\
Package: linux-headers-6.1.0-47-amd64
Source: linux
Version: 6.1.170-3
Architecture: amd64
Depends: linux-headers-6.1.0-47-common (= 6.1.170-3), linux-kbuild-6.1 (>= 6.1.170-3), gcc-12:any [amd64] | c-compiler
Filename: pool/main/l/linux/linux-headers.deb
SHA256: 2A40C463E108B1EA3ABF2E16E38EB9E27B237693B974B862ADDE73873C7D85C1
Description: Header files
 long text
 .
 more: text

Package: Hostile Name
Version: 1
Architecture: amd64
Filename: x
SHA256: 2a40c463e108b1ea3abf2e16e38eb9e27b237693b974b862adde73873c7d85c1

Package: foreign
Version: 1
Architecture: i386
Filename: x
SHA256: 2a40c463e108b1ea3abf2e16e38eb9e27b237693b974b862adde73873c7d85c1

Package: no-digest
Version: 1
Architecture: all
Filename: x
";

    fn package(name: &str, version: &str, source: &str, depends: &str) -> PackageRecord {
        PackageRecord {
            name: name.into(),
            version: version.into(),
            arch: "amd64".into(),
            source: source.into(),
            depends: dependencies(depends),
            filename: String::new(),
            sha256: "0".repeat(64),
        }
    }

    #[test]
    fn records_of_apt_cache_show() {
        let found = packages(SHOWN, Architecture::Amd64);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].source, "linux");
        assert_eq!(found[0].depends.len(), 3);
        assert_eq!(found[0].depends[2][0], Dependency { name: "gcc-12".into(), version: None });
        assert!(found[0].identity().starts_with("linux-headers-6.1.0-47-amd64=6.1.170-3 sha256:2a40c463"));
        assert_eq!(packages("Package: x", Architecture::Amd64), []);
    }

    #[test]
    fn a_source_field_may_hold_a_version() {
        let text = SHOWN.replace("Source: linux", "Source: linux (6.1.170-3~x)");
        assert_eq!(packages(&text, Architecture::Amd64)[0].source, "linux");
    }

    #[test]
    fn the_set_is_what_comes_from_the_same_source() {
        let known = [
            package("h-common", "1-1", "linux", ""),
            package("h-common", "1-2", "linux", ""),
            package("kbuild", "1-9", "linux", ""),
            package("gcc-12", "12", "gcc-12", ""),
            package("linux-image-1", "1-1", "linux-signed", ""),
            package("linux-image-1-unsigned", "1-1", "linux", ""),
        ];
        let names = |depends: &str| -> Vec<String> {
            let headers = package("h", "1-1", "linux", depends);
            same_source(&headers, &known).iter().map(|p| format!("{}={}", p.name, p.version)).collect()
        };
        assert_eq!(names("h-common (= 1-1), kbuild (>= 1-1), gcc-12"), ["h-common=1-1", "kbuild=1-9"]);
        assert_eq!(names("h-common, absent | kbuild (<< 2)"), ["h-common=1-2", "kbuild=1-9"]);
        assert_eq!(names("kbuild (>> 1-9), kbuild (<= 1-8)"), Vec::<String>::new());
        assert_eq!(names("linux-image-1 | linux-image-1-unsigned"), Vec::<String>::new());
        assert_eq!(names("linux-image-2 | linux-image-1-unsigned"), Vec::<String>::new());
    }

    #[test]
    fn package_names() {
        for name in ["a", "", "-x", "A-b", "a_b", "a b", "a/b", "a=b", "../x", "a$(x)"] {
            assert!(!is_package_name(name), "{name:?}");
        }
        for name in ["linux-headers-6.1.192-acme+", "g++", "0ad"] {
            assert!(is_package_name(name), "{name:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn any_text_parses(text in "(Package:|Depends:|SHA256:|\\(|=|\\)|\\||,|\n| |\\PC){0,60}") {
            packages(&text, Architecture::Arm64);
            dependencies(&text);
        }
    }
}
