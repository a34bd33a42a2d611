//! Pure: what a driver image is compiled from: sources and patches.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    definition::{
        AptSuites, NonEmpty,
        checked::{
            Component, Download, ImageName, InnerPattern, LocalPath, Mirror, PackageName, PackageVersion,
            Sha256, Suite,
        },
    },
    kernel::{HeaderText, KernelRange, Pattern},
};

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
    pub unpack: Option<InnerPattern>,
    /// The part of the (unpacked) tree that is used, as a relative path in which the last component
    /// may hold one `*`; it must match exactly once. Default: the whole tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subdir: Option<InnerPattern>,
}

impl SourceSpec {
    /// All of it, where a part is compiled.
    #[must_use]
    pub fn without_part(&self) -> Self {
        Self { subdir: None, ..self.clone() }
    }
}

/// Where a source comes from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum SourceOrigin {
    /// A file (archive) or directory, relative to the definitions directory.
    Path {
        /// The path.
        path: LocalPath,
        /// Expected sha256 of the file, hexadecimal. Not for directories.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sha256: Option<Sha256>,
    },
    /// A download. Archives are unpacked: tar (plain, gzip, xz, zstd), packages (`.deb`, `.rpm`), and self-extracting
    /// ones (`.run`), which are not run.
    Url {
        /// The address, `http` or `https`.
        url: Download,
        /// sha256 of the file, hexadecimal.
        sha256: Sha256,
    },
    /// A package of a Debian-like archive, unpacked (not installed).
    Apt(AptSource),
}

/// A package whose files are a source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AptSource {
    /// The package's name.
    pub package: PackageName,
    /// Its exact version; the suite's newest when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub version: Option<PackageVersion>,
    /// Suites, such as `bookworm`, `sid`.
    pub suites: NonEmpty<Suite>,
    /// Components; `main` when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<Component>,
    /// The archive's address; the host's own entry for the suite when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<Mirror>,
    /// Keyring that signs the archive; that of the host's entry when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signed_by: Option<LocalPath>,
}

impl AptSource {
    /// Where the package is looked for.
    pub fn apt_suites(&self) -> AptSuites {
        let Self { package: _, version: _, suites, components, mirror, signed_by } = self.clone();
        AptSuites { suites: suites.to_vec(), components, mirror, signed_by }
    }
}

/// A patch, applied by the template.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PatchSpec {
    /// The file, relative to the definitions directory; where that has none, the one of this name that farrier brings.
    pub path: LocalPath,
    /// The range of kernels that it is for, as in the image's `kernels`; every kernel when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernels: Option<KernelRange>,
    /// A regular expression over the kernel release, whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<Pattern>,
    /// What the kernel's headers say, for changes that distributions took over into kernels of older numbers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub when: Option<HeaderText>,
}
