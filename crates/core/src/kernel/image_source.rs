//! Pure: where a family's kernel images come from.

use std::path::PathBuf;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::AptSuites;
use crate::image::checked::{
    self, Component, HeadersPath, LocalPath, Mirror, PackageAlternatives, Rule, Suite,
};

/// Where a family's kernel images come from: exactly one field. They settle what headers cannot tell, and are what a
/// boot check boots; they are no input of a build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum KernelImageSource {
    /// Packages of a Debian-like distribution.
    Apt(AptKernelImage),
    /// Files, one set for each release: paths may hold `{{release}}`.
    File(KernelImageFile),
}

/// Packages that hold a kernel image and its modules. What they depend on does not come along.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(from = "AptKernelImageForm", into = "AptKernelImageForm")]
#[schemars(with = "AptKernelImageForm")]
pub struct AptKernelImage {
    /// Package names; `{{release}}` stands for the kernel release. Names with ` | ` between them are
    /// alternatives, the first that exists being taken.
    pub packages: Vec<String>,
    /// Where to look for them.
    pub from: AptSuites,
}

/// [`AptKernelImage`] as written: serde cannot refuse unknown fields of a flattened structure.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct AptKernelImageForm {
    /// Package names; `{{release}}` stands for the kernel release. Names with ` | ` between them are
    /// alternatives, the first that exists being taken.
    #[serde(deserialize_with = "checked::some::<PackageAlternatives, _>")]
    #[schemars(length(min = 1), inner(regex(pattern = PackageAlternatives::PATTERN)))]
    packages: Vec<String>,
    /// Suites, such as `bookworm`, `bookworm-security`.
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

impl From<AptKernelImageForm> for AptKernelImage {
    fn from(form: AptKernelImageForm) -> Self {
        let AptKernelImageForm { packages, suites, components, mirror, signed_by } = form;
        Self { packages, from: AptSuites { suites, components, mirror, signed_by } }
    }
}

impl From<AptKernelImage> for AptKernelImageForm {
    fn from(image: AptKernelImage) -> Self {
        let AptKernelImage { packages, from: AptSuites { suites, components, mirror, signed_by } } = image;
        Self { packages, suites, components, mirror, signed_by }
    }
}

/// A kernel image in files that the user brings.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelImageFile {
    /// The bootable image (vmlinuz), relative to the definitions directory; `{{release}}` stands for the kernel
    /// release.
    #[serde(deserialize_with = "checked::one::<HeadersPath, _>")]
    pub path: String,
    /// The kernel's own modules (its `/lib/modules/<release>`), in the same way.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional::<HeadersPath, _>"
    )]
    pub modules: Option<String>,
    /// Its `System.map`, in the same way.
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "checked::optional::<HeadersPath, _>"
    )]
    pub system_map: Option<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(json: &str) -> Result<KernelImageSource, String> {
        serde_json::from_str(json).map_err(|error| error.to_string())
    }

    #[test]
    fn both_forms_are_read_and_written() {
        for json in [
            r#"{"apt":{"packages":["linux-image-{{release}}-unsigned | linux-image-{{release}}","b-{{release}}"],"suites":["sid"]}}"#,
            r#"{"file":{"path":"images/vmlinuz-{{release}}","modules":"images/{{release}}"}}"#,
        ] {
            assert_eq!(serde_json::to_string(&read(json).unwrap()).unwrap(), json);
        }
    }

    #[test]
    fn what_is_no_source_is_refused() {
        for json in [
            r#"{"apt":{"packages":["a-{{release}}|b-{{release}}"],"suites":["sid"]}}"#,
            r#"{"apt":{"packages":["a-{{release}} | "],"suites":["sid"]}}"#,
            r#"{"apt":{"packages":["a-{{version}}"],"suites":["sid"]}}"#,
            r#"{"apt":{"packages":[],"suites":["sid"]}}"#,
            r#"{"file":{"path":"vmlinuz-{{version}}"}}"#,
            r#"{"file":{"path":"vmlinuz","initrd":"x"}}"#,
            r#"{"path":"vmlinuz"}"#,
        ] {
            assert!(read(json).is_err(), "{json}");
        }
    }
}
