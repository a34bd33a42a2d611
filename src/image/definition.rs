//! Pure: `images/*.yaml`.

use std::{collections::BTreeMap, fmt, path::PathBuf, str::FromStr};

use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{self, Error as _, IntoDeserializer, MapAccess, Visitor, value::MapAccessDeserializer},
};

use super::{
    checked::{
        self, Argument, Component, DnsLabel, DnsName, Download, DriverVersion, EnvName, InnerPath,
        InnerPattern, LabelKey, LabelValue, LocalPath, Mirror, ModuleName, OneLine, PackageName,
        PackageVersion, Reference, Rule, Sha256, Suite, TemplateName, VariableName,
    },
    tag,
};
use crate::kernel::{AptSuites, KernelFamily};

/// The version of farrier's definition language.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum ApiVersion {
    /// `farrier.dev/v1alpha1`.
    #[serde(rename = "farrier.dev/v1alpha1")]
    V1Alpha1,
}

/// A definition's metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Metadata {
    /// Name: a DNS label (RFC 1123), unique among definitions of its kind.
    pub name: ImageName,
}

/// A DNS label: 1 to 63 characters of `[a-z0-9-]`, a letter or digit at both ends.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
// Without this schemars would take `String`'s schema and lose the pattern.
#[schemars(!try_from, !into)]
pub struct ImageName(#[schemars(regex(pattern = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"))] String);

/// Why a string is not a definition's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a name: 1 to 63 of `a-z`, `0-9` and `-`, a letter or digit at both ends")]
pub struct ImageNameError(pub String);

impl ImageName {
    /// The name's text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for ImageName {
    type Err = ImageNameError;

    fn from_str(text: &str) -> Result<Self, ImageNameError> {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if (1..=63).contains(&text.len())
            && text.chars().all(inner)
            && !text.starts_with('-')
            && !text.ends_with('-')
        {
            Ok(Self(text.to_owned()))
        } else {
            Err(ImageNameError(text.chars().take(80).collect()))
        }
    }
}

impl TryFrom<String> for ImageName {
    type Error = ImageNameError;

    fn try_from(text: String) -> Result<Self, ImageNameError> {
        text.parse()
    }
}

impl From<ImageName> for String {
    fn from(name: ImageName) -> Self {
        name.0
    }
}

impl fmt::Display for ImageName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// One file of `images/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DriverImage {
    /// Always `farrier.dev/v1alpha1`.
    pub api_version: ApiVersion,
    /// Always `DriverImage`.
    pub kind: DriverImageKind,
    /// The image's name.
    pub metadata: Metadata,
    /// What it says.
    pub spec: DriverImageSpec,
}

/// The one value of an image's `kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum DriverImageKind {
    /// `DriverImage`.
    DriverImage,
}

/// How a driver image is built and where it goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DriverImageSpec {
    /// The driver's version.
    pub version: VersionSpec,
    /// The template's name: `templates/<template>.Dockerfile.hbs`.
    #[serde(deserialize_with = "checked::one::<TemplateName, _>")]
    #[schemars(regex(pattern = TemplateName::PATTERN))]
    pub template: String,
    /// Values for the template, as `{{vars.<name>}}`.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "checked::map::<VariableName, OneLine, _>"
    )]
    pub vars: BTreeMap<String, String>,
    /// What is compiled; each arrives in the build context as `sources/<name>/`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<SourceSpec>,
    /// Patches, in order; those whose range holds the kernel arrive as `patches/<number>-<file name>`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub patches: Vec<PatchSpec>,
    /// The nodes that the image is for.
    #[serde(default)]
    pub nodes: NodeSelector,
    /// Range over the release's `x.y.z`, such as `>=4.18, <6.18`; every kernel when absent.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "checked::version_range")]
    #[schemars(with = "Option<String>")]
    pub kernels: Option<semver::VersionReq>,
    /// Module names that must be in the payload and must pass the check.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "checked::many::<ModuleName, _>"
    )]
    #[schemars(inner(regex(pattern = ModuleName::PATTERN)))]
    pub modules: Vec<String>,
    /// What surrounds the payload.
    #[serde(default)]
    pub runtime: RuntimeSpec,
    /// Who makes the final image.
    #[serde(default)]
    pub output: Output,
    /// Tags, the first one being the name that is looked up. Variables: `version`, `kernel_label`,
    /// `kernel_release`, `os_id`, `os_version`, `arch`.
    #[serde(default = "default_tags", deserialize_with = "tag_patterns")]
    #[schemars(length(min = 1))]
    pub tags: Vec<String>,
    /// What to do when the tag exists with another input hash.
    #[serde(default)]
    pub on_conflict: OnConflict,
    /// What is rewritten when a kernel changes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub rollout: Vec<RolloutSpec>,
}

