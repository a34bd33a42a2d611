//! Injected faults, denied permissions, and the log of requests.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use serde_json::{Value, json};

use super::{
    answer::{Answer, Asked, Failure},
    kinds::Kind,
};

/// Outcome of a request with a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiFailure {
    /// Status 500.
    Internal,
    /// Status 503.
    Unavailable,
    /// Status 429 with Retry-After, in seconds.
    TooManyRequests(u32),
    /// Status 403 with the server's message.
    Forbidden,
    /// Status 401, as for an expired token.
    Unauthorized,
    /// Status 409 with the server's message.
    Conflict,
    /// Status 410.
    Gone,
    /// The connection ends without an answer, and the request has no effect.
    Drop,
    /// The request takes effect, but the connection ends without an answer.
    LoseAnswer,
    /// No answer until the fault is revoked; then the request takes effect.
    Hang,
}

/// A filter for requests; `None` and an empty list match all.
#[derive(Clone, Debug, Default)]
pub struct Requests {
    verbs: Vec<&'static str>,
    resource: Option<String>,
    subresource: Option<String>,
    path: Option<String>,
    query: Option<String>,
}

impl Requests {
    /// Matches all requests.
    pub fn any() -> Self {
        Self::default()
    }

    /// Matches a verb: `get`, `list`, `watch`, `create`, `update`, `patch`, `delete`.
    pub fn verb(verb: &'static str) -> Self {
        Self { verbs: vec![verb], ..Self::default() }
    }

    /// Matches every request that changes an object.
    pub fn writes() -> Self {
        Self { verbs: WRITES.to_vec(), ..Self::default() }
    }

    /// Restricts the filter to a resource, such as `daemonsets.apps` or `nodes`.
    pub fn resource(self, resource: &str) -> Self {
        Self { resource: Some(resource.to_owned()), ..self }
    }

    /// Restricts the filter to a subresource, such as `status` or `eviction`.
    pub fn subresource(self, subresource: &str) -> Self {
        Self { subresource: Some(subresource.to_owned()), ..self }
    }

    /// Restricts the filter to paths that contain `part`.
    pub fn path(self, part: &str) -> Self {
        Self { path: Some(part.to_owned()), ..self }
    }

    /// Restricts the filter to queries that contain `part`.
    pub fn query(self, part: &str) -> Self {
        Self { query: Some(part.to_owned()), ..self }
    }

    pub fn matches(&self, record: &Record) -> bool {
        (self.verbs.is_empty() || self.verbs.contains(&record.verb))
            && self.resource.as_ref().is_none_or(|resource| *resource == record.resource)
            && self.subresource.as_ref().is_none_or(|name| record.subresource.as_ref() == Some(name))
            && self.path.as_ref().is_none_or(|part| record.path.contains(part))
            && self.query.as_ref().is_none_or(|part| record.query.contains(part))
    }
}

/// Verbs that change objects.
pub const WRITES: [&str; 5] = ["create", "update", "patch", "delete", "deletecollection"];

/// A parsed request.
#[derive(Clone, Debug)]
pub struct Record {
    pub method: String,
    pub path: String,
    pub query: String,
    pub body: Value,
    pub content_type: String,
    pub user_agent: String,
    pub authorization: String,
    /// `get`, `list`, `watch`, ...; `get` for discovery.
    pub verb: &'static str,
    /// Such as `daemonsets.apps`; empty for discovery.
    pub resource: String,
    pub subresource: Option<String>,
    pub namespace: String,
    pub name: String,
    /// Status code, or 0 without an answer.
    pub status: u16,
}

impl Record {
    pub fn is_write(&self) -> bool {
        WRITES.contains(&self.verb)
    }

    /// Formats the request for test messages.
    pub fn told(&self) -> String {
        format!("{} {}?{} -> {}", self.verb, self.path, self.query, self.status)
    }
}

/// Pending faults, denied permissions, and the log.
#[derive(Default)]
pub struct Faults {
    planned: Vec<Planned>,
    next: u64,
    /// Users by their tokens; `rights` holds the permissions of each user.
    tokens: BTreeMap<String, String>,
    rights: BTreeSet<(String, String)>,
    denied: BTreeSet<(String, String)>,
    /// Resources whose watches send nothing.
    pub held: BTreeSet<String>,
    /// The user that the server reports for all clients.
    pub user: Option<String>,
    pub log: Vec<Record>,
}

struct Planned {
    id: u64,
    requests: Requests,
    fault: ApiFailure,
    left: Option<usize>,
}

impl Faults {
    /// Plans a fault for the next `times` requests, or until it is revoked with the returned number.
    pub fn plan(&mut self, requests: Requests, fault: ApiFailure, times: Option<usize>) -> u64 {
        let id = self.number();
        self.planned.push(Planned { id, requests, fault, left: times });
        id
    }

