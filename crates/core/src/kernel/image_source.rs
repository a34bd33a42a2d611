//! Pure: where a family's kernel images come from.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::{
    AptPackages, FurtherRpmPackages,
    checked::{HeadersPath, PackageAlternatives},
};

/// Where a family's kernel images come from: exactly one field. They settle what headers cannot tell, and are what a
/// boot check boots; they are no input of a build.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum KernelImageSource {
    /// Packages of a Debian-like distribution that hold a kernel image and its modules; what they depend on does not come
    /// along. Names with ` | ` between them are alternatives, the first that exists being taken.
    Apt(AptKernelImage),
    /// RPM packages of the kernel's release that hold an image and its modules.
    Rpm(FurtherRpmPackages),
    /// Files, one set for each release: paths may hold `{{release}}`.
    File(KernelImageFile),
}

/// Packages that hold one kernel's image.
pub type AptKernelImage = AptPackages<PackageAlternatives>;

/// A kernel image in files that the user brings.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelImageFile {
    /// The bootable image (vmlinuz), relative to the definitions directory; `{{release}}` stands for the kernel
    /// release.
    pub path: HeadersPath,
    /// The kernel's own modules (its `/lib/modules/<release>`), in the same way.
    pub modules: Option<HeadersPath>,
    /// Its `System.map`, in the same way.
    pub system_map: Option<HeadersPath>,
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
