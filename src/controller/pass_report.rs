//! What a pass did: of builds, of rollout targets, of the whole.

use serde::Serialize;

use crate::{
    error_chain,
    kmod::Verdict,
    parts::TargetError,
    plan::{Plan, PlannedRollout, RolloutDecision},
};

/// What became of one image for one kernel: `subject` is `<image> for <kernel release>` where nothing else is said, `image` is the
/// image by digest.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase", tag = "outcome")]
#[expect(missing_docs, reason = "the variants say what their fields are")]
pub enum TargetReport {
    /// It was built and published.
    Built {
        /// `<image> for <kernel release>`.
        subject: String,
        /// The image by digest.
        image: String,
        /// What the check said.
        verdict: Verdict,
        /// What the check does not know, though the definition accepts that.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        warnings: Vec<String>,
        /// Bytes sent to the registry.
        pushed_bytes: u64,
    },
    /// Another kernel's payload was published for this one, without a build.
    Reused {
        /// `<image> for <kernel release>`.
        subject: String,
        /// The image by digest.
        image: String,
        /// What the check said.
        verdict: Verdict,
        /// The kernel that the payload was built for.
        kernel: String,
        /// The image that it was taken from, by digest.
        from: String,
        /// Bytes sent to the registry.
        pushed_bytes: u64,
    },
    /// It was published already; tags that were missing were added: their names.
    Tagged { subject: String, references: Vec<String> },
    /// It, a driver image, was published already and got the site's signature.
    Signed { subject: String, image: String },
    /// The payloads of several kernels were put together in one image: `<image> for <number> kernels`, by digest, and which kernels.
    United { subject: String, image: String, kernels: Vec<String> },
    /// It failed.
    Failed {
        /// `<image> for <kernel release>`.
        subject: String,
        /// What failed, with its causes.
        error: String,
        /// What to do.
        #[serde(skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
        /// The check's report, or the last lines of the build log.
        #[serde(skip_serializing_if = "Vec::is_empty")]
        detail: Vec<String>,
    },
}

impl TargetReport {
    /// Of a fault.
    pub(super) fn failed(subject: String, error: &TargetError) -> Self {
        Self::Failed { subject, error: error_chain(error), hint: error.hint(), detail: error.detail() }
    }
}

/// What became of one rewrite.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RolloutReport {
    /// The rollout target with what was decided.
    #[serde(flatten)]
    pub planned: PlannedRollout,
    /// Why the rewrite failed; absent where it was made or none was decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What a pass did.
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PassReport {
    /// What became of each build.
    pub targets: Vec<TargetReport>,
    /// What became of each rollout target.
    pub rollouts: Vec<RolloutReport>,
    /// How things stand after the pass.
    pub plan: Plan,
    /// Was an outside system out of reach?
    pub unreachable: bool,
}

impl PassReport {
    /// Did some target fail, in this pass or in an earlier one with the same inputs?
    pub fn failed(&self) -> bool {
        self.plan.has_failures()
            || self.targets.iter().any(|target| matches!(target, TargetReport::Failed { .. }))
            || self.rollouts.iter().any(|rollout| rollout.error.is_some())
    }

    /// Was an image field rewritten?
    pub fn rewrote(&self) -> bool {
        self.rollouts.iter().any(|rollout| {
            matches!(rollout.planned.decision, RolloutDecision::Rewrite { .. }) && rollout.error.is_none()
        })
    }
}
