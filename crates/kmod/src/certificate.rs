//! Pure: the X.509 certificate (RFC 5280) of the key that signs modules, as far as a signature needs it.

use jiff::{Timestamp, civil::DateTime, tz::TimeZone};

use super::{
    der::{BIT_STRING, CONTEXT_0, Der, Fault, GENERALIZED_TIME, INTEGER, SEQUENCE, UTC_TIME},
    signature::{key_id, name},
};

/// A certificate of a module signing key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Certificate {
    der: Vec<u8>,
    issuer: Vec<u8>,
    serial: Vec<u8>,
    issuer_name: Option<String>,
    subject: Option<String>,
    public_key: Vec<u8>,
    /// The first moment of its validity. The kernel does not look at it.
    pub not_before: Timestamp,
    /// The last one.
    pub not_after: Timestamp,
}

/// Bytes that are no certificate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("it holds no X.509 certificate")]
pub struct CertificateError;

impl From<Fault> for CertificateError {
    fn from(_: Fault) -> Self {
        Self
    }
}

impl Certificate {
    /// Reads a certificate's DER.
    pub fn parse(der: &[u8]) -> Result<Self, CertificateError> {
        let mut file = Der::new(der);
        let mut certificate = file.open(SEQUENCE)?;
        let mut to_be_signed = certificate.open(SEQUENCE)?;
        certificate.expect(SEQUENCE)?;
        certificate.expect(BIT_STRING)?;
        if !file.is_empty() {
            return Err(CertificateError);
        }
        if to_be_signed.peek() == Some(CONTEXT_0) {
            to_be_signed.next()?;
        }
        let serial = to_be_signed.element()?;
        to_be_signed.expect(SEQUENCE)?;
        let issuer = to_be_signed.element()?;
        let mut validity = to_be_signed.open(SEQUENCE)?;
        let (not_before, not_after) = (time(&mut validity)?, time(&mut validity)?);
        let subject = to_be_signed.expect(SEQUENCE)?;
        let public_key = to_be_signed.element()?;
        if (serial.tag, issuer.tag, public_key.tag) != (INTEGER, SEQUENCE, SEQUENCE) {
            return Err(CertificateError);
        }
        Ok(Self {
            der: der.to_vec(),
            issuer: issuer.whole.to_vec(),
            serial: serial.whole.to_vec(),
            issuer_name: name(issuer.content)?,
            subject: name(subject)?,
            public_key: public_key.whole.to_vec(),
            not_before,
            not_after,
        })
    }

    /// Its DER.
    pub fn der(&self) -> &[u8] {
        &self.der
    }

    /// The issuer's name, encoded.
    pub(super) fn issuer(&self) -> &[u8] {
        &self.issuer
    }

    /// The serial number, encoded.
    pub(super) fn serial(&self) -> &[u8] {
        &self.serial
    }

    /// The common name (else the organisation) of the issuer, as `modinfo` shows a module's signer.
    pub fn issuer_name(&self) -> Option<&str> {
        self.issuer_name.as_deref()
    }

    /// The serial number as `modinfo` shows it: `6A:0F:...`.
    pub fn key_id(&self) -> String {
        let serial = Der::new(&self.serial).next().map(|(_, content)| content).unwrap_or_default();
        key_id(serial.strip_prefix(&[0]).filter(|rest| !rest.is_empty()).unwrap_or(serial))
    }

    /// The common name (else the organisation) of whose key it is.
    pub fn subject(&self) -> Option<&str> {
        self.subject.as_deref()
    }

    /// The public key: `SubjectPublicKeyInfo`, DER.
    pub fn public_key(&self) -> &[u8] {
        &self.public_key
    }
}

/// `YYMMDDhhmmssZ` or `YYYYMMDDhhmmssZ`; others are against the standard (RFC 5280, section 4.1.2.5).
fn time(validity: &mut Der<'_>) -> Result<Timestamp, CertificateError> {
    let (tag, text) = validity.next()?;
    let text = std::str::from_utf8(text).map_err(|_| CertificateError)?;
    let text = text.strip_suffix('Z').filter(|digits| digits.bytes().all(|b| b.is_ascii_digit()));
    let text = text.ok_or(CertificateError)?;
    let text = match (tag, text.len()) {
        (UTC_TIME, 12) => format!("{}{text}", if text < "50" { "20" } else { "19" }),
        (GENERALIZED_TIME, 14) => text.to_owned(),
        _ => return Err(CertificateError),
    };
    let time = DateTime::strptime("%Y%m%d%H%M%S", text).map_err(|_| CertificateError)?;
    Ok(time.to_zoned(TimeZone::UTC).map_err(|_| CertificateError)?.timestamp())
}
