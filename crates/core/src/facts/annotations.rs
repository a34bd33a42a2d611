//! Pure: the annotations that farrier puts on manifests, and reads back.

use std::{collections::BTreeMap, str::FromStr};

use oci::{ImageError, ImageManifest};

use super::ModuleSignerFact;
use crate::{
    image::{Digest, InputHash},
    kernel::KernelRelease,
    kmod::Verdict,
};

pub use oci::annotations::{BASE_DIGEST, BASE_NAME, CREATED, PREDICATE_TYPE, REF_NAME, TITLE, VERSION};

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
/// The check report in a few words: `5 modules: loads`.
pub const CHECK_SUMMARY: &str = "farrier.dev/check-summary";
/// Digest over the content that the payload exposes to drivers that are compiled against it.
pub const EXPOSED_DIGEST: &str = "farrier.dev/exposed-digest";
/// Hash over what was built but for the kernel, 64 hexadecimal digits.
pub const RECIPE: &str = "farrier.dev/recipe";
/// The input hash without the digests of what only the registry vouches for, where it has some: an image with the same
/// one is made from what the same definitions say.
pub const DECLARED_HASH: &str = "farrier.dev/declared-hash";
/// The input hash without the signing of modules, where they are signed: images with one have the same payload but for
/// the signatures.
pub const UNSIGNED_HASH: &str = "farrier.dev/unsigned-hash";
/// Who signed the modules: what became of those that were signed already (`keep`, `replace`), the certificate's serial number as
/// `modinfo` shows it, and the certificate's digest, with blanks between them.
pub const MODULE_SIGNER: &str = "farrier.dev/module-signer";
/// Digest of the image for another kernel whose payload this is.
pub const REUSED_FROM: &str = "farrier.dev/reused-from";
/// Operating system as `<id>-<version>`.
pub const OS: &str = "farrier.dev/os";
/// The compiler and toolchain image.
pub const TOOLCHAIN: &str = "farrier.dev/toolchain";
/// What the header set was resolved to: packages with versions and digests, or a file's digest.
pub const HEADERS: &str = "farrier.dev/headers";
/// What the sources were resolved to, each as its origin says.
pub const SOURCES: &str = "farrier.dev/sources";

/// Of a header set or a root file system: its architecture.
pub const ARCHITECTURE: &str = "farrier.dev/architecture";
/// Of a header set: the compiler that the kernel was built with, `gcc 12`.
pub const COMPILER: &str = "farrier.dev/compiler";
/// Of a header set: how many symbols `Module.symvers` lists; `none` without one, when what modules need is not known.
pub const EXPORTED_SYMBOLS: &str = "farrier.dev/exported-symbols";
/// Of a header set: digest of its uncompressed layer, by which the same content is known.
pub const HEADERS_CONTENT: &str = "farrier.dev/headers-content";
/// Of a header set: what goes into input hashes beyond the kernel release; absent where the release says it all, as
/// for packages (decision 0002).
pub const HEADERS_IDENTITY: &str = "farrier.dev/headers-identity";

/// The exact releases of all kernels that a union image has modules for, with blanks between them; for people and
/// other programs.
pub const KERNELS: &str = "farrier.dev/kernels";
/// The images whose payloads a union image has: `<kernel release>@<digest>`, with blanks between them.
pub const MEMBERS: &str = "farrier.dev/members";

/// On the record of kernels: the day on which each was last seen, as a JSON object.
pub const KERNELS_SEEN: &str = "farrier.dev/kernels-seen";
/// On the record of builds: how long the last ones took, as [`BuildTimes`](crate::plan::BuildTimes) has it.
pub const BUILD_TIMES: &str = "farrier.dev/build-times";
/// On a source or root file system in the store: the content's identity where it was made, as it goes into input hashes.
pub const IDENTITY: &str = "farrier.dev/identity";
/// On a root file system in the store: digest of the uncompressed layer.
pub const DIFF_ID: &str = "farrier.dev/diff-id";
/// On a root file system in the store: the packages that were asked for, with blanks between them.
pub const PACKAGES: &str = "farrier.dev/packages";

/// Longest value that is read back.
const MAX_VALUE: usize = 4096;
/// Longest list of members that is read back: more than [`MAX_VALUE`], because 40 kernels fill that.
const MAX_MEMBERS: usize = 16384;

