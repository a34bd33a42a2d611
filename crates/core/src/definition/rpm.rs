//! Pure: RPM repositories, and packages in them.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    NonEmpty,
    checked::{LocalPath, RepositoryAddress, RpmAlternatives, RpmName, StreamName},
    is_default,
};

/// RPM packages of a kernel, and where they are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RpmPackages {
    /// Package names. Those with ` | ` between them are alternatives: the first that is of the kernel's release is taken.
    /// `{{flavour}}` stands for what follows the last `-` of the release, `{{release}}` for the release in whatever form names have
    /// it: what a package provides, or its files, say which kernel it is for.
    pub packages: NonEmpty<RpmAlternatives>,
    /// Where the packages are.
    pub from: RpmArchive,
}

/// Further RPM packages of a family whose headers may be RPM packages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FurtherRpmPackages {
    /// Package names.
    pub packages: NonEmpty<RpmAlternatives>,
    /// Where the packages are, where that is not where the headers are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<RpmArchive>,
}

/// RPM packages that compile. What they need comes along, without what is only recommended.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RpmToolchain {
    /// Package names.
    pub packages: NonEmpty<RpmName>,
    /// Where the packages are, where that is not where the headers are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<RpmArchive>,
    /// Streams of modules whose packages may be taken, by module: `{perl: "5.32"}`. Of other modules it is the default stream;
    /// packages of all other streams are left out, as dnf leaves them out.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub module_streams: BTreeMap<StreamName, StreamName>,
}

/// RPM repositories that belong together, and how they are trusted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RpmArchive {
    /// The repositories. A kernel's packages may be in any of them.
    pub repositories: NonEmpty<RpmRepository>,
    /// The keys that sign, as text (`-----BEGIN PGP PUBLIC KEY BLOCK-----`, one or several), relative to the definitions
    /// directory.
    pub signed_by: LocalPath,
    /// What the keys sign.
    #[serde(default, skip_serializing_if = "is_default")]
    pub signed: RpmSigned,
}

/// One RPM repository: exactly one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum RpmRepository {
    /// Its address: `repodata/repomd.xml` is below it. One whose host ends in `.invalid` is only a name, for which
    /// `mirrors` in site.yaml says where it is.
    Url(RepositoryAddress),
    /// The address of a list of its mirrors: lines of addresses, or a metalink.
    MirrorList(RepositoryAddress),
}

/// What the keys of RPM repositories sign.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum RpmSigned {
    /// Each package.
    #[default]
    Packages,
    /// The metadata (`repomd.xml.asc`), which has the packages' checksums.
    Metadata,
    /// The packages and the metadata.
    Both,
}

impl RpmSigned {
    /// Must `repomd.xml` have a signature?
    pub fn metadata(self) -> bool {
        matches!(self, Self::Metadata | Self::Both)
    }

    /// Must each package have a signature?
    pub fn packages(self) -> bool {
        matches!(self, Self::Packages | Self::Both)
    }
}

impl RpmRepository {
    /// Its address, or that of the list.
    pub fn address(&self) -> &RepositoryAddress {
        let (Self::Url(address) | Self::MirrorList(address)) = self;
        address
    }
}

impl FurtherRpmPackages {
    /// Where they are, in a family whose headers are in `headers`.
    pub fn archive<'a>(&'a self, headers: Option<&'a RpmArchive>) -> Option<&'a RpmArchive> {
        self.from.as_ref().or(headers)
    }
}

impl RpmToolchain {
    /// The same.
    pub fn archive<'a>(&'a self, headers: Option<&'a RpmArchive>) -> Option<&'a RpmArchive> {
        self.from.as_ref().or(headers)
    }
}

impl RepositoryAddress {
    /// For a version of the distribution and RPM's name of an architecture.
    pub fn expand(&self, version: &str, basearch: &str) -> String {
        let (major, minor) = version.split_once('.').unwrap_or((version, "0"));
        self.replace("{{releasever}}", version)
            .replace("{{releasever_major}}", major)
            .replace("{{releasever_minor}}", minor)
            .replace("{{basearch}}", basearch)
    }
}

impl RpmAlternatives {
    /// The names, in order.
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
            "kernel-{{flavour}}-devel",
            "kmod-acme-{{release}}",
        ] {
            assert!(text.parse::<RpmAlternatives>().is_ok(), "{text}");
        }
        for text in ["", "-x", "a|b", "a b", "{{release}}", "k{{flavour}}-{{release}}", "../x"] {
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
        assert!(default.packages() && !default.metadata());
        let both = read(Some("both")).unwrap();
        assert!(both.packages() && both.metadata());
        assert!(read(Some("none")).is_err());
    }
}
