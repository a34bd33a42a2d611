//! Pure: header sets as distributions publish them: in images, and at addresses with a checksum or a signature beside them.

use oci::ImageReference;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::KernelTarget;
use crate::definition::checked::{FileAddress, ImagePattern, LocalPath, PathInside, SYSTEM_PLACEHOLDERS};

/// Headers in an image.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageHeaders {
    /// A reference with a tag or a digest, in which `{{release}}`, `{{kernel_label}}`, `{{os_id}}`, `{{os_version}}`,
    /// `{{releasever}}`, `{{arch}}` (`amd64`), `{{basearch}}` (`x86_64`), `{{ostree_version}}` and `{{rhel_version}}` (of the
    /// nodes' labels) and `{{digest}}` (of `digests` or `imageStream`) may stand for the kernel's. `{{kernel_label}}` is the
    /// release as tags can have it. The image counts by its digest.
    pub image: ImagePattern,
    /// Where in the image they are: a directory that is the kernel's build tree or a root (`usr/src`, `lib/modules`), or
    /// an archive of one. Without it: what the image has in `usr/src` and `lib/modules`. The same placeholders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathInside>,
}

/// Headers at an address.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DownloadedHeaders {
    /// The archive's address, with the placeholders of `headers.oci` but `{{digest}}`.
    pub url: FileAddress,
    /// What says that it is the right one.
    pub verify: FileProof,
    /// Where in the archive the headers are, as in `headers.oci`. Without it: at its top, or one directory down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<PathInside>,
}

/// What says that a file is the right one: exactly one field.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum FileProof {
    /// The address of a file as sha256sum and sha512sum write them, with the archive's checksum.
    Checksums(FileAddress),
    /// A detached OpenPGP signature.
    Signature(DetachedSignature),
}

/// A detached OpenPGP signature.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DetachedSignature {
    /// Its address.
    pub url: FileAddress,
    /// The keys that sign, as text (`-----BEGIN PGP PUBLIC KEY BLOCK-----`, one or several), relative to the definitions
    /// directory.
    pub signed_by: LocalPath,
}

/// The image that a pattern names for a kernel, or what there would have to be.
pub fn image_for(pattern: &ImagePattern, target: &KernelTarget) -> Result<ImageReference, String> {
    text_for(pattern, target)?.parse::<ImageReference>().map_err(|error| {
        let release = &target.release;
        format!("image for {release}: {error} (in a tag, {{{{kernel_label}}}} stands for a release)")
    })
}

/// A text with the kernel in the place of its placeholders, or one of those that only its nodes' system tells.
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
