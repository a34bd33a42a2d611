//! Report of one reconcile: build outcomes, rollout outcomes and the resulting plan.

use farrier_builder::services::BuildError;
use farrier_core::plan::{Change, Plan, PlannedRollout, RolloutDecision};
use kmod::Verdict;
use oci::error_chain;
use serde::Serialize;

/// Outcome of one image for one kernel. Unless a variant says otherwise, `subject` is `<image> for <kernel release>`
/// and `image` is the image by digest.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "outcome")]
pub enum TargetReport {
    /// The image was built and published.
    Built {
        /// `<image> for <kernel release>`.
        subject: String,
        /// The image by digest.
        image: String,
        /// Verdict of the check.
        verdict: Verdict,
        /// Findings that the check could not decide, and that the definition accepts.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        warnings: Vec<String>,
        /// Bytes sent to the registry.
        pushed_bytes: u64,
    },
    /// Another kernel's payload was published for this kernel, without a build.
    Reused {
        /// `<image> for <kernel release>`.
        subject: String,
        /// The image by digest.
        image: String,
        /// Verdict of the check.
        verdict: Verdict,
        /// The kernel that the payload was built for.
        kernel: String,
        /// The image that the payload was reused from, by digest.
        from: String,
        /// Bytes sent to the registry.
        pushed_bytes: u64,
    },
    /// Missing tags were added to an image that was already published. `references` are the tags.
    Tagged { subject: String, references: Vec<String> },
    /// The driver image was already published and received the site's signature.
    Signed { subject: String, image: String },
    /// The payloads of several kernels were published as one image. `subject` is `<image> for <number> kernels`,
    /// `image` the image by digest, and `kernels` the kernels.
    United { subject: String, image: String, kernels: Vec<String> },
    /// The build, tag or signature failed.
    Failed {
        /// `<image> for <kernel release>`.
        subject: String,
        /// Error with its causes.
        error: String,
        /// Hint for the user.
        #[serde(skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
        /// The check's report, or the last lines of the build log.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        detail: Vec<String>,
    },
}

impl TargetReport {
    /// Creates the report of a failed target.
    pub(super) fn failed(subject: String, error: &BuildError) -> Self {
        Self::Failed { subject, error: error_chain(error), hint: error.hint(), detail: error.detail() }
    }
}

/// Outcome of one rollout.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutReport {
    /// The rollout target and the decision.
    #[serde(flatten)]
    pub planned: PlannedRollout,
    /// Error that prevented the rewrite; absent if the rewrite succeeded or none was planned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

impl RolloutReport {
    /// Returns the rollout in its state after the writes.
    pub(super) fn rollout_after(&self) -> PlannedRollout {
        let mut rollout = self.planned.clone();
        if let (RolloutDecision::Rewrite { to, .. }, None) = (&self.planned.decision, &self.error) {
            rollout.decision = RolloutDecision::AlreadySet { image: to.clone() };
            rollout.changes.clear();
        }
        rollout
    }

    /// Returns the writes that were made in addition to the rewrite of the target itself.
    pub fn steps(&self) -> impl Iterator<Item = String> {
        let is_rewrite = matches!(self.planned.decision, RolloutDecision::Rewrite { .. });
        let changes = self.planned.changes.iter().filter(|_| self.error.is_none());
        let writes_target = |change: &Change| matches!(change, Change::DaemonSet(_) | Change::Resource(_));
        changes.filter(move |change| !(is_rewrite && writes_target(change))).map(Change::step)
    }
}

/// Outcome of one reconcile.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ReconcileReport {
    /// Outcome of each build.
    pub targets: Vec<TargetReport>,
    /// Outcome of each rollout.
    pub rollouts: Vec<RolloutReport>,
    /// Writes to the cluster that set no image field of a rollout's target, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<String>,
    /// The plan, with the state of rollouts and nodes after the reconcile.
    pub plan: Plan,
    /// Whether an external system was unreachable.
    pub unreachable: bool,
}

impl ReconcileReport {
    /// Whether a target failed, in this reconcile or in an earlier one with the same inputs.
    pub fn failed(&self) -> bool {
        self.plan.has_failures()
            || self.targets.iter().any(|target| matches!(target, TargetReport::Failed { .. }))
            || self.rollouts.iter().any(|rollout| rollout.error.is_some())
    }

    /// Whether an image field was rewritten.
    pub fn rewrote(&self) -> bool {
        self.rollouts.iter().any(|rollout| {
            matches!(rollout.planned.decision, RolloutDecision::Rewrite { .. }) && rollout.error.is_none()
        })
    }
}
