//! Computes a plan from a snapshot, the definitions and the clock.
//!
//! [`Matrix::of`] makes the cells once, from resolved inputs. Four rounds of lookups follow. Each round lists its lookups,
//! as a pure function of the answers so far. The caller adds the answers to [`Observed`].
//!
//! 1. [`Matrix::images_to_look_up`]: the names of all cells. [`Matrix::compare`] takes the answers.
//! 2. [`ComparedMatrix::failures_to_look_up`] and [`ComparedMatrix::headers_to_look_up`]: facts that may prevent a build.
//!    [`ComparedMatrix::signatures_to_look_up`]: published images. [`ComparedMatrix::decide`] takes the answers.
//! 3. [`DecidedMatrix::unions_to_look_up`]: union images, whose names follow from the outcomes of the cells.
//! 4. [`DecidedMatrix::union_signatures_to_look_up`]: published union images. [`DecidedMatrix::plan`] then makes the plan.
//!
//! A lookup without an answer counts as failed: the outcome is unknown and gives the reason. The same arguments always give
//! the same result.

mod activity;
mod announced;
mod budget;
mod build_times;
mod cell;
mod cell_hash;
mod chain_state;
mod changed_inputs;
mod ci_matrix;
mod deadline;
mod decide;
#[cfg(any(test, feature = "testing"))]
#[allow(dead_code, clippy::unwrap_used, clippy::expect_used)]
mod fixtures;
mod gc;
mod guarantee;
mod host_drivers;
mod inputs;
mod instance;
mod labels;
mod matrix;
mod needs;
mod new_cell;
mod node;
mod node_kernel_limiter;
mod node_write_limiter;
mod operator_resources;
mod outcome;
mod planner;
mod reach;
mod readiness;
mod reasons;
mod repeated_writes;
pub mod retry;
pub mod reuse;
mod rewrite_rate_limiter;
mod rollout;
mod rounds;
mod selector;
mod signatures;
mod skip_reason;
mod snapshot;
mod snapshot_scope;
mod status;
mod table;
mod target;
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, clippy::expect_used)]
pub mod testing;
mod unfinished;
mod union;
mod unused_image;
#[expect(clippy::similar_names, reason = "`node` and `note` are the natural names")]
mod upgrade;
mod why;
mod write_namespaces;

pub use activity::{Activity, BuildActivity, Stage};
pub use announced::{
    AnnouncedBy, AnnouncementReason, Announcements, Platform, TrackedKernel, UnusedAnnouncement,
    newest_tracked, platforms_with_images, rpm_flavor,
};
pub use budget::Budget;
pub use build_times::{BuildTime, BuildTimes};
pub use cell::{
    BUILD_FORMAT, Cell, CellNeed, CellPatch, ENTRYPOINT_FORMAT, FetchedInputs, SIGNING_FORMAT, SignedWith,
};
pub use changed_inputs::{BuildProducts, NamedInputs, changed_inputs};
pub use ci_matrix::{MatrixForm, ci_matrix};
pub use deadline::next_deadline;
pub use gc::{
    Candidates, GcInputs, GcPlan, KeepReason, KeptImage, KernelKey, KernelRecord, LiveKernels, PrunedImage,
    RegistryImage, gc_plan, kernels_in_use,
};
pub use host_drivers::HostDrivers;
pub use inputs::{
    CellInputs, Failure, HeaderState, ImageContents, ImageLocation, Observed, PlanInputs, Published,
    Resolved, ResolvedImage, RootFsKey, SignatureState, ToolchainKey, TreeKey, Unverified, toolchain_key,
};
pub use instance::Instance;
pub use labels::{
    ARCH_LABEL, COPY_KERNEL_LABEL, COPY_OF_LABEL, JOB_NAME, KERNEL_LABEL, NEXT_KERNEL_ANNOTATION,
    NEXT_KERNEL_LABEL, NO_DRIVER_FOR, OS_ID_LABEL, OS_VERSION_LABEL, PAUSED_ANNOTATION,
    PER_KERNEL_ANNOTATION, READY_FOR, RECORD_ANNOTATION, UPGRADE, UPGRADE_CHECKED, UPGRADE_STATE_LABELS,
    has_pause_annotation, is_hardware_label,
};
pub use matrix::{Matrix, OwnDriver, SkippedNode};
pub use needs::cell_for;
pub use new_cell::dockerfile_for;
pub use node::{ExceededLimit, NodeReason, RejectedClaims, node_systems, node_target};
pub use node_kernel_limiter::NodeKernelLimiter;
pub use node_write_limiter::NodeWriteLimiter;
pub use outcome::{Outcome, Phase, PlannedCell, conflict, conflict_remedy};
pub use planner::Plan;
pub use reach::{Exclusion, NodeReach, Placement, ReachingObject, Taint, Toleration};
pub use readiness::{Blocker, BootReadiness, NextKernel, PlannedNode, Readiness, RequiredImage};
pub use reasons::{BuildReason, HoldReason, NotReadyNode};
pub use repeated_writes::RepeatedWrites;
pub use rewrite_rate_limiter::RewriteRateLimiter;
pub use rollout::{
    Change, DaemonSetChange, DaemonSetCopy, DaemonSetRetirement, Earlier, FieldRecord, GitCommit,
    ImageChange, NodeChange, NodeCheck, NodePrecondition, PastUpgrade, PlannedRollout, PodRestart,
    RecordState, ResourceChange, RewriteRecord, RollbackOutcome, RollbackStep, RolloutDecision,
    RolloutWarning, Untaint, git_commit, handover_label, is_same_image, past_table, past_upgrades, pause,
    paused, per_kernel_originals, rollback, rollback_per_kernel, set_by_others, uncordoned,
};
pub use rounds::{ComparedMatrix, DecidedMatrix};
pub use selector::{NodeAffinity, Operator, Requirement, SelectorTerm};
pub use signatures::{PlannedSignature, needs_signatures};
pub use skip_reason::{NeedReason, SkipReason};
pub use snapshot::{
    ClusterSnapshot, Container, CowArc, DaemonSetFacts, Holder, LiveDaemonSet, ManifestFacts, Manifests,
    NodeFacts, ObjectVersion, ObservedKind, OwnedFields, Owner, PodCount, PodFacts, PullFailure,
    ResourceFacts, UpdateStrategy, WorkloadFacts,
};
pub use snapshot_scope::SnapshotScope;
pub use status::{StatusEntry, StatusItem, StatusRow, status, status_at, status_entries};
#[cfg(test)]
pub(crate) use table::layout::{table, text};
pub use table::{
    Table, counts, held_rollouts, host_drivers, missing_images, readiness_table, rollout_action,
    skipped_nodes, status_table, summary, tables, with_short_digests,
};
pub use target::{ManifestLocation, RolloutObject, RolloutTarget};
pub use unfinished::{RolloutWait, UnfinishedRollout, unfinished_kernels, unfinished_rollouts};
pub use union::{PlannedUnion, UnionMember, images_in_use};
pub use unused_image::{NoNodeReason, UnusedImage};
pub use upgrade::{
    DriverPod, JobKind, JobState, PlannedNodeUpgrade, PlannedUpgrade, Upgrade, UpgradeForecast, UpgradeNode,
    UpgradeNote, UpgradeStage, UpgradeState, UpgradeWait, clear_failures, release_uncovered, upgrade_table,
};
pub use why::{Explain, Explanation, ExplanationStep};
pub use write_namespaces::WriteNamespaces;