/// The Network Operator's precompiled form, see `contracts.md` section 3.
fn default_tags() -> Vec<String> {
    vec!["{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}-{{arch}}".to_owned()]
}

/// A tag pattern that gives tags.
struct TagPattern(String);

impl<'de> Deserialize<'de> for TagPattern {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let pattern = String::deserialize(deserializer)?;
        tag::try_pattern(&pattern).map_err(D::Error::custom)?;
        Ok(Self(pattern))
    }
}

fn tag_patterns<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    let patterns = Vec::<TagPattern>::deserialize(deserializer)?;
    if patterns.is_empty() {
        return Err(D::Error::custom(
            "an image without tags cannot be found again; leave them out for the default",
        ));
    }
    Ok(patterns.into_iter().map(|pattern| pattern.0).collect())
}

/// A driver's version: written down, or that of one of its `apt` sources.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, JsonSchema)]
#[serde(untagged)]
#[schemars(deny_unknown_fields)]
pub enum VersionSpec {
    /// Written down.
    Literal(#[schemars(regex(pattern = DriverVersion::PATTERN))] String),
    /// The upstream part of the version of the package behind the named `apt` source.
    FromSource {
        /// The source's name.
        source: String,
    },
}

/// By hand, because serde's untagged enums lose both the place and the reason of an error.
impl<'de> Deserialize<'de> for VersionSpec {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(deny_unknown_fields)]
        struct FromSource {
            source: ImageName,
        }

        struct Form;

        impl<'de> Visitor<'de> for Form {
            type Value = VersionSpec;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a version, or `{source: NAME}` of an apt source")
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<VersionSpec, E> {
                checked::one::<DriverVersion, _>(text.into_deserializer()).map(VersionSpec::Literal)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<VersionSpec, A::Error> {
                let FromSource { source } = FromSource::deserialize(MapAccessDeserializer::new(map))?;
                Ok(VersionSpec::FromSource { source: source.to_string() })
            }
        }

        deserializer.deserialize_any(Form)
    }
}

/// One input that is compiled.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SourceSpec {
    /// Its directory under `sources/` in the build context.
    pub name: ImageName,
    /// Where it comes from: exactly one of `path`, `url`, `apt`.
    pub from: SourceOrigin,
    /// An archive inside the fetched tree that is unpacked in its place, as a path relative to the
    /// tree (`usr/src/nvidia-open-kernel.tar.xz`).
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional::<InnerPath, _>"
    )]
    #[schemars(regex(pattern = InnerPath::PATTERN))]
    pub unpack: Option<String>,
    /// The part of the (unpacked) tree that is used, as a relative path in which the last component
    /// may hold one `*`; it must match exactly once. Default: the whole tree.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional::<InnerPattern, _>"
    )]
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
        #[serde(
            default,
            skip_serializing_if = "Option::is_none",
            deserialize_with = "checked::optional::<Sha256, _>"
        )]
        #[schemars(regex(pattern = Sha256::PATTERN))]
        sha256: Option<String>,
    },
    /// A download; archives are unpacked.
    Url {
        /// The address, `http` or `https`.
        #[serde(deserialize_with = "checked::one::<Download, _>")]
        #[schemars(regex(pattern = Download::PATTERN))]
        url: String,
        /// sha256 of the file, hexadecimal.
        #[serde(deserialize_with = "checked::one::<Sha256, _>")]
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

/// Nodes by label; an empty selector matches every node.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeSelector {
    /// Every one of these labels must be there with this value.
    #[serde(default, deserialize_with = "checked::map::<LabelKey, LabelValue, _>")]
    pub match_labels: BTreeMap<String, String>,
}

