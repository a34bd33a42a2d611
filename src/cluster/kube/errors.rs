//! Pure: what an answer of the API server means for a call.

use std::{error::Error, time::Duration};

use kube::core::Status;

use super::{
    super::ClusterError,
    words::{MissingRight, one_line},
};

/// What to do about an answer that is no success.
#[derive(Debug)]
pub(super) enum Verdict {
    /// Nothing: this is the result.
    Final(ClusterError),
    /// Try again, not before the given time.
    Retry { reason: String, wait: Duration },
}

/// Judges an answer. `action` is what was done, to what; `right` is what a `403` says is missing.
pub(super) fn judge(
    action: &str,
    right: &MissingRight,
    status: &Status,
    retry_after: Option<Duration>,
) -> Verdict {
    let action = action.to_owned();
    let reason = one_line(if status.message.is_empty() { &status.reason } else { &status.message });
    let detail = status.details.as_ref();
    let budget = || {
        let cause = detail.is_some_and(|d| d.causes.iter().any(|cause| cause.reason == "DisruptionBudget"));
        cause || reason.contains("PodDisruptionBudget") || reason.contains("disruption budget")
    };
    Verdict::Final(match status.code {
        401 => ClusterError::Unauthorized { action, reason },
        // Admission answers 403, too; only the authorizer says what the user "cannot" do.
        403 if reason.contains(" cannot ") || reason.is_empty() => {
            ClusterError::Forbidden { action, missing: Box::new(right.clone()) }
        }
        404 => ClusterError::Gone { action },
        409 => ClusterError::Changed { action, reason },
        // How an apply answers to the uid of an object that is no more, where there is a new one of the same name.
        422 if reason.contains("metadata.uid") => ClusterError::Changed { action, reason },
        429 | 500 if budget() => ClusterError::Disruption { action, reason },
        408 | 429 | 500.. => {
            let seconds = detail.map_or(0, |detail| detail.retry_after_seconds);
            let wait = retry_after.unwrap_or_default().max(Duration::from_secs(seconds.into()));
            return Verdict::Retry { reason: format!("{reason} ({})", status.code), wait };
        }
        _ => ClusterError::Rejected { action, reason },
    })
}

/// An error's causes in words; of an answer of the API server, its message alone.
pub(super) fn causes(error: &(dyn Error + 'static)) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(status) = error.downcast_ref::<Status>() {
            return status.message.clone();
        }
        next = error.source();
        // kube's own variants repeat their causes.
        let wraps = error.is::<kube::Error>() || error.is::<kube::runtime::watcher::Error>();
        let words = error.to_string();
        if (wraps && next.is_some()) || text.ends_with(&words) {
            continue;
        }
        if !text.is_empty() {
            text.push_str(": ");
        }
        text.push_str(&words);
    }
    text
}

#[cfg(test)]
mod tests {
    use kube::core::response::{StatusCause, StatusDetails};

    use super::{super::words::Scope, *};

    fn judged(status: &Status, retry_after: Option<Duration>) -> Verdict {
        let right = MissingRight {
            user: Some("me".to_owned()),
            verb: "patch",
            group: "apps".to_owned(),
            resource: "daemonsets".to_owned(),
            scope: Scope::Namespace("gpu".to_owned()),
            verbs: &["patch"],
        };
        judge("write DaemonSet gpu/driver", &right, status, retry_after)
    }

    fn status(code: u16, message: &str) -> Status {
        Status::failure(message, "").with_code(code)
    }

    fn words(code: u16, message: &str) -> String {
        match judged(&status(code, message), None) {
            Verdict::Final(error) => match error.hint() {
                Some(hint) => format!("{error} | {hint}"),
                None => error.to_string(),
            },
            Verdict::Retry { reason, wait } => format!("retry after {wait:?}: {reason}"),
        }
    }

    #[test]
    fn answers_become_words() {
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
    fn a_busy_server_says_when_to_come_back() {
        let busy = status(429, "too many requests, please try again later");
        let Verdict::Retry { wait, .. } = judged(&busy, Some(Duration::from_secs(3))) else {
            panic!("final")
        };
        assert_eq!(wait, Duration::from_secs(3));
        let details = StatusDetails {
            name: String::new(),
            group: String::new(),
            kind: String::new(),
            uid: String::new(),
            causes: Vec::new(),
            retry_after_seconds: 7,
        };
        let busy = busy.with_details(details.clone());
        let Verdict::Retry { wait, .. } = judged(&busy, None) else { panic!("final") };
        assert_eq!(wait, Duration::from_secs(7));
        let cause = StatusCause {
            reason: "DisruptionBudget".to_owned(),
            message: String::new(),
            field: String::new(),
        };
        let held = status(429, "no").with_details(StatusDetails { causes: vec![cause], ..details });
        assert!(matches!(judged(&held, None), Verdict::Final(ClusterError::Disruption { .. })));
    }
}
