//! Pure: kernel families (`kernels/*.yaml`): which targets they match and where headers come from.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Architecture, KernelTarget};
use crate::image::{ApiVersion, Metadata};

/// One file of `kernels/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelFamily {
    /// Always `farrier.dev/v1alpha1`.
    pub api_version: ApiVersion,
    /// Always `KernelFamily`.
    pub kind: KernelFamilyKind,
    /// The family's name.
    pub metadata: Metadata,
    /// What it says.
    pub spec: KernelFamilySpec,
}

/// The one value of a family's `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum KernelFamilyKind {
    /// `KernelFamily`.
    KernelFamily,
}

/// Which targets a family matches, and where their headers and toolchain come from.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelFamilySpec {
    /// Which targets.
    #[serde(rename = "match")]
    pub matches: FamilyMatch,
    /// Where the header sets come from.
    pub headers: HeaderSource,
    /// The build stage's base.
    pub toolchain: Toolchain,
}

/// Every field that is given must match; a family without fields matches every target.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FamilyMatch {
    /// Operating system ids (`ID` of os-release); empty means any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub os: Vec<String>,
    /// A regular expression over the operating system version, whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os_version: Option<String>,
    /// A regular expression over the kernel release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<String>,
    /// Processor architecture.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arch: Option<Architecture>,
}

/// Where a family's header sets come from: exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum HeaderSource {
    /// Packages of a Debian-like distribution.
    Apt(AptHeaders),
    /// A tarball, one for each release: `path` may hold `{{release}}`.
    Tarball(TarballHeaders),
}

/// Header packages; the packages of the same source package that they depend on come along.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AptHeaders {
    /// Package names; `{{release}}` stands for the kernel release.
    pub packages: Vec<String>,
    /// Where to look for them.
    #[serde(flatten)]
    pub from: AptSuites,
}

/// Suites and components of a Debian-like archive.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AptSuites {
    /// Suites, such as `bookworm`, `bookworm-security`, `sid`.
    pub suites: Vec<String>,
    /// Components; `main` when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<String>,
    /// The archive's address. Default: the host's own entry for the suite, else its entry for the
    /// distribution's main archive.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<String>,
    /// Keyring that signs the archive. Default: that of the host's entry.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signed_by: Option<PathBuf>,
}

/// Headers in files that the user brings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TarballHeaders {
    /// File or directory, relative to the definitions directory; `{{release}}` stands for the kernel
    /// release. It is a tree rooted at `/` (`usr/src/...`, `lib/modules/<release>/build`) or at the
    /// build tree itself (`Makefile`, `include/`, `Module.symvers` at the top, or one directory down).
    pub path: String,
}

/// The build stage's base: exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum Toolchain {
    /// Made with mmdebstrap from packages.
    Bootstrap(BootstrapSpec),
    /// A reference to an image that exists.
    Image(String),
}

/// A root file system made with mmdebstrap.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BootstrapSpec {
    /// The suite to install from; further suites (security, updates) in `extraSuites`.
    pub suite: String,
    /// Further suites of the same release.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub extra_suites: Vec<String>,
    /// Components; `main` when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub components: Vec<String>,
    /// Packages to install beside the essential ones.
    pub include: Vec<String>,
    /// The archive's address. Default as in `apt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mirror: Option<String>,
    /// Keyring that signs the archive. Default as in `apt`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub signed_by: Option<PathBuf>,
}

/// The first family, in file-name order, that matches the target.
pub fn match_family<'a>(families: &'a [KernelFamily], target: &KernelTarget) -> Option<&'a KernelFamily> {
    families.iter().find(|family| family.spec.matches.is_match(target))
}

impl FamilyMatch {
    /// Does every field that is given match?
    pub fn is_match(&self, target: &KernelTarget) -> bool {
        let Self { os, os_version, release, arch } = self;
        (os.is_empty() || os.iter().any(|os| os == target.os.as_str()))
            && os_version.as_deref().is_none_or(|pattern| whole_match(pattern, target.os_version.as_str()))
            && release.as_deref().is_none_or(|pattern| whole_match(pattern, target.release.as_str()))
            && arch.is_none_or(|arch| arch == target.arch)
    }
}

/// The expression over the whole text. Loading a definition has proven that it compiles; one that does
/// not matches nothing.
fn whole_match(pattern: &str, text: &str) -> bool {
    whole(pattern).is_ok_and(|expression| expression.is_match(text))
}

/// The regular expression of a definition, anchored at both ends.
pub fn whole(pattern: &str) -> Result<regex::Regex, regex::Error> {
    regex::RegexBuilder::new(&format!("^(?:{pattern})$")).size_limit(1 << 20).build()
}
