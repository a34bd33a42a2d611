//! Classifies errors of Kubernetes API calls, and formats them.

use std::{error::Error, time::Duration};

use kube::core::Status;

use super::super::error::{ApiError, MissingPermission};

/// Class of a failed API call: how the caller has to react.
#[derive(Debug)]
pub(super) enum ErrorClass {
    /// Return this error.
    Final(ApiError),
    /// Retry the call after at least `wait`.
    Retry { reason: String, wait: Duration },
}

/// Classifies a failed API call. `permission` is the permission that the call needs, which a `403` reports as missing.
pub(super) fn classify(permission: &MissingPermission, error: &kube::Error) -> ErrorClass {
    let reason = one_line(&causes(error));
    match error {
        kube::Error::Api(status) => classify_status(permission, status),
        kube::Error::Auth(_) => ErrorClass::Final(ApiError::Unauthorized(reason)),
        kube::Error::BuildRequest(_) | kube::Error::SerdeError(_) => {
            ErrorClass::Final(ApiError::Rejected(reason))
        }
        _ => ErrorClass::Retry { reason, wait: Duration::ZERO },
    }
}

fn classify_status(permission: &MissingPermission, status: &Status) -> ErrorClass {
    let reason = one_line(if status.message.is_empty() { &status.reason } else { &status.message });
    let details = status.details.as_ref();
    let violates_budget = || {
        let has_cause =
            details.is_some_and(|d| d.causes.iter().any(|cause| cause.reason == "DisruptionBudget"));
        has_cause || reason.contains("PodDisruptionBudget") || reason.contains("disruption budget")
    };
    ErrorClass::Final(match status.code {
        401 => ApiError::Unauthorized(reason),
        // Admission controllers also respond with 403. Only the authorizer's message names the user.
        403 if reason.contains("forbidden: User \"") || reason.is_empty() => {
            ApiError::Forbidden(Box::new(permission.clone()))
        }
        404 => ApiError::Gone,
        409 => ApiError::Changed(reason),
        // The object was deleted, and its successor with the same name has another uid.
        422 if reason.contains("metadata.uid") => ApiError::Changed(reason),
        429 | 500 if violates_budget() => ApiError::Disruption(reason),
        // The JSON of a proxy in front of the API server may have no code.
        0 | 408 | 429 | 500.. => {
            let seconds = details.map_or(0, |details| details.retry_after_seconds);
            let wait = Duration::from_secs(seconds.into());
            return ErrorClass::Retry { reason: format!("{reason} ({})", status.code), wait };
        }
        _ => ApiError::Rejected(reason),
    })
}

/// Joins the messages of an error and its causes with `: `. If one of them is a response of the API server, returns only the
/// response's message.
pub fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(status) = error.downcast_ref::<Status>() {
            return status.message.clone();
        }
        next = error.source();
        // The messages of kube's error types repeat their causes.
        let repeats_cause = error.is::<kube::Error>() || error.is::<kube::runtime::watcher::Error>();
        let message = error.to_string();
        if (repeats_cause && next.is_some()) || text.ends_with(&message) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&message);
    }
    text
}

/// Maximum number of characters of a stored message from a pod or the API server.
const MAX_CHARS: usize = 500;

/// Converts an untrusted text to one line without control characters, of at most [`MAX_CHARS`] characters.
pub(super) fn one_line(text: &str) -> String {
    let words = text.split(|c: char| c.is_whitespace() || c.is_control()).filter(|word| !word.is_empty());
    let line = words.collect::<Vec<_>>().join(" ");
    if line.chars().count() > MAX_CHARS {
        line.chars().take(MAX_CHARS - 3).chain("...".chars()).collect()
    } else {
        line
    }
}

#[cfg(test)]
mod tests {
    use kube::core::response::{StatusCause, StatusDetails};

    use super::{
        super::super::error::{ClusterError, PermissionScope},
        *,
    };

    fn classified(status: &Status) -> ErrorClass {
        let permission = MissingPermission {
            user: Some("me".to_owned()),
            verb: "patch",
            group: "apps".to_owned(),
            resource: "daemonsets".to_owned(),
            scope: PermissionScope::Namespace("gpu".to_owned()),
            verbs: &["patch"],
        };
        classify(&permission, &kube::Error::Api(Box::new(status.clone())))
    }

    fn status(code: u16, message: &str) -> Status {
        Status::failure(message, "").with_code(code)
    }

    fn words(code: u16, message: &str) -> String {
        match classified(&status(code, message)) {
            ErrorClass::Final(error) => {
                let error = ClusterError::Api { action: "write DaemonSet gpu/driver".to_owned(), error };
                match error.hint() {
                    Some(hint) => format!("{error} | {hint}"),
                    None => error.to_string(),
                }
            }
            ErrorClass::Retry { reason, wait } => format!("retry after {wait:?}: {reason}"),
        }
    }

    #[test]
    fn responses_become_errors_with_hints() {
        insta::assert_snapshot!(
            [
                words(401, "Unauthorized"),
                words(403, "daemonsets.apps \"driver\" is forbidden: User \"me\" cannot patch resource"),
                words(403, "admission webhook \"policy\" denied the request"),
                words(404, "not found"),
                words(409, "the object has been modified"),
                words(422, "spec.template.spec.containers[0].image: Required value"),
                words(413, "too large"),
                words(500, "etcdserver: request timed out"),
                words(429, "Cannot evict pod as it would violate the pod's disruption budget."),
                words(500, "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."),
            ]
            .join("\n")
        );
    }

    #[test]
    fn the_words_of_a_webhook_are_no_missing_permission() {
        let denied = "admission webhook \"validation.gatekeeper.sh\" denied the request: container \"driver\" cannot be privileged";
        assert_eq!(
            words(403, denied),
            format!("cannot write DaemonSet gpu/driver: the API server rejected the request: {denied}")
        );
    }

    #[test]
    fn retry_after_is_respected() {
        let busy = status(429, "too many requests, please try again later");
        let ErrorClass::Retry { wait, .. } = classified(&busy) else { panic!("final") };
        assert_eq!(wait, Duration::ZERO);
        let details = StatusDetails {
            name: String::new(),
            group: String::new(),
            kind: String::new(),
            uid: String::new(),
            causes: Vec::new(),
            retry_after_seconds: 7,
        };
        let busy = busy.with_details(details.clone());
        let ErrorClass::Retry { wait, .. } = classified(&busy) else { panic!("final") };
        assert_eq!(wait, Duration::from_secs(7));
        let cause = StatusCause {
            reason: "DisruptionBudget".to_owned(),
            message: String::new(),
            field: String::new(),
        };
        let held = status(429, "no").with_details(StatusDetails { causes: vec![cause], ..details });
        assert!(matches!(classified(&held), ErrorClass::Final(ApiError::Disruption(_))));
    }

    #[test]
    fn untrusted_text_becomes_one_line() {
        assert_eq!(one_line(" a\n\tb\u{7}c \u{1b}[1m"), "a b c [1m");
        assert_eq!(one_line(&"é".repeat(900)).chars().count(), MAX_CHARS);
    }
}
