//! Keys that sign modules and images.

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{Display, EnumString};

use super::{Policy, SecretKey, SecretSource};
use crate::{definition::checked::LocalPath, image::Digest};

/// A private key, or a command that uses one. Set exactly one field. The key is never in a build, a layer, a log or the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum KeySource {
    /// A file, absolute or relative to the definitions directory: a private key in PEM form, PKCS#8 or PKCS#1, optionally
    /// encrypted. The kernel's build writes certificate and key to one such file (`certs/signing_key.pem`).
    File(LocalPath),
    /// A private key in the same form, as an entry of a Kubernetes Secret.
    Secret(SecretKey),
    /// A program and its arguments, for keys that cannot be exported, for example from a hardware security module. The program
    /// reads the digest from standard input and writes the signature to standard output, both as raw bytes.
    ///
    /// A signature is RSA with PKCS#1 v1.5 padding over the DigestInfo that the program creates from the digest, or ECDSA as DER
    /// or as two concatenated numbers. `{{hash}}` in an argument is replaced with `sha256`, `sha384` or `sha512`. The timeout is
    /// one minute for each signature.
    Command(#[schemars(length(min = 1))] Vec<String>),
}

/// Treatment of modules that are already signed.
#[derive(Serialize, Deserialize, JsonSchema, Display, EnumString)]
#[serde(rename_all = "camelCase")]
#[strum(serialize_all = "camelCase")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Signed {
    /// Keep the signature, unless farrier made it with an earlier key.
    #[default]
    Keep,
    /// Replace the signature.
    Replace,
}

/// Settings for signing the modules of all images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModuleSigning {
    /// The key.
    pub key: KeySource,
    /// The passphrase of an encrypted key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SecretSource>,
    /// The certificate that the kernels trust, PEM or DER, relative to the definitions directory. The static check assumes that
    /// the kernels trust it; a boot check verifies that.
    pub certificate: LocalPath,
    /// Treatment of modules that are already signed.
    #[serde(default)]
    pub signed: Signed,
}

/// Settings for signing published images, in the form that `cosign verify --key` accepts.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageSigning {
    /// The key: ECDSA P-256 or RSA.
    pub key: KeySource,
    /// The passphrase of an encrypted key.
    pub passphrase: Option<SecretSource>,
    /// The public key, PEM. Required if a command signs.
    pub public_key: Option<LocalPath>,
    /// Treatment of published images with the right inputs but without this site's signature.
    #[serde(default)]
    pub existing: ExistingImages,
    /// Acknowledge the risk of `existing: sign` together with `policy.requireSigned`: farrier then signs whatever is stored under
    /// a tag, so a signature only proves that someone could write to the registry. The combination requires this field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub trust_registry_writers: bool,
}

impl ImageSigning {
    /// Whether the settings contradict the policy: it requires signatures, but farrier signs images that it did not build, and
    /// `trustRegistryWriters` is not set.
    pub fn contradicts(&self, policy: &Policy) -> bool {
        let Self { existing, trust_registry_writers, .. } = self;
        *existing == ExistingImages::Sign && !trust_registry_writers && !policy.require_signed.is_empty()
    }
}

/// A revoked key for images. farrier ignores all its signatures: a thief of the key can backdate them. Set `key` or `fingerprint`.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RevokedKey {
    /// The public key, PEM, relative to the definitions directory.
    pub key: Option<LocalPath>,
    /// `sha256:` and the SHA-256 of the public key in DER (`openssl pkey -pubin -outform DER`).
    #[schemars(with = "Option<String>")]
    pub fingerprint: Option<Digest>,
    /// Time of the revocation, for messages.
    #[schemars(with = "String")]
    pub since: Timestamp,
}

/// Treatment of published images without this site's signature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum ExistingImages {
    /// Sign them as they are. Use this only if everyone who may write to the registry is trusted.
    Sign,
    /// Leave them unsigned. farrier signs only the images that it publishes itself.
    #[default]
    Leave,
}
