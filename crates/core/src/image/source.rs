//! Pure: what a driver image is compiled from: sources and patches.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    ImageName,
    checked::{
        self, Component, Download, InnerPattern, LocalPath, Mirror, PackageName, PackageVersion, Rule,
        Sha256, Suite,
    },
};
use crate::kernel::AptSuites;

/// One input that is compiled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SourceSpec {
    /// Its directory under `sources/` in the build context.
    pub name: ImageName,
    /// Where it comes from: exactly one of `path`, `url`, `apt`.
    pub from: SourceOrigin,
    /// An archive inside the fetched tree that is unpacked in its place, as a path relative to the tree in which the
    /// last component may hold one `*` (`MLNX_OFED_SRC-24.10/SOURCES/mlnx-ofed-kernel_*.orig.tar.gz`); it must match
    /// exactly once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = InnerPattern::PATTERN))]
    pub unpack: Option<String>,
    /// The part of the (unpacked) tree that is used, as a relative path in which the last component
    /// may hold one `*`; it must match exactly once. Default: the whole tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(regex(pattern = InnerPattern::PATTERN))]
    pub subdir: Option<String>,
}

/// Where a source comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum SourceOrigin {
    /// A file (archive) or directory, relative to the definitions directory.
    Path {
        /// The path.
        #[serde(deserialize_with = "checked::path::<LocalPath, _>")]
        path: PathBuf,
        /// Expected sha256 of the file, hexadecimal. Not for directories.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(regex(pattern = Sha256::PATTERN))]
        sha256: Option<String>,
    },
    /// A download. Archives are unpacked: tar (plain, gzip, xz, zstd), packages (`.deb`, `.rpm`), and self-extracting
    /// ones (`.run`), which are not run.
    Url {
        /// The address, `http` or `https`.
        #[serde(deserialize_with = "checked::one::<Download, _>")]
        #[schemars(regex(pattern = Download::PATTERN))]
        url: String,
        /// sha256 of the file, hexadecimal.
        #[schemars(regex(pattern = Sha256::PATTERN))]
        sha256: String,
    },
    /// A package of a Debian-like archive, unpacked (not installed).
    Apt(AptSource),
}

/// A package whose files are a source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "AptSourceForm", into = "AptSourceForm")]
#[schemars(with = "AptSourceForm")]
pub struct AptSource {
    /// The package's name.
    pub package: String,
    /// Its exact version; the suite's newest when absent.
    pub version: Option<String>,
    /// Where to look for it.
    pub suites: AptSuites,
}

/// [`AptSource`] as written: serde cannot refuse unknown fields of a flattened structure.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct AptSourceForm {
    /// The package's name.
    #[serde(deserialize_with = "checked::one::<PackageName, _>")]
    #[schemars(regex(pattern = PackageName::PATTERN))]
    package: String,
    /// Its exact version; the suite's newest when absent.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional::<PackageVersion, _>"
    )]
    #[schemars(regex(pattern = PackageVersion::PATTERN))]
    version: Option<String>,
    /// Suites, such as `bookworm`, `sid`.
    #[serde(deserialize_with = "checked::some::<Suite, _>")]
    #[schemars(length(min = 1), inner(regex(pattern = Suite::PATTERN)))]
    suites: Vec<String>,
    /// Components; `main` when empty.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "checked::many::<Component, _>"
    )]
    #[schemars(inner(regex(pattern = Component::PATTERN)))]
    components: Vec<String>,
    /// The archive's address; the host's own entry for the suite when absent.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional::<Mirror, _>"
    )]
    #[schemars(regex(pattern = Mirror::PATTERN))]
    mirror: Option<String>,
    /// Keyring that signs the archive; that of the host's entry when absent.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional_path::<LocalPath, _>"
    )]
    signed_by: Option<PathBuf>,
}

impl From<AptSourceForm> for AptSource {
    fn from(form: AptSourceForm) -> Self {
        let AptSourceForm { package, version, suites, components, mirror, signed_by } = form;
        Self { package, version, suites: AptSuites { suites, components, mirror, signed_by } }
    }
}

impl From<AptSource> for AptSourceForm {
    fn from(source: AptSource) -> Self {
        let AptSource { package, version, suites: AptSuites { suites, components, mirror, signed_by } } =
            source;
        Self { package, version, suites, components, mirror, signed_by }
    }
}

/// A patch, applied by the template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PatchSpec {
    /// The file, relative to the definitions directory.
    #[serde(deserialize_with = "checked::path::<LocalPath, _>")]
    pub path: PathBuf,
    /// Range over the release's `x.y.z`; every kernel when absent.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "checked::version_range")]
    #[schemars(with = "Option<String>")]
    pub kernels: Option<semver::VersionReq>,
}
