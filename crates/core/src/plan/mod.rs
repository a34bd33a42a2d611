//! Pure: from a snapshot, the definitions and the clock to a plan.
//!
//! Two phases, because what is looked up in the registry depends on the inputs: [`matrix`] says which
//! image each kernel target calls for, under which names and with which input hash; [`plan`] then
//! compares that with what the registry and the cluster hold, and decides. Both can be called again
//! after every build, with the same answer for the same arguments.

mod activity;
mod announced;
mod budget;
mod cell;
mod cell_hash;
mod ci_matrix;
mod deadline;
mod decide;
#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, dead_code, clippy::unwrap_used, clippy::expect_used)]
mod fixtures;
mod gc;
mod interest;
mod matrix;
mod needs;
mod node;
mod pace;
mod readiness;
mod reasons;
pub mod retry;
pub mod reuse;
mod rollout;
mod selector;
mod signatures;
mod skip_reason;
mod snapshot;
mod status;
mod table;
#[cfg(any(test, feature = "testing"))]
#[allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]
pub mod testing;
mod together;
mod union;

pub use activity::{Activity, BuildActivity};
pub use announced::{
    AnnouncedBy, AnnouncementReason, Announcements, NEXT_KERNEL_ANNOTATION, Platform, TrackedKernel, Unheard,
    called_for, newest,
};
pub use budget::Budget;
pub use cell::{
    BUILD_FORMAT, Cell, CellInputs, CellNeed, CellPatch, ENTRYPOINT_FORMAT, EntrypointBinary, ImageLocation,
    ResolvedImage, SIGNING_FORMAT, SignedWith, TreeKey, cell_for, dockerfile_for,
};
pub use ci_matrix::{MatrixForm, ci_matrix};
pub use deadline::next_deadline;
pub use decide::{
    Conflict, Failure, HeldBack, ImageContents, Observed, Plan, PlanInputs, PlannedBuild, PlannedTags,
    Published, UnknownState, UpToDate, plan,
};
pub use gc::{
    Candidates, GcInputs, GcPlan, GoingImage, HeldImage, KeptImage, KeptWhy, KernelKey, KernelRecord,
    LiveKernels, gc_plan, kernels_to_note,
};
pub use interest::{Interest, UPGRADE_STATE_LABELS};
pub use matrix::{LeftAlone, Matrix, MatrixInputs, OwnDriver, Skipped, Waiting, matrix};
pub use node::{ARCH_LABEL, KERNEL_LABEL, NodeReason, OS_ID_LABEL, OS_VERSION_LABEL, node_target};
pub use pace::Pace;
pub use readiness::{Needed, Next, PlannedNode, READY_FOR, Readiness, readiness_table};
pub use reasons::{BuildReason, HoldReason};
pub use rollout::{
    COPY_KERNEL_LABEL, COPY_OF_LABEL, Change, DaemonSetChange, DaemonSetCopy, DaemonSetRetirement,
    FieldRecord, ImageChange, Manifests, NodeChange, PER_KERNEL_ANNOTATION, PlannedRollout, PodRestart,
    RECORD_ANNOTATION, Record, RecordState, ResourceChange, RollbackOutcome, RollbackStep, RolloutDecision,
    RolloutObject, RolloutTarget, Strategy, handover_label, rollback, rollback_per_kernel,
};
pub use selector::{NodeAffinity, Operator, Requirement, SelectorTerm};
pub use signatures::{PlannedSignature, SignatureState, asks_for_signatures};
pub use skip_reason::{NeedReason, SkipReason};
pub use snapshot::{
    ClusterSnapshot, Container, DaemonSetFacts, LiveDaemonSet, NodeFacts, ObjectVersion, Owner, PodCount,
    PodFacts, ResourceFacts, Seen, UpdateStrategy,
};
pub use status::{Phase, StatusEntry, StatusRow, status, status_entries, status_table};
pub use table::{counts, sections, summary, table};
pub use union::{PlannedUnion, UnionMember, images_in_use};
