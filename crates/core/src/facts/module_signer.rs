//! Pure: who signed an image's modules, as its annotations say it.

use std::{fmt, str::FromStr};

use crate::{image::Digest, site::Signed};

/// Who signed an image's modules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModuleSignerFact {
    /// What became of those that were signed already.
    pub signed: Signed,
    /// The certificate's serial number as `modinfo` shows it: `6A:0F:...`.
    pub key_id: String,
    /// sha256 over the certificate.
    pub certificate: Digest,
}

/// Text that says nothing of a signer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no signer of modules")]
pub struct ModuleSignerError(pub String);

impl fmt::Display for ModuleSignerFact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { signed, key_id, certificate } = self;
        let signed = match signed {
            Signed::Keep => "keep",
            Signed::Replace => "replace",
        };
        write!(f, "{signed} {key_id} {certificate}")
    }
}

impl FromStr for ModuleSignerFact {
    type Err = ModuleSignerError;

    fn from_str(text: &str) -> Result<Self, ModuleSignerError> {
        let none = || ModuleSignerError(text.chars().take(80).collect());
        let mut parts = text.split(' ');
        let (Some(signed), Some(key_id), Some(certificate), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(none());
        };
        let signed = match signed {
            "keep" => Signed::Keep,
            "replace" => Signed::Replace,
            _ => return Err(none()),
        };
        let is_key_id = !key_id.is_empty() && key_id.bytes().all(|b| b.is_ascii_hexdigit() || b == b':');
        let certificate = certificate.parse().map_err(|_| none())?;
        if is_key_id { Ok(Self { signed, key_id: key_id.to_owned(), certificate }) } else { Err(none()) }
    }
}
