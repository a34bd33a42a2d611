//! Package URLs (ECMA-427).

use std::fmt::Write as _;

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::{Deserialize, Serialize};

use crate::image::Digest;

/// A Linux distribution, by its `ID` and `VERSION_ID` in `os-release(5)`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Distribution {
    /// Such as `debian`.
    pub id: String,
    /// Such as `12`. Empty for a rolling release.
    pub version: String,
}

impl Distribution {
    /// Returns the distribution that publishes an apt suite. `None` if the suite is unknown, or if `mirror` is probably not a
    /// mirror of the distribution's archive: no segment of such a URL starts with the distribution's id.
    pub fn of_suite(suite: &str, mirror: Option<&str>) -> Option<Self> {
        let (id, version) = match suite.split(['-', '/']).next()? {
            "bullseye" => ("debian", "11"),
            "bookworm" => ("debian", "12"),
            "trixie" => ("debian", "13"),
            "forky" => ("debian", "14"),
            "sid" | "unstable" => ("debian", "sid"),
            "focal" => ("ubuntu", "20.04"),
            "jammy" => ("ubuntu", "22.04"),
            "noble" => ("ubuntu", "24.04"),
            "resolute" => ("ubuntu", "26.04"),
            _ => return None,
        };
        let is_own = mirror.is_none_or(|url| url.split('/').any(|segment| segment.starts_with(id)));
        is_own.then(|| Self { id: id.to_owned(), version: version.to_owned() })
    }

    /// Parses `os-release`.
    pub fn parse(os_release: &str) -> Option<Self> {
        let field = |name: &str| {
            let mut values =
                os_release.lines().filter_map(|line| line.trim().strip_prefix(name)?.strip_prefix('='));
            let value = values.next_back()?.trim_matches(['"', '\'']);
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            (!value.is_empty() && value.len() <= 64 && value.chars().all(is_plain)).then(|| value.to_owned())
        };
        Some(Self { id: field("ID")?, version: field("VERSION_ID").unwrap_or_default() })
    }

    /// Value of the qualifier `distro`.
    fn qualifier(&self) -> String {
        let Self { id, version } = self;
        if version.is_empty() { id.clone() } else { format!("{id}-{version}") }
    }
}

/// Returns the package URL of a package (types `deb` and `rpm`). Where the distribution is unknown, a package of a Debian-like
/// archive has the type `generic`, because `deb` requires a vendor.
pub(super) fn of_package(
    name: &str,
    version: &str,
    arch: Option<&str>,
    distribution: Option<&Distribution>,
) -> String {
    let is_rpm = arch.is_some_and(is_rpm_architecture);
    let namespace =
        distribution.map(|known| format!("{}/", escape(&known.id.to_lowercase()))).unwrap_or_default();
    let (epoch, version) = match version.split_once(':').filter(|_| is_rpm) {
        Some((epoch, version)) => (Some(epoch), version),
        None => (None, version),
    };
    let kind = if is_rpm { "rpm" } else { distribution.map_or("generic", |_| "deb") };
    let distro = distribution.map(Distribution::qualifier);
    let base = format!("pkg:{kind}/{namespace}{}@{}", escape(name), escape(version));
    qualified(base, &[("arch", arch), ("distro", distro.as_deref()), ("epoch", epoch)])
}

/// Whether the name of an architecture is RPM's. Debian uses other names.
pub(super) fn is_rpm_architecture(arch: &str) -> bool {
    ["aarch64", "noarch", "x86_64"].contains(&arch)
}

/// Returns the package URL of software outside of any package archive: the type `github` for a project's release there,
/// otherwise `generic`.
pub(super) fn of_software(name: &str, version: Option<&str>, url: Option<&str>) -> String {
    let version = version.map(|version| format!("@{}", escape(version))).unwrap_or_default();
    let path = url.and_then(|url| url.strip_prefix("https://github.com/"));
    if let Some([owner, repository, ..]) = path.map(|path| path.split('/').collect::<Vec<_>>()).as_deref() {
        let project = [owner, repository.trim_end_matches(".git")].map(|name| escape(&name.to_lowercase()));
        return format!("pkg:github/{}{version}", project.join("/"));
    }
    let is_git = url.is_some_and(|url| url.starts_with("git+"));
    let qualifier = if is_git { "vcs_url" } else { "download_url" };
    qualified(format!("pkg:generic/{}{version}", escape(name)), &[(qualifier, url)])
}

