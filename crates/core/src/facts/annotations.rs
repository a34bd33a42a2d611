//! The annotations that farrier writes to manifests and reads back.

use std::{collections::BTreeMap, str::FromStr};

use oci::{ImageError, ImageManifest};

use super::ModuleSignerFact;
use crate::{
    image::{Digest, InputHash},
    kernel::KernelRelease,
    kmod::Verdict,
};

pub use oci::annotations::{BASE_DIGEST, CREATED, PREDICATE_TYPE, REF_NAME, TITLE, VERSION};

/// The input hash, 64 hexadecimal digits.
pub const INPUT_HASH: &str = "farrier.dev/input-hash";
/// The exact kernel release.
pub const KERNEL_RELEASE: &str = "farrier.dev/kernel-release";
/// The driver's version.
pub const DRIVER_VERSION: &str = "farrier.dev/driver-version";
/// Digest of the payload tree, which does not depend on the base image.
pub const PAYLOAD_DIGEST: &str = "farrier.dev/payload-digest";
/// The check report's verdict.
pub const CHECK_VERDICT: &str = "farrier.dev/check-verdict";
/// Summary of the check report: `5 modules: loads`.
pub const CHECK_SUMMARY: &str = "farrier.dev/check-summary";
/// Digest of the content that the payload exposes to drivers that are compiled against it.
pub const EXPOSED_DIGEST: &str = "farrier.dev/exposed-digest";
/// Hash over all build inputs except the kernel, 64 hexadecimal digits.
pub const RECIPE: &str = "farrier.dev/recipe";
/// The input hash without the digests that only the registry vouches for; present where the inputs have such digests. Images
/// with the same declared hash were built from the same definitions.
pub const DECLARED_HASH: &str = "farrier.dev/declared-hash";
/// The input hash without module signing; present on images with signed modules. Images with the same unsigned hash have the
/// same payload except for the signatures.
pub const UNSIGNED_HASH: &str = "farrier.dev/unsigned-hash";
/// Signer of the modules, in three fields separated by blanks: how existing signatures were handled (`keep`, `replace`), the
/// certificate's serial number as `modinfo` shows it, and the certificate's digest.
pub const MODULE_SIGNER: &str = "farrier.dev/module-signer";
/// Digest of the image for another kernel that this payload was reused from.
pub const REUSED_FROM: &str = "farrier.dev/reused-from";
/// Operating system as `<id>-<version>`.
pub const OS: &str = "farrier.dev/os";
/// The compiler and the toolchain image.
pub const TOOLCHAIN: &str = "farrier.dev/toolchain";
/// Resolved header set: packages with versions and digests, or a file's digest.
pub const HEADERS: &str = "farrier.dev/headers";
/// Resolved sources, each in the notation of its origin.
pub const SOURCES: &str = "farrier.dev/sources";

/// On a header set or root file system: its architecture.
pub const ARCHITECTURE: &str = "farrier.dev/architecture";
/// On a header set: the compiler that the kernel was built with, as in `gcc 12`.
pub const COMPILER: &str = "farrier.dev/compiler";
/// On a header set: number of symbols in `Module.symvers`. `none` without that file: the needs of modules are then unknown.
pub const EXPORTED_SYMBOLS: &str = "farrier.dev/exported-symbols";
/// On a header set: digest of its uncompressed layer, which identifies the content.
pub const HEADERS_CONTENT: &str = "farrier.dev/headers-content";
/// On a header set: the part of input hashes beyond the kernel release. Absent where the release identifies the headers, as
/// for packages (decision 0002).
pub const HEADERS_IDENTITY: &str = "farrier.dev/headers-identity";

/// Exact releases of all kernels that a union image has modules for, separated by blanks. For people and other programs.
pub const KERNELS: &str = "farrier.dev/kernels";
/// Images whose payloads a union image contains: `<kernel release>@<digest>`, separated by blanks.
pub const MEMBERS: &str = "farrier.dev/members";

/// On the kernel record: the day on which each kernel was last seen, as a JSON object.
pub const KERNELS_SEEN: &str = "farrier.dev/kernels-seen";
/// On the build record: durations of recent builds, in the form of [`BuildTimes`](crate::plan::BuildTimes).
pub const BUILD_TIMES: &str = "farrier.dev/build-times";
/// On a stored source or root file system: its identity in input hashes, as stated by the machine that stored it.
pub const IDENTITY: &str = "farrier.dev/identity";
/// On a stored root file system: digest of the uncompressed layer.
pub const DIFF_ID: &str = "farrier.dev/diff-id";
/// On a stored root file system: the requested packages, separated by blanks.
pub const PACKAGES: &str = "farrier.dev/packages";

