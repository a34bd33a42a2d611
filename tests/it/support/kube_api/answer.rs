//! Answers and error messages in the API server's format.

use bytes::Bytes;
use serde_json::{Value, json};

use super::kinds::Kind;

/// A complete answer.
#[derive(Clone, Debug)]
pub struct Answer {
    pub status: u16,
    pub retry_after: Option<u32>,
    pub content_type: &'static str,
    /// Pieces of the body: a list returns the stored bytes of its objects.
    pub body: Vec<Bytes>,
}

impl Answer {
    pub fn json(status: u16, body: &Value) -> Self {
        Self::bytes(status, Bytes::from(body.to_string()))
    }

    pub fn bytes(status: u16, body: Bytes) -> Self {
        Self { status, retry_after: None, content_type: "application/json", body: vec![body] }
    }

    /// Returns the server's answer for a path that it does not serve.
    pub fn no_such_path() -> Self {
        Self {
            status: 404,
            retry_after: None,
            content_type: "text/plain; charset=utf-8",
            body: vec![Bytes::from_static(b"404 page not found\n")],
        }
    }
}

/// A failure in the form of a `Status` object.
#[derive(Clone, Debug)]
pub struct Failure {
    pub code: u16,
    pub reason: &'static str,
    pub message: String,
    pub details: Value,
    pub retry_after: Option<u32>,
}

impl Failure {
    pub fn new(code: u16, reason: &'static str, message: impl Into<String>, details: Value) -> Self {
        Self { code, reason, message: message.into(), details, retry_after: None }
    }

    pub fn body(&self) -> Value {
        json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
            "message": self.message, "reason": self.reason, "details": self.details, "code": self.code,
        })
    }

    pub fn answer(&self) -> Answer {
        Answer { retry_after: self.retry_after, ..Answer::json(self.code, &self.body()) }
    }

    pub fn not_found(kind: &Kind, name: &str) -> Self {
        let message = format!("{} \"{name}\" not found", kind.resource());
        Self::new(404, "NotFound", message, details(kind, name))
    }

    pub fn no_such_resource() -> Self {
        Self::new(404, "NotFound", "the server could not find the requested resource", json!({}))
    }

    pub fn exists(kind: &Kind, name: &str) -> Self {
        let message = format!("{} \"{name}\" already exists", kind.resource());
        Self::new(409, "AlreadyExists", message, details(kind, name))
    }

    pub fn conflict(kind: &Kind, name: &str, why: &str) -> Self {
        let message = format!("Operation cannot be fulfilled on {} \"{name}\": {why}", kind.resource());
        Self::new(409, "Conflict", message, details(kind, name))
    }

    pub fn modified(kind: &Kind, name: &str) -> Self {
        let why =
            "the object has been modified; please apply your changes to the latest version and try again";
        Self::conflict(kind, name, why)
    }

    pub fn bad_request(message: impl Into<String>) -> Self {
        Self::new(400, "BadRequest", message, json!({}))
    }

    pub fn method_not_allowed() -> Self {
        let message = "the server does not allow this method on the requested resource";
        Self::new(405, "MethodNotAllowed", message, json!({}))
    }

    pub fn unsupported_media_type(given: &str) -> Self {
        let message = format!("the body of the request was in an unknown format: {given}");
        Self::new(415, "UnsupportedMediaType", message, json!({}))
    }

    /// Returns the failure for a watch from a compacted revision.
    pub fn too_old(asked: u64, oldest: u64) -> Self {
        Self::new(410, "Expired", format!("too old resource version: {asked} ({oldest})"), json!({}))
    }

    /// Returns the failure for an expired `continue` token.
    pub fn expired_token() -> Self {
        let message = "The provided continue parameter is too old to display a consistent list result. You can \
                       start a new list without the continue parameter.";
        Self::new(410, "Expired", message, json!({}))
    }

    pub fn internal(message: &str) -> Self {
        let message = format!("Internal error occurred: {message}");
        Self::new(500, "InternalError", message.clone(), json!({"causes": [{"message": message}]}))
    }

    pub fn too_many_requests(retry_after: u32) -> Self {
        let message = "the server has received too many requests and has asked us to try again later";
        let details = json!({"retryAfterSeconds": retry_after});
        Self { retry_after: Some(retry_after), ..Self::new(429, "TooManyRequests", message, details) }
    }

    /// Returns the failure for an object with these problems.
    pub fn invalid(kind: &Kind, name: &str, problems: &[Problem]) -> Self {
        let told: Vec<String> =
            problems.iter().map(|Problem(field, _, why)| format!("{field}: {why}")).collect();
        let told = if told.len() == 1 { told[0].clone() } else { format!("[{}]", told.join(", ")) };
        let causes: Vec<Value> = problems
            .iter()
            .map(|Problem(field, reason, why)| json!({"reason": reason, "message": why, "field": field}))
            .collect();
        let mut details = json!({"name": name, "kind": kind.kind, "causes": causes});
        if !kind.group.is_empty() {
            details["group"] = json!(kind.group);
        }
        Self::new(422, "Invalid", format!("{} \"{name}\" is invalid: {told}", kind.qualified()), details)
    }

    pub fn forbidden(user: &str, verb: &str, kind: &Kind, asked: &Asked<'_>) -> Self {
        let Asked { namespace, name, subresource } = asked;
        let object =
            if name.is_empty() { kind.resource() } else { format!("{} \"{name}\"", kind.resource()) };
        let resource = match subresource {
            Some(subresource) => format!("{}/{subresource}", kind.plural),
            None => kind.plural.clone(),
        };
        let place = if namespace.is_empty() {
            "at the cluster scope".to_owned()
        } else {
            format!("in the namespace \"{namespace}\"")
        };
        let message = format!(
            "{object} is forbidden: User \"{user}\" cannot {verb} resource \"{resource}\" in API group \"{}\" {place}",
            kind.group
        );
        Self::new(403, "Forbidden", message, details(kind, name))
    }
}

/// The object that a request addresses.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    pub namespace: &'a str,
    pub name: &'a str,
    pub subresource: Option<&'a str>,
}

/// Field, reason and message of a validation error.
#[derive(Clone, Debug)]
pub struct Problem(pub String, pub &'static str, pub String);

fn details(kind: &Kind, name: &str) -> Value {
    let mut details = json!({"kind": kind.plural});
    if !name.is_empty() {
        details["name"] = json!(name);
    }
    if !kind.group.is_empty() {
        details["group"] = json!(kind.group);
    }
    details
}