    /// Returns a number that identifies an injected fault.
    pub fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    pub fn take_back(&mut self, id: u64) {
        self.planned.retain(|planned| planned.id != id);
    }

    pub fn clear(&mut self) {
        self.planned.clear();
    }

    pub fn is_planned(&self, id: u64) -> bool {
        self.planned.iter().any(|planned| planned.id == id)
    }

    /// Returns the fault of this request and uses it up once.
    pub fn next_for(&mut self, record: &Record) -> Option<(u64, ApiFailure)> {
        let spent = |planned: &Planned| planned.left == Some(0);
        let fits = |planned: &&mut Planned| !spent(planned) && planned.requests.matches(record);
        let planned = self.planned.iter_mut().find(fits)?;
        let found = (planned.id, planned.fault);
        planned.left = planned.left.map(|left| left - 1);
        // A hanging request checks whether its fault still exists.
        self.planned.retain(|planned| !spent(planned) || planned.fault == ApiFailure::Hang);
        Some(found)
    }

    /// Denies a verb (`*` for all) on a resource, with its subresource if any: `pods/eviction`, `daemonsets.apps`.
    pub fn deny(&mut self, verb: &str, resource: &str) {
        self.denied.insert((verb.to_owned(), resource.to_owned()));
    }

    pub fn allow(&mut self, verb: &str, resource: &str) {
        self.denied.remove(&(verb.to_owned(), resource.to_owned()));
    }

    pub fn is_denied(&self, record: &Record) -> bool {
        let resource = match &record.subresource {
            Some(subresource) => format!("{}/{subresource}", record.resource),
            None => record.resource.clone(),
        };
        self.denies(record.verb, &resource)
    }

    pub fn denies(&self, verb: &str, resource: &str) -> bool {
        [verb, "*"].iter().any(|verb| self.denied.contains(&((*verb).to_owned(), resource.to_owned())))
    }

    pub fn add_person(&mut self, token: &str, user: &str, may: &[&str]) {
        let rights = may.iter().map(|right| (user.to_owned(), (*right).to_owned()));
        self.rights.extend(rights);
        self.tokens.insert(token.to_owned(), user.to_owned());
    }

    /// Answers token reviews (`tokenreviews`) and access reviews (`subjectaccessreviews`).
    pub fn review(&self, resource: &str, spec: &Value) -> Value {
        if resource == "tokenreviews" {
            return match self.tokens.get(spec["token"].as_str().unwrap_or_default()) {
                Some(user) => {
                    let extra = json!({"authentication.kubernetes.io/credential-id": ["JTI=1"]});
                    let groups = ["system:serviceaccounts", "system:authenticated"];
                    let user = json!({"username": user, "uid": "1", "groups": groups, "extra": extra});
                    json!({"authenticated": true, "user": user, "audiences": ["https://kubernetes.default.svc"]})
                }
                None => json!({"user": {}, "error": "[invalid bearer token, Token has been invalidated]"}),
            };
        }
        let attributes = &spec["resourceAttributes"];
        let word = |key: &str| attributes[key].as_str().unwrap_or_default();
        let name = [word("namespace"), word("name")].join("/");
        let right =
            format!("{} {}.{} {}", word("verb"), word("resource"), word("group"), name.trim_matches('/'));
        // A real server requires the user's groups and extra fields from the token review.
        assert!(spec["groups"][1] == "system:authenticated" && spec["extra"].is_object(), "{spec}");
        let user = spec["user"].as_str().unwrap_or_default().to_owned();
        json!({"allowed": self.rights.contains(&(user, right))})
    }

    pub fn user(&self) -> &str {
        self.user.as_deref().unwrap_or("system:serviceaccount:farrier:farrier")
    }
}

impl ApiFailure {
    /// Returns the fault's answer, if it has one.
    pub fn answer(self, user: &str, kind: Option<&Arc<Kind>>, record: &Record) -> Option<Answer> {
        let asked = Asked {
            namespace: &record.namespace,
            name: &record.name,
            subresource: record.subresource.as_deref(),
        };
        let failure = match self {
            Self::Internal => Failure::internal("the fault that the test ordered"),
            Self::Unavailable => {
                let message = "the server is currently unable to handle the request";
                Failure::new(503, "ServiceUnavailable", message, serde_json::json!({}))
            }
            Self::TooManyRequests(seconds) => Failure::too_many_requests(seconds),
            Self::Forbidden => Failure::forbidden(user, record.verb, kind?, &asked),
            Self::Unauthorized => Failure::new(401, "Unauthorized", "Unauthorized", serde_json::json!({})),
            Self::Conflict => Failure::modified(kind?, &record.name),
            Self::Gone => Failure::too_old(0, 1),
            Self::Drop | Self::LoseAnswer | Self::Hang => return None,
        };
        Some(failure.answer())
    }
}
