//! In-toto statements: a claim about an image, identified by its digest (in-toto attestation framework, `statement.md`, v1).

use serde::Deserialize;
use serde_json::{Value, json};

use crate::image::Digest;

/// The `_type` of a statement.
const TYPE: &str = "https://in-toto.io/Statement/v1";
/// The `_type` of an older version with the same fields, which other tools still write.
const OLD_TYPE: &str = "https://in-toto.io/Statement/v0.1";

/// The predicate type of a check report as a signed statement. The report's document is the predicate.
pub const CHECK_REPORT_PREDICATE: &str = "https://farrier.dev/check-report/v1";

/// Reason why bytes are not a statement.
#[derive(Debug, thiserror::Error)]
pub enum StatementError {
    /// The bytes are not a statement in JSON.
    #[error("it is not an in-toto statement")]
    Json(#[source] serde_json::Error),
    /// The `_type` is another version or another document.
    #[error("its type is {0:?}, not that of an in-toto statement that farrier knows")]
    Type(String),
}

/// A parsed statement.
#[derive(Clone, Debug, PartialEq)]
pub struct Statement {
    /// Type of the claim.
    pub predicate_type: String,
    /// SHA-256 digests of the statement's subjects.
    pub subjects: Vec<String>,
    /// The claim.
    pub predicate: Value,
}

/// Writes a statement about one image.
pub fn statement(name: &str, digest: &Digest, predicate_type: &str, predicate: &Value) -> Vec<u8> {
    let document = json!({
        "_type": TYPE,
        "subject": [{"name": name, "digest": {"sha256": digest.hex()}}],
        "predicateType": predicate_type,
        "predicate": predicate,
    });
    document.to_string().into_bytes()
}

/// Whether the statement is about this image.
pub fn is_about(statement: &Statement, digest: &Digest) -> bool {
    statement.subjects.iter().any(|subject| subject == digest.hex())
}

impl Statement {
    /// Reads untrusted bytes.
    pub fn parse(bytes: &[u8]) -> Result<Self, StatementError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Form {
            #[serde(rename = "_type")]
            kind: String,
            subject: Vec<Subject>,
            predicate_type: String,
            #[serde(default)]
            predicate: Value,
        }
        #[derive(Deserialize)]
        struct Subject {
            digest: std::collections::BTreeMap<String, String>,
        }
        let form: Form = serde_json::from_slice(bytes).map_err(StatementError::Json)?;
        if form.kind != TYPE && form.kind != OLD_TYPE {
            return Err(StatementError::Type(form.kind.chars().take(80).collect()));
        }
        let subjects = form.subject.into_iter().filter_map(|mut subject| subject.digest.remove("sha256"));
        let subjects = subjects.collect();
        Ok(Self { predicate_type: form.predicate_type, subjects, predicate: form.predicate })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let digest = Digest::of(b"image");
        let bytes = statement("hello", &digest, CHECK_REPORT_PREDICATE, &json!({"verdict": "loads"}));
        let read = Statement::parse(&bytes).unwrap();
        assert!(is_about(&read, &digest) && !is_about(&read, &Digest::of(b"other")));
        assert_eq!(read.predicate_type, CHECK_REPORT_PREDICATE);
        assert_eq!(read.predicate["verdict"], "loads");
        assert!(matches!(Statement::parse(b"{}"), Err(StatementError::Json(_))));
        let other = String::from_utf8(bytes).unwrap().replace("Statement/v1", "Statement/v9");
        assert!(matches!(Statement::parse(other.as_bytes()), Err(StatementError::Type(_))));
    }
}
