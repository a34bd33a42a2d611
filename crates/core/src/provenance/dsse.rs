//! Signed envelopes (DSSE, `secure-systems-lab/dsse`, `protocol.md` and `envelope.md`).

use base64::{Engine as _, engine::general_purpose::STANDARD};
use serde::{Deserialize, Serialize};

use super::PublicKey;
use crate::facts::media_type::IN_TOTO;

/// The media type of an envelope.
pub const DSSE: &str = "application/vnd.dsse.envelope.v1+json";

/// Reason why an envelope cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum EnvelopeError {
    /// The bytes are not a DSSE envelope in JSON.
    #[error("it is not a DSSE envelope")]
    Json(#[source] serde_json::Error),
    /// The payload is not base64.
    #[error("its payload is not base64")]
    Payload,
    /// The payload is not an in-toto statement.
    #[error("it contains {0:?}, not an in-toto statement")]
    Type(String),
}

/// A parsed envelope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Envelope {
    /// The signed payload.
    pub payload: Vec<u8>,
    signatures: Vec<Vec<u8>>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EnvelopeJson {
    payload_type: String,
    payload: String,
    signatures: Vec<SignatureJson>,
}

#[derive(Serialize, Deserialize)]
struct SignatureJson {
    #[serde(default)]
    keyid: String,
    sig: String,
}

/// Returns the bytes that are signed for a payload. They include its type and length.
pub fn pre_authentication(payload: &[u8]) -> Vec<u8> {
    let head = format!("DSSEv1 {} {IN_TOTO} {} ", IN_TOTO.len(), payload.len());
    [head.as_bytes(), payload].concat()
}

impl Envelope {
    /// Writes an envelope around a statement, with a signature over its [`pre_authentication`].
    pub fn write(payload: &[u8], signature: &[u8]) -> Result<Vec<u8>, EnvelopeError> {
        serde_json::to_vec(&EnvelopeJson {
            payload_type: IN_TOTO.to_owned(),
            payload: STANDARD.encode(payload),
            signatures: vec![SignatureJson { keyid: String::new(), sig: STANDARD.encode(signature) }],
        })
        .map_err(EnvelopeError::Json)
    }

    /// Reads untrusted bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, EnvelopeError> {
        Self::from_json(&serde_json::from_slice(bytes).map_err(EnvelopeError::Json)?)
    }

    pub(super) fn from_json(json: &EnvelopeJson) -> Result<Self, EnvelopeError> {
        if json.payload_type != IN_TOTO {
            return Err(EnvelopeError::Type(json.payload_type.chars().take(80).collect()));
        }
        let payload = STANDARD.decode(&json.payload).map_err(|_| EnvelopeError::Payload)?;
        let signatures = json.signatures.iter().filter_map(|json| STANDARD.decode(&json.sig).ok()).collect();
        Ok(Self { payload, signatures })
    }

    /// Whether the envelope has a signature by this key.
    pub fn is_signed_by(&self, key: &PublicKey) -> bool {
        let signed = pre_authentication(&self.payload);
        self.signatures.iter().any(|signature| key.verify_sha256(&signed, signature))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_form_is_that_of_the_specification() {
        // The example in protocol.md has another payload type, but follows the same rule.
        assert_eq!(pre_authentication(b"hello"), b"DSSEv1 28 application/vnd.in-toto+json 5 hello");
        let bytes = Envelope::write(b"{}", b"sig").unwrap();
        assert_eq!(
            String::from_utf8(bytes.clone()).unwrap(),
            r#"{"payloadType":"application/vnd.in-toto+json","payload":"e30=","signatures":[{"keyid":"","sig":"c2ln"}]}"#
        );
        let read = Envelope::parse(&bytes).unwrap();
        assert_eq!((read.payload.as_slice(), read.signatures.len()), (&b"{}"[..], 1));
        let other = String::from_utf8(bytes).unwrap().replace("in-toto", "else");
        assert!(matches!(Envelope::parse(other.as_bytes()), Err(EnvelopeError::Type(_))));
        assert!(matches!(Envelope::parse(b"[]"), Err(EnvelopeError::Json(_))));
    }
}