/// What surrounds the payload in the image.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RuntimeSpec {
    /// The image below the payload; nothing when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base: Option<RuntimeBase>,
    /// The image's entrypoint.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "checked::many::<Argument, _>"
    )]
    #[schemars(inner(regex(pattern = Argument::PATTERN)))]
    pub entrypoint: Vec<String>,
    /// Environment variables.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "checked::map::<EnvName, Argument, _>"
    )]
    pub env: BTreeMap<String, String>,
}

/// The image below the payload: exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum RuntimeBase {
    /// Made with mmdebstrap from packages.
    Bootstrap(crate::kernel::BootstrapSpec),
    /// A reference to an image that exists, with its tag or digest.
    Image(#[serde(deserialize_with = "checked::one::<Reference, _>")] String),
}

/// Who makes the final image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Output {
    /// farrier, from the payload that the `modules` stage leaves in `/out`.
    #[default]
    Payload,
    /// The engine: the template is a complete Dockerfile.
    Image,
}

/// What to do when a tag exists with another input hash.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum OnConflict {
    /// Report it and change nothing.
    #[default]
    Refuse,
    /// Replace it.
    Overwrite,
}

/// One thing whose image field is rewritten.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case", tag = "strategy", try_from = "RolloutForm")]
// The schema is that of the enum; the form below exists for the messages.
#[schemars(!try_from, deny_unknown_fields)]
pub enum RolloutSpec {
    /// A DaemonSet of the cluster whose nodes share one kernel.
    Image {
        /// The DaemonSet's namespace.
        #[schemars(regex(pattern = DnsLabel::PATTERN))]
        namespace: String,
        /// The DaemonSet's name.
        #[serde(rename = "daemonSet")]
        #[schemars(regex(pattern = DnsName::PATTERN))]
        daemon_set: String,
        /// The container or init container whose image is set.
        #[schemars(regex(pattern = DnsLabel::PATTERN))]
        container: String,
    },
    /// A DaemonSet in a directory of manifests beside the cluster (GitOps).
    File {
        /// The file or directory, relative to the definitions directory.
        #[serde(deserialize_with = "checked::path::<LocalPath, _>")]
        path: PathBuf,
        /// The DaemonSet's namespace.
        #[schemars(regex(pattern = DnsLabel::PATTERN))]
        namespace: String,
        /// The DaemonSet's name.
        #[serde(rename = "daemonSet")]
        #[schemars(regex(pattern = DnsName::PATTERN))]
        daemon_set: String,
        /// The container or init container whose image is set.
        #[schemars(regex(pattern = DnsLabel::PATTERN))]
        container: String,
    },
}

/// [`RolloutSpec`] as written: serde's internally tagged enums lose the place of an error.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RolloutForm {
    strategy: Strategy,
    #[serde(deserialize_with = "checked::one::<DnsLabel, _>")]
    namespace: String,
    #[serde(deserialize_with = "checked::one::<DnsName, _>")]
    daemon_set: String,
    #[serde(deserialize_with = "checked::one::<DnsLabel, _>")]
    container: String,
    #[serde(default, deserialize_with = "checked::optional_path::<LocalPath, _>")]
    path: Option<PathBuf>,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Strategy {
    Image,
    File,
}

impl TryFrom<RolloutForm> for RolloutSpec {
    type Error = &'static str;

    fn try_from(form: RolloutForm) -> Result<Self, Self::Error> {
        let RolloutForm { strategy, namespace, daemon_set, container, path } = form;
        match (strategy, path) {
            (Strategy::Image, None) => Ok(Self::Image { namespace, daemon_set, container }),
            (Strategy::Image, Some(_)) => Err("strategy `image` has no `path`; strategy `file` has"),
            (Strategy::File, Some(path)) => Ok(Self::File { path, namespace, daemon_set, container }),
            (Strategy::File, None) => Err("strategy `file` needs a `path`: the file or directory to edit"),
        }
    }
}

/// Everything that the definitions directory holds, beside the built-in defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Definitions {
    /// Driver images, by name.
    pub images: BTreeMap<ImageName, DriverImage>,
    /// Kernel families in file-name order.
    pub families: Vec<KernelFamily>,
    /// Template texts by name.
    pub templates: BTreeMap<String, String>,
    /// Where relative paths in definitions start.
    pub root: PathBuf,
}
