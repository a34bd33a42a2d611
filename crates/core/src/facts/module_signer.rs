//! The signer of an image's modules, as an annotation.

use std::str::FromStr;

use crate::{definition::ParseError, image::Digest, site::Signed};

/// Signer of an image's modules.
#[derive(Clone, Debug, PartialEq, Eq, derive_more::Display)]
#[display("{signed} {key_id} {certificate}")]
pub struct ModuleSignerFact {
    /// Treatment of modules that already had a signature.
    pub signed: Signed,
    /// The certificate's serial number as `modinfo` shows it: `6A:0F:...`.
    pub key_id: String,
    /// SHA-256 of the certificate.
    pub certificate: Digest,
}

impl FromStr for ModuleSignerFact {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        Self::parse(text).ok_or_else(|| ParseError::new(text, "a signer of modules"))
    }
}

impl ModuleSignerFact {
    fn parse(text: &str) -> Option<Self> {
        let [signed, key_id, certificate]: [&str; 3] = text.split(' ').collect::<Vec<_>>().try_into().ok()?;
        let is_key_id = !key_id.is_empty() && key_id.bytes().all(|b| b.is_ascii_hexdigit() || b == b':');
        let (signed, certificate) = (signed.parse().ok()?, certificate.parse().ok()?);
        is_key_id.then(|| Self { signed, key_id: key_id.to_owned(), certificate })
    }
}
