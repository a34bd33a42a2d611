//! The origin of a family's kernel images.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::definition::{
    AptPackages, FurtherRpmPackages,
    checked::{HeadersPath, PackageAlternatives},
};

/// Origin of a family's kernel images. Set exactly one field. Kernel images provide facts that headers do not contain, and boot
/// checks boot them. They are not build inputs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum KernelImageSource {
    /// Packages of a Debian-like distribution that contain a kernel image and its modules, without their dependencies. ` | `
    /// separates alternative names; the first package that exists is used.
    Apt(AptKernelImage),
    /// RPM packages of the kernel's release that contain an image and its modules.
    Rpm(FurtherRpmPackages),
    /// Files for each release. Paths may contain `{{release}}`.
    File(KernelImageFile),
}

/// Packages that contain one kernel's image.
pub type AptKernelImage = AptPackages<PackageAlternatives>;

/// A kernel image in user-provided files.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct KernelImageFile {
    /// The bootable image (vmlinuz), relative to the definitions directory. `{{release}}` is replaced with the kernel release.
    pub path: HeadersPath,
    /// The kernel's own modules (its `/lib/modules/<release>`), as a path like `path`.
    pub modules: Option<HeadersPath>,
    /// The kernel's `System.map`, as a path like `path`.
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
