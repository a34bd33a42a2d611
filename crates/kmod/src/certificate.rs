//! Pure: the X.509 certificate (RFC 5280) of the key that signs modules, as far as a signature needs it.

use jiff::Timestamp;
use x509_cert::{
    der::{Decode as _, Encode as _, oid::db::rfc4519},
    name::Name,
    time::Time,
};

use super::signature::serial_id;

/// Bytes of a certificate. Those of module signing keys have about 1,500.
const MAX_CERTIFICATE: usize = 64 << 10;

/// A certificate of a module signing key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    /// Its DER.
    pub der: Vec<u8>,
    /// The issuer's name, encoded.
    pub(super) issuer: Vec<u8>,
    /// The serial number, encoded.
    pub(super) serial: Vec<u8>,
    /// The common name (else the organisation) of the issuer, as `modinfo` shows a module's signer.
    pub issuer_name: Option<String>,
    /// The common name (else the organisation) of whose key it is.
    pub subject: Option<String>,
    /// The public key: `SubjectPublicKeyInfo`, DER.
    pub public_key: Vec<u8>,
    /// The serial number as `modinfo` shows it: `6A:0F:...`.
    pub key_id: String,
    /// The first moment of its validity. The kernel does not look at it.
    pub not_before: Timestamp,
    /// The last one.
    pub not_after: Timestamp,
}

/// Bytes that are no certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it holds no X.509 certificate")]
pub struct CertificateError;

impl From<x509_cert::der::Error> for CertificateError {
    fn from(_: x509_cert::der::Error) -> Self {
        Self
    }
}

impl Certificate {
    /// Reads a certificate's DER.
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

/// The common name, else the organisation.
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
