//! Pure: who signs modules and images.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::{Display, EnumString};

use super::{Policy, SecretKey, SecretSource};
use crate::definition::checked::LocalPath;

/// A private key, or what uses one: exactly one field. It is never in a build, a layer, a log or the cache.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub enum KeySource {
    /// A file, absolute or relative to the definitions directory: a private key in PEM form, PKCS#8 or PKCS#1, which may
    /// be encrypted. The kernel's build leaves certificate and key in one such file (`certs/signing_key.pem`).
    File(LocalPath),
    /// The same in an entry of a Kubernetes Secret.
    Secret(SecretKey),
    /// A program and its arguments, for keys that cannot be had, such as those of a hardware security module. It gets the
    /// digest, in raw bytes, on its standard input and writes the signature, in raw bytes, to its standard output: RSA with
    /// PKCS#1 v1.5 padding over the DigestInfo that it makes of the digest, or ECDSA as DER or as two numbers side by side.
    /// `{{hash}}` in an argument stands for `sha256`, `sha384` or `sha512`. It has a minute for each signature.
    Command(#[schemars(length(min = 1))] Vec<String>),
}

/// What becomes of a module that is signed already.
#[derive(Serialize, Deserialize, JsonSchema, Display, EnumString)]
#[serde(rename_all = "camelCase")]
#[strum(serialize_all = "camelCase")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Signed {
    /// It keeps its signature, unless that is farrier's own from an earlier key.
    #[default]
    Keep,
    /// It gets ours instead.
    Replace,
}

/// Who signs the modules of all images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModuleSigning {
    /// The key.
    pub key: KeySource,
    /// The passphrase of an encrypted key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub passphrase: Option<SecretSource>,
    /// The certificate that the kernels know, PEM or DER; relative to the definitions directory. What it signs counts as
    /// trusted by them in the static check; a boot check shows whether it is.
    pub certificate: LocalPath,
    /// What becomes of modules that are signed already.
    #[serde(default)]
    pub signed: Signed,
}

/// Who signs published images, in the form that `cosign verify --key` accepts.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ImageSigning {
    /// The key: ECDSA P-256 or RSA.
    pub key: KeySource,
    /// The passphrase of an encrypted key.
    pub passphrase: Option<SecretSource>,
    /// Its public half, PEM; needed where a command signs.
    pub public_key: Option<LocalPath>,
    /// What becomes of images that are published already, with the right inputs and without our signature.
    #[serde(default)]
    pub existing: Existing,
    /// `existing: sign` vouches for whatever stands under a tag, so that `policy.requireSigned` proves no more than that
    /// someone could write there. Both together need this word.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub trust_registry_writers: bool,
}

impl ImageSigning {
    /// Does it sign what it did not make, where the policy asks for signatures and the definition does not say that this is meant?
    pub fn belies(&self, policy: &Policy) -> bool {
        let Self { existing, trust_registry_writers, .. } = self;
        *existing == Existing::Sign && !trust_registry_writers && !policy.is_empty()
    }
}

/// What becomes of published images without our signature.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Existing {
    /// They are signed as they are: right for as long as all who may write to the registry are trusted.
    Sign,
    /// They stay as they are. Only what this farrier publishes is signed.
    #[default]
    Leave,
}