/// Longest value that farrier accepts when it reads annotations.
const MAX_VALUE: usize = 4096;
/// Longest member list that farrier accepts. 40 kernels already fill [`MAX_VALUE`].
const MAX_MEMBERS: usize = 16384;

/// Lists each fact that is a single annotation, with its reader: `typed`, or `text` for values shown to people.
macro_rules! image_facts {
    ($($(#[$doc:meta])+ $field:ident: $type:ty = $read:ident($key:ident),)+) => {
        /// Facts that a published manifest states about its image. An absent annotation is `None`, so images that farrier did not
        /// build have no facts.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct ImageFacts {
            $($(#[$doc])+ pub $field: Option<$type>,)+
            /// Images for single kernels that a union image was assembled from; empty for other images.
            pub members: BTreeMap<KernelRelease, Digest>,
        }

        impl ImageFacts {
            /// Reads annotations, which are untrusted input.
            pub fn from_annotations(annotations: &BTreeMap<String, String>) -> Result<Self, FactsError> {
                Ok(Self { $($field: $read(annotations, $key)?,)+ members: members(annotations)? })
            }

            /// Returns the facts as annotations.
            pub fn to_annotations(&self) -> BTreeMap<String, String> {
                let list = |to_text: fn((&KernelRelease, &Digest)) -> String| {
                    let items: Vec<String> = self.members.iter().map(to_text).collect();
                    (!items.is_empty()).then(|| items.join(" "))
                };
                [
                    $(($key, self.$field.as_ref().map(ToString::to_string)),)+
                    (KERNELS, list(|(kernel, _)| kernel.to_string())),
                    (MEMBERS, list(|(kernel, digest)| format!("{kernel}@{digest}"))),
                ]
                .into_iter()
                .filter_map(|(key, value)| Some((key.to_owned(), value?)))
                .collect()
            }
        }
    };
}

image_facts! {
    /// Input hash.
    input_hash: InputHash = typed(INPUT_HASH),
    /// The input hash without the digests that only the registry vouched for; `None` where there were no such digests.
    declared_hash: InputHash = typed(DECLARED_HASH),
    /// Kernel release.
    kernel_release: KernelRelease = typed(KERNEL_RELEASE),
    /// Driver version, for display.
    driver_version: String = text(DRIVER_VERSION),
    /// Payload digest.
    payload_digest: Digest = typed(PAYLOAD_DIGEST),
    /// Digest of the exposed headers' content; `None` where nothing is exposed.
    exposed_digest: Digest = typed(EXPOSED_DIGEST),
    /// Check verdict.
    verdict: Verdict = typed(CHECK_VERDICT),
    /// Summary of the check report, for display.
    check_summary: String = text(CHECK_SUMMARY),
    /// Hash over all build inputs except the kernel.
    recipe: InputHash = typed(RECIPE),
    /// The input hash without module signing.
    unsigned_hash: InputHash = typed(UNSIGNED_HASH),
    /// Signer of the modules.
    module_signer: ModuleSignerFact = typed(MODULE_SIGNER),
    /// The image that the payload was reused from.
    reused_from: Digest = typed(REUSED_FROM),
    /// Operating system, for display.
    os: String = text(OS),
    /// Toolchain, for display.
    toolchain: String = text(TOOLCHAIN),
}

/// Reason why facts cannot be read from a manifest.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// The bytes are not an image manifest.
    #[error("cannot read image facts")]
    Manifest(#[from] ImageError),
    /// A farrier annotation has a value that farrier never writes. The value is truncated to 80 characters.
    #[error("annotation {key} has the invalid value {value:?}")]
    Value { key: &'static str, value: String },
}

impl ImageFacts {
    /// Reads a manifest's bytes, which are untrusted input.
    pub fn from_manifest(bytes: &[u8]) -> Result<Self, FactsError> {
        Self::from_annotations(&ImageManifest::parse(bytes)?.annotations)
    }
}

fn typed<T: FromStr>(
    annotations: &BTreeMap<String, String>,
    key: &'static str,
) -> Result<Option<T>, FactsError> {
    let parse = |value: &String| value.parse().map_err(|_| invalid_value(key, value));
    annotations.get(key).map(parse).transpose()
}

/// Rejects control characters, because free text is printed and must not control a terminal.
fn text(annotations: &BTreeMap<String, String>, key: &'static str) -> Result<Option<String>, FactsError> {
    match annotations.get(key) {
        Some(value) if value.len() > MAX_VALUE || value.chars().any(char::is_control) => {
            Err(invalid_value(key, value))
        }
        value => Ok(value.cloned()),
    }
}

fn members(annotations: &BTreeMap<String, String>) -> Result<BTreeMap<KernelRelease, Digest>, FactsError> {
    let Some(text) = annotations.get(MEMBERS) else { return Ok(BTreeMap::new()) };
    let parse_member = |item: &str| {
        let (kernel, digest) = item.split_once('@')?;
        Some((kernel.parse().ok()?, digest.parse().ok()?))
    };
    let members: Option<BTreeMap<_, _>> = text.split(' ').map(parse_member).collect();
    members.filter(|_| text.len() <= MAX_MEMBERS).ok_or_else(|| invalid_value(MEMBERS, text))
}

fn invalid_value(key: &'static str, value: &str) -> FactsError {
    FactsError::Value { key, value: value.chars().take(80).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::site::Signed;

    fn facts() -> ImageFacts {
        ImageFacts {
            input_hash: Some("ab".repeat(32).parse().unwrap()),
            declared_hash: Some("ba".repeat(32).parse().unwrap()),
            kernel_release: Some("6.1.192-acme+".parse().unwrap()),
            driver_version: Some("25.10".to_owned()),
            payload_digest: Some(Digest::of(b"payload")),
            exposed_digest: Some(Digest::of(b"headers")),
            verdict: Some(Verdict::Loads),
            check_summary: Some("1 module: loads".to_owned()),
            recipe: Some("cd".repeat(32).parse().unwrap()),
            unsigned_hash: Some("ef".repeat(32).parse().unwrap()),
            module_signer: Some(ModuleSignerFact {
                signed: Signed::Keep,
                key_id: "6A:0F".to_owned(),
                certificate: Digest::of(b"certificate"),
            }),
            reused_from: Some(Digest::of(b"other")),
            os: Some("debian-12".to_owned()),
            toolchain: None,
            members: BTreeMap::new(),
        }
    }

    #[test]
    fn what_is_written_is_read_back() {
        assert_eq!(ImageFacts::from_annotations(&facts().to_annotations()).unwrap(), facts());
    }

    #[test]
    fn members_are_read_back_and_nothing_else() {
        let members: BTreeMap<KernelRelease, Digest> =
            (0..100).map(|n| (format!("6.1.{n}-acme+").parse().unwrap(), Digest::of(&[n]))).collect();
        let union = ImageFacts { kernel_release: None, members, ..facts() };
        let annotations = union.to_annotations();
        assert_eq!(ImageFacts::from_annotations(&annotations).unwrap(), union);
        assert!(annotations[KERNELS].starts_with("6.1.0-acme+ 6.1.1-acme+ "));
        let digest = Digest::of(b"x");
        let two_blanks = format!("6.1.0@{digest}  6.1.1@{digest}");
        for value in ["", "6.1.0", &format!("../etc@{digest}"), &two_blanks, "6.1.0@sha256:1"] {
            let annotations = [(MEMBERS.to_owned(), value.to_owned())].into();
            assert!(ImageFacts::from_annotations(&annotations).is_err(), "{value:?}");
        }
        let long = vec![format!("6.1.0@{digest}"); 300].join(" ");
        assert!(ImageFacts::from_annotations(&[(MEMBERS.to_owned(), long)].into()).is_err());
    }

    #[test]
    fn foreign_and_hostile_values() {
        assert_eq!(ImageFacts::from_annotations(&BTreeMap::new()).unwrap(), ImageFacts::default());
        for (key, value) in [
            (KERNEL_RELEASE, "../../etc"),
            (INPUT_HASH, "ab"),
            (MODULE_SIGNER, "keep 6A"),
            (CHECK_VERDICT, "fine"),
            (PAYLOAD_DIGEST, "sha256:../.."),
            (DRIVER_VERSION, "1\u{1b}[2J"),
        ] {
            let annotations = [(key.to_owned(), value.to_owned())].into();
            let error = ImageFacts::from_annotations(&annotations).unwrap_err();
            assert!(matches!(error, FactsError::Value { key: k, .. } if k == key));
        }
        assert!(ImageFacts::from_manifest(b"<html>").is_err());
    }
}
