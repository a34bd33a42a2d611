//! X.509 certificate (RFC 5280) of a module signing key, limited to the fields that signatures need.

use jiff::Timestamp;
use x509_cert::{
    der::{Decode as _, Encode as _, oid::db::rfc4519},
    name::Name,
    time::Time,
};

use super::signature::serial_id;

/// Maximum size of a certificate in bytes. Certificates of module signing keys have about 1,500.
const MAX_CERTIFICATE: usize = 64 << 10;

/// Certificate of a module signing key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Encoded certificate (DER).
    pub der: Vec<u8>,
    /// Issuer's name (DER).
    pub(super) issuer: Vec<u8>,
    /// Serial number (DER).
    pub(super) serial: Vec<u8>,
    /// Common name of the issuer, or else its organization, as `modinfo` shows a module's signer.
    pub issuer_name: Option<String>,
    /// Common name of the key's owner, or else its organization.
    pub subject: Option<String>,
    /// Public key (`SubjectPublicKeyInfo`, DER).
    pub public_key: Vec<u8>,
    /// Serial number as `modinfo` shows it: `6A:0F:...`.
    pub key_id: String,
    /// Start of the validity period, which the kernel ignores.
    pub not_before: Timestamp,
    /// End of the validity period, which the kernel ignores.
    pub not_after: Timestamp,
}

/// Error for bytes that are not a certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it holds no X.509 certificate")]
pub struct CertificateError;

impl From<x509_cert::der::Error> for CertificateError {
    fn from(_: x509_cert::der::Error) -> Self {
        Self
    }
}

impl Certificate {
    /// Parses a certificate (DER).
    ///
    /// Memory: at most 30 times the DER, which may have 64 KiB.
    pub fn parse(der: &[u8]) -> Result<Self, CertificateError> {
        if der.len() > MAX_CERTIFICATE {
            return Err(CertificateError);
        }
        let certificate = x509_cert::Certificate::from_der(der)?;
        let signed = certificate.tbs_certificate();
        let validity = signed.validity();
        Ok(Self {
            der: der.to_vec(),
            issuer: signed.issuer().to_der()?,
            serial: signed.serial_number().to_der()?,
            issuer_name: name(signed.issuer()),
            subject: name(signed.subject()),
            public_key: signed.subject_public_key_info().to_der()?,
            key_id: serial_id(signed.serial_number().as_bytes()),
            not_before: time(validity.not_before)?,
            not_after: time(validity.not_after)?,
        })
    }
}

/// Returns the common name, or else the organization.
fn name(name: &Name) -> Option<String> {
    let part = |id| name.iter().find(|part| part.oid == id);
    let part = part(rfc4519::COMMON_NAME)
        .or_else(|| name.iter().filter(|part| part.oid == rfc4519::ORGANIZATION_NAME).last())?;
    Some(String::from_utf8_lossy(part.value.value()).into_owned())
}

fn time(time: Time) -> Result<Timestamp, CertificateError> {
    let seconds = i64::try_from(time.to_unix_duration().as_secs()).map_err(|_| CertificateError)?;
    Timestamp::from_second(seconds).map_err(|_| CertificateError)
}
