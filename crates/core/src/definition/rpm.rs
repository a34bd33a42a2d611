//! RPM repositories and their packages.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    NonEmpty,
    checked::{LocalPath, RepositoryAddress, RpmAlternatives, RpmName, StreamName},
    is_default,
};

/// RPM packages of a kernel and their repositories.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RpmPackages {
    /// Package names. ` | ` separates alternatives: the first package for the kernel's release is used. `{{flavor}}` is replaced
    /// with the text after the last `-` of the release, `{{release}}` with the release in any form that package names use. A
    /// package belongs to the kernel that its provides or its files name.
    pub packages: NonEmpty<RpmAlternatives>,
    /// Repositories that contain the packages.
    pub from: RpmArchive,
}

/// Additional RPM packages, beside the header packages. Both may come from the same repositories.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FurtherRpmPackages {
    /// Package names.
    pub packages: NonEmpty<RpmAlternatives>,
    /// Repositories of the packages. Default: the repositories of the headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<RpmArchive>,
}

/// RPM packages of the toolchain. Required dependencies are installed too, weak ones (recommended packages) are not.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RpmToolchain {
    /// Package names.
    pub packages: NonEmpty<RpmName>,
    /// Repositories of the packages. Default: the repositories of the headers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<RpmArchive>,
    /// Streams whose packages may be used, by DNF module: `{perl: "5.32"}`. Other modules use their default stream.
    /// Packages of all other streams are excluded, as dnf does.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub module_streams: BTreeMap<StreamName, StreamName>,
}

/// A group of RPM repositories, and the keys that verify them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RpmArchive {
    /// The repositories. A kernel's packages may be in any of them.
    pub repositories: NonEmpty<RpmRepository>,
    /// Public keys that verify signatures, in ASCII armor (`-----BEGIN PGP PUBLIC KEY BLOCK-----`, one or several). The path is
    /// relative to the definitions directory.
    pub signed_by: LocalPath,
    /// Whether the keys sign packages, metadata or both.
    #[serde(default, skip_serializing_if = "is_default")]
    pub signed: RpmSigned,
}

/// One RPM repository. Set exactly one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum RpmRepository {
    /// URL of the repository, with `repodata/repomd.xml` below it. A host that ends in `.invalid` is only a name; `mirrors` in
    /// site.yaml gives its real address.
    Url(RepositoryAddress),
    /// URL of a mirror list: lines of URLs, or a metalink.
    MirrorList(RepositoryAddress),
}

/// The parts of RPM repositories that the keys sign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum RpmSigned {
    /// Each package.
    #[default]
    Packages,
    /// The metadata (`repomd.xml.asc`), which contains the packages' checksums.
    Metadata,
    /// The packages and the metadata.
    Both,
}

impl RpmSigned {
    /// Whether `repomd.xml` must have a signature.
    pub fn covers_metadata(self) -> bool {
        matches!(self, Self::Metadata | Self::Both)
    }

    /// Whether each package must have a signature.
    pub fn covers_packages(self) -> bool {
        matches!(self, Self::Packages | Self::Both)
    }
}

impl RpmRepository {
    /// Returns the URL of the repository or of its mirror list.
    pub fn address(&self) -> &RepositoryAddress {
        let (Self::Url(address) | Self::MirrorList(address)) = self;
        address
    }
}

impl FurtherRpmPackages {
    /// Returns the repositories of the packages. `headers` is the default.
    pub fn archive<'a>(&'a self, headers: Option<&'a RpmArchive>) -> Option<&'a RpmArchive> {
        self.from.as_ref().or(headers)
    }
}

impl RpmToolchain {
    /// Returns the repositories of the packages. `headers` is the default.
    pub fn archive<'a>(&'a self, headers: Option<&'a RpmArchive>) -> Option<&'a RpmArchive> {
        self.from.as_ref().or(headers)
    }
}

impl RepositoryAddress {
    /// Fills in the distribution's version and RPM's name of the architecture.
    pub fn expand(&self, version: &str, basearch: &str) -> String {
        let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
        self.replace("{{releasever}}", version)
            .replace("{{releasever_major}}", major)
            .replace("{{releasever_minor}}", minor)
            .replace("{{basearch}}", basearch)
    }
}

impl RpmAlternatives {
    /// Returns the alternative names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.split(" | ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn addresses_are_expanded() {
        let address: RepositoryAddress =
            "https://rocky.invalid/{{releasever}}/x/{{releasever_major}}-SP{{releasever_minor}}/{{basearch}}/os/".parse().unwrap();
        let expanded = address.expand("9.5", "x86_64");
        assert_eq!(expanded, "https://rocky.invalid/9.5/x/9-SP5/x86_64/os/");
        for text in [
            "https://{{releasever}}.test/",
            "https://a.test/{{release}}",
            "https://me:pw@a.test/",
            "ftp://a.test/",
        ] {
            assert!(text.parse::<RepositoryAddress>().is_err(), "{text}");
        }
    }

    #[test]
    fn names_of_packages() {
        for text in [
            "kernel-devel",
            "kernel6.12-devel | kernel-devel",
            "kernel-{{flavor}}-devel",
            "kmod-acme-{{release}}",
        ] {
            assert!(text.parse::<RpmAlternatives>().is_ok(), "{text}");
        }
        for text in ["", "-x", "a|b", "a b", "{{release}}", "k{{flavor}}-{{release}}", "../x"] {
            assert!(text.parse::<RpmAlternatives>().is_err(), "{text}");
        }
    }

    #[test]
    fn what_is_signed() {
        let read = |signed: Option<&str>| {
            let repositories = [json!({"url": "https://a.test/"}), json!({"mirrorList": "https://b.test/l"})];
            let mut archive = json!({"repositories": repositories, "signedBy": "k.asc"});
            archive
                .as_object_mut()
                .unwrap()
                .extend(signed.map(|signed| ("signed".to_owned(), json!(signed))));
            serde_json::from_value::<RpmArchive>(archive).map(|archive| archive.signed)
        };
        let default = read(None).unwrap();
        assert!(default.covers_packages() && !default.covers_metadata());
        let both = read(Some("both")).unwrap();
        assert!(both.covers_packages() && both.covers_metadata());
        assert!(read(Some("none")).is_err());
    }
}
