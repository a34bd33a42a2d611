//! Header sets that distributions publish, in images or at URLs with a checksum or a signature.

use oci::ImageReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::KernelTarget;
use crate::definition::checked::{FileAddress, ImagePattern, LocalPath, PathInside, SYSTEM_PLACEHOLDERS};

/// Headers in an image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageHeaders {
    /// Reference with a tag or a digest. These placeholders are replaced with the kernel's values: `{{release}}`,
    /// `{{kernel_label}}` (the release in the form of a tag), `{{os_id}}`, `{{os_version}}`, `{{releasever}}`, `{{arch}}`
    /// (`amd64`), `{{basearch}}` (`x86_64`), `{{ostree_version}}` and `{{rhel_version}}` (from the nodes' labels) and
    /// `{{digest}}` (from `digests` or `imageStream`). farrier identifies the image by its digest.
    pub image: ImagePattern,
    /// Location of the headers in the image, with the same placeholders. It is a directory that is the kernel's build tree or a
    /// root (`usr/src`, `lib/modules`), or an archive of one. Default: `usr/src` and `lib/modules` of the image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathInside>,
}

/// Headers in an archive at a URL.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DownloadedHeaders {
    /// URL of the archive, with the placeholders of `headers.oci` except `{{digest}}`.
    pub url: FileAddress,
    /// Verification of the archive.
    pub verify: FileProof,
    /// Location of the headers in the archive, as in `headers.oci`. Default: the top of the archive, or one directory down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathInside>,
}

/// Verification of a downloaded file. Set exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum FileProof {
    /// URL of a checksum file, in the format of sha256sum or sha512sum, that lists the archive.
    Checksums(FileAddress),
    /// A detached OpenPGP signature.
    Signature(DetachedSignature),
}

/// A detached OpenPGP signature.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DetachedSignature {
    /// URL of the signature.
    pub url: FileAddress,
    /// Public keys that verify the signature, in ASCII armor (`-----BEGIN PGP PUBLIC KEY BLOCK-----`, one or several). The path
    /// is relative to the definitions directory.
    pub signed_by: LocalPath,
}

/// Returns the image reference for a kernel. An error names the missing value or invalid reference.
pub fn image_for(pattern: &ImagePattern, target: &KernelTarget) -> Result<ImageReference, String> {
    text_for(pattern, target)?.parse::<ImageReference>().map_err(|error| {
        let release = &target.release;
        format!("image for {release}: {error} (in a tag, write {{{{kernel_label}}}} for the release)")
    })
}

/// Fills in the placeholders of a text. An error names a placeholder that only the nodes' system can provide.
pub fn text_for(text: &str, target: &KernelTarget) -> Result<String, String> {
    match SYSTEM_PLACEHOLDERS.iter().find(|placeholder| text.contains(**placeholder)) {
        Some(placeholder) => Err(format!("value of {placeholder} for {}", target.release)),
        None => Ok(target.fill(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::{Architecture, HeaderSource};

    #[test]
    fn the_forms_are_read_and_written() {
        for json in [
            r#"{"oci":{"image":"r.test/kernel:{{os_version}}","path":"/src"}}"#,
            r#"{"oci":{"image":"r.test/kernel:{{kernel_label}}"}}"#,
            r#"{"url":{"url":"https://h.test/{{os_version}}/h.tgz","verify":{"checksums":"https://h.test/{{os_version}}/SHA256SUMS"}}}"#,
            r#"{"url":{"url":"https://h.test/h.tgz","verify":{"signature":{"url":"https://h.test/h.tgz.sig","signedBy":"keys/h.asc"}},"path":"/a"}}"#,
        ] {
            let read: HeaderSource = serde_json::from_str(json).unwrap();
            assert_eq!(serde_json::to_string(&read).unwrap(), json);
        }
        for json in [
            r#"{"oci":{"image":"r.test/kernel"}}"#,
            r#"{"oci":{"image":"r.test/kernel:1","path":"src"}}"#,
            r#"{"url":{"url":"https://h.test/h.tgz"}}"#,
            r#"{"url":{"url":"https://h.test/h.tgz","verify":{}}}"#,
        ] {
            assert!(serde_json::from_str::<HeaderSource>(json).is_err(), "{json}");
        }
    }

    #[test]
    fn an_image_is_named_for_a_kernel() {
        let target = KernelTarget {
            os: "talos".parse().unwrap(),
            os_version: "v1.9.0".parse().unwrap(),
            release: "6.12.6-talos+".parse().unwrap(),
            arch: Architecture::Arm64,
        };
        let image =
            |pattern: &str| image_for(&pattern.parse().unwrap(), &target).map(|image| image.to_string());
        let named = image("r.test/{{os_id}}-{{arch}}:{{os_version}}-{{kernel_label}}");
        assert_eq!(named.unwrap(), "r.test/talos-arm64:v1.9.0-6.12.6-talos");
        assert!(image("r.test/kernel:{{release}}").unwrap_err().contains("kernel_label"));
    }
}