/// Returns a package URL of an image (type `oci`). It contains the last part of the name and the digest, so that copies of the
/// image in other registries have the same package URL.
pub(super) fn of_image(name: &str, digest: &Digest, repository: Option<&str>) -> String {
    let base = format!("pkg:oci/{}@{}", escape(&name.to_lowercase()), escape(digest.as_str()));
    qualified(base, &[("repository_url", repository)])
}

/// Appends qualifiers, which must be sorted by key. Their canonical form keeps slashes.
fn qualified(mut url: String, qualifiers: &[(&str, Option<&str>)]) -> String {
    let present = qualifiers.iter().filter_map(|(key, value)| Some((key, value.filter(|v| !v.is_empty())?)));
    for (index, (key, value)) in present.enumerate() {
        let separator = if index == 0 { '?' } else { '&' };
        // Writing to a string cannot fail.
        let _ = write!(url, "{separator}{key}={}", escape(value).replace("%2F", "/"));
    }
    url
}

/// Percent-encodes a component. The specification forbids encoding a colon.
fn escape(text: &str) -> String {
    const ESCAPED: &AsciiSet =
        &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b':');
    utf8_percent_encode(text, ESCAPED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn distribution(id: &str, version: &str) -> Distribution {
        Distribution { id: id.to_owned(), version: version.to_owned() }
    }

    #[test]
    fn packages_name_their_distribution() {
        for (id, version, package, arch, url) in [
            (
                "debian",
                "12",
                "curl=1:7.50.3+2-1",
                "amd64",
                "pkg:deb/debian/curl@1:7.50.3%2B2-1?arch=amd64&distro=debian-12",
            ),
            (
                "ubuntu",
                "22.04",
                "make=4.3-4.1",
                "all",
                "pkg:deb/ubuntu/make@4.3-4.1?arch=all&distro=ubuntu-22.04",
            ),
            (
                "rocky",
                "9.4",
                "gcc=1:11.5.0-2.el9",
                "aarch64",
                "pkg:rpm/rocky/gcc@11.5.0-2.el9?arch=aarch64&distro=rocky-9.4&epoch=1",
            ),
            ("fedora", "", "gcc=14.1-1", "x86_64", "pkg:rpm/fedora/gcc@14.1-1?arch=x86_64&distro=fedora"),
        ] {
            let (name, of_package_version) = package.split_once('=').unwrap();
            let of = distribution(id, version);
            assert_eq!(of_package(name, of_package_version, Some(arch), Some(&of)), url);
        }
        assert_eq!(of_package("mft", "4.1", Some("amd64"), None), "pkg:generic/mft@4.1?arch=amd64");
    }

    #[test]
    fn software_outside_of_archives() {
        let of = |url| of_software("gdrcopy", Some("2.5.1"), url);
        let github = "https://github.com/NVIDIA/gdrcopy/archive/refs/tags/v2.5.1.tar.gz";
        assert_eq!(of(Some(github)), "pkg:github/nvidia/gdrcopy@2.5.1");
        assert_eq!(
            of(Some("https://x.test/a b.tgz")),
            "pkg:generic/gdrcopy@2.5.1?download_url=https://x.test/a%20b.tgz"
        );
        assert_eq!(of(None), "pkg:generic/gdrcopy@2.5.1");
        assert_eq!(of_software("mst", None, None), "pkg:generic/mst");
    }

    #[test]
    fn distributions() {
        let debian = "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_ID=\"12\"\nID=debian\n";
        assert_eq!(Distribution::parse(debian), Some(distribution("debian", "12")));
        assert_eq!(Distribution::parse("ID='arch'\n"), Some(distribution("arch", "")));
        assert_eq!(Distribution::parse("NAME=x\nVERSION_ID=1\n"), None);
        assert_eq!(Distribution::parse("ID=a b\n"), None);
        let of = |suite, mirror| Distribution::of_suite(suite, mirror);
        assert_eq!(of("bookworm-security", None), Some(distribution("debian", "12")));
        assert_eq!(
            of("jammy", Some("http://mirror.test/ubuntu-ports")),
            Some(distribution("ubuntu", "22.04"))
        );
        assert_eq!(of("jammy", Some("https://vendor.test/apt")), None);
        assert_eq!(of("bullseye/updates", None), Some(distribution("debian", "11")));
        assert_eq!(of("vendor", None), None);
    }
}
