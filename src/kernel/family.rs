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
    #[serde(default, skip_serializing_if = "Vec::is_empty", deserialize_with = "one_or_many")]
    #[schemars(with = "OneOrMany")]
    pub os: Vec<String>,
    /// A regular expression over the operating system version, whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub os_version: Option<Pattern>,
    /// A regular expression over the kernel release.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub release: Option<Pattern>,
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
#[serde(from = "AptHeadersForm", into = "AptHeadersForm")]
#[schemars(with = "AptHeadersForm")]
pub struct AptHeaders {
    /// Package names; `{{release}}` stands for the kernel release.
    pub packages: Vec<String>,
    /// Where to look for them.
    pub from: AptSuites,
}

/// [`AptHeaders`] as written: serde cannot refuse unknown fields of a flattened structure.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct AptHeadersForm {
    /// Package names; `{{release}}` stands for the kernel release.
    packages: Vec<String>,
    /// Suites, such as `bookworm`, `bookworm-security`.
    suites: Vec<String>,
    /// Components; `main` when empty.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    components: Vec<String>,
    /// The archive's address; the host's own entry for the suite when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    mirror: Option<String>,
    /// Keyring that signs the archive; that of the host's entry when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signed_by: Option<PathBuf>,
}

impl From<AptHeadersForm> for AptHeaders {
    fn from(form: AptHeadersForm) -> Self {
        let AptHeadersForm { packages, suites, components, mirror, signed_by } = form;
        Self { packages, from: AptSuites { suites, components, mirror, signed_by } }
    }
}

impl From<AptHeaders> for AptHeadersForm {
    fn from(headers: AptHeaders) -> Self {
        let AptHeaders { packages, from: AptSuites { suites, components, mirror, signed_by } } = headers;
        Self { packages, suites, components, mirror, signed_by }
    }
}

/// Suites and components of a Debian-like archive.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
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
            && os_version.as_ref().is_none_or(|pattern| pattern.is_match(target.os_version.as_str()))
            && release.as_ref().is_none_or(|pattern| pattern.is_match(target.release.as_str()))
            && arch.is_none_or(|arch| arch == target.arch)
    }
}

/// A regular expression over a whole text (anchored at both ends), compiled when the definition is read.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
#[schemars(with = "String")]
pub struct Pattern {
    text: String,
    compiled: regex::Regex,
}

impl Pattern {
    /// Does the whole text match?
    pub fn is_match(&self, text: &str) -> bool {
        self.compiled.is_match(text)
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Self) -> bool {
        self.text == other.text
    }
}

impl TryFrom<String> for Pattern {
    type Error = PatternError;

    fn try_from(text: String) -> Result<Self, PatternError> {
        let compiled = regex::RegexBuilder::new(&format!("^(?:{text})$")).size_limit(1 << 20).build();
        match compiled {
            Ok(compiled) => Ok(Self { text, compiled }),
            Err(source) => Err(PatternError { reason: last_line(&source.to_string()), text }),
        }
    }
}

impl From<Pattern> for String {
    fn from(pattern: Pattern) -> Self {
        pattern.text
    }
}

/// A text that is no regular expression.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is not a regular expression: {reason}")]
pub struct PatternError {
    text: String,
    reason: String,
}

/// The regex crate draws a picture first and says what is wrong last.
fn last_line(text: &str) -> String {
    text.lines().last().unwrap_or_default().trim_start_matches("error: ").to_owned()
}

/// One text, or a list of them.
#[derive(Deserialize, JsonSchema)]
#[serde(untagged)]
enum OneOrMany {
    One(String),
    Many(Vec<String>),
}

fn one_or_many<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    Ok(match OneOrMany::deserialize(deserializer)? {
        OneOrMany::One(text) => vec![text],
        OneOrMany::Many(texts) => texts,
    })
}