/// Each fact that is one annotation, named once: its reader is `typed`, or `text` where people are shown it.
macro_rules! image_facts {
    ($($(#[$doc:meta])+ $field:ident: $type:ty = $read:ident($key:ident),)+) => {
        /// What a published manifest says about itself. An absent annotation is `None`: images of others
        /// have none of them.
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct ImageFacts {
            $($(#[$doc])+ pub $field: Option<$type>,)+
            /// The images for single kernels that a union image is made from; empty for all others.
            pub members: BTreeMap<KernelRelease, Digest>,
        }

        impl ImageFacts {
            /// Reads annotations, which are not trusted.
            pub fn from_annotations(annotations: &BTreeMap<String, String>) -> Result<Self, FactsError> {
                Ok(Self { $($field: $read(annotations, $key)?,)+ members: members(annotations)? })
            }

            /// The same as annotations.
            pub fn to_annotations(&self) -> BTreeMap<String, String> {
                let list = |item: fn((&KernelRelease, &Digest)) -> String| {
                    let items: Vec<String> = self.members.iter().map(item).collect();
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
    /// The input hash without the digests of what only the registry vouched for; `None` where it had none.
    declared_hash: InputHash = typed(DECLARED_HASH),
    /// Kernel release.
    kernel_release: KernelRelease = typed(KERNEL_RELEASE),
    /// Driver version, for people.
    driver_version: String = text(DRIVER_VERSION),
    /// Payload digest.
    payload_digest: Digest = typed(PAYLOAD_DIGEST),
    /// Digest over the exposed headers' content; `None` where nothing is exposed.
    exposed_digest: Digest = typed(EXPOSED_DIGEST),
    /// Check verdict.
    verdict: Verdict = typed(CHECK_VERDICT),
    /// The check report in a few words, for people.
    check_summary: String = text(CHECK_SUMMARY),
    /// Hash over what was built but for the kernel.
    recipe: InputHash = typed(RECIPE),
    /// The input hash without the signing of modules.
    unsigned_hash: InputHash = typed(UNSIGNED_HASH),
    /// Who signed the modules.
    module_signer: ModuleSignerFact = typed(MODULE_SIGNER),
    /// The image whose payload it has.
    reused_from: Digest = typed(REUSED_FROM),
    /// Operating system, for people.
    os: String = text(OS),
    /// Toolchain, for people.
    toolchain: String = text(TOOLCHAIN),
}

/// Why a manifest gives no facts.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum FactsError {
    /// It is no image manifest.
    #[error("read image facts")]
    Manifest(#[from] ImageError),
    /// An annotation of farrier's that farrier did not write, with its value, cut to 80 characters.
    #[error("annotation {key} holds {value:?}")]
    Value { key: &'static str, value: String },
}

impl ImageFacts {
    /// Reads a manifest's bytes, which are not trusted.
    pub fn from_manifest(bytes: &[u8]) -> Result<Self, FactsError> {
        Self::from_annotations(&ImageManifest::parse(bytes)?.annotations)
    }
}

fn typed<T: FromStr>(
    annotations: &BTreeMap<String, String>,
    key: &'static str,
) -> Result<Option<T>, FactsError> {
    let parse = |value: &String| value.parse().map_err(|_| refused(key, value));
    annotations.get(key).map(parse).transpose()
}

/// Free text is shown to people, so it must not steer their terminal.
fn text(annotations: &BTreeMap<String, String>, key: &'static str) -> Result<Option<String>, FactsError> {
    match annotations.get(key) {
        Some(value) if value.len() > MAX_VALUE || value.chars().any(char::is_control) => {
            Err(refused(key, value))
        }
        value => Ok(value.cloned()),
    }
}

fn members(annotations: &BTreeMap<String, String>) -> Result<BTreeMap<KernelRelease, Digest>, FactsError> {
    let Some(text) = annotations.get(MEMBERS) else { return Ok(BTreeMap::new()) };
    let member = |item: &str| {
        let (kernel, digest) = item.split_once('@')?;
        Some((kernel.parse().ok()?, digest.parse().ok()?))
    };
    let read: Option<BTreeMap<_, _>> = text.split(' ').map(member).collect();
    read.filter(|_| text.len() <= MAX_MEMBERS).ok_or_else(|| refused(MEMBERS, text))
}

fn refused(key: &'static str, value: &str) -> FactsError {
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
