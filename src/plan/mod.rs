//! Pure: from a snapshot, the definitions and the clock to a plan.
//!
//! Two phases, because what is looked up in the registry depends on the inputs: [`matrix`] says which
//! image each kernel target calls for, under which names and with which input hash; [`plan`] then
//! compares that with what the registry and the cluster hold, and decides. Both can be called again
//! after every build, with the same answer for the same arguments.

mod activity;
mod cell;
mod deadline;
mod decide;
#[cfg(test)]
mod fixtures;
mod interest;
mod matrix;
mod node;
mod reasons;
pub mod retry;
pub mod reuse;
mod rollout;
mod selector;
mod snapshot;
mod status;
mod table;
mod text;

pub use activity::{Activity, BuildActivity};
pub use cell::{BUILD_FORMAT, Cell, CellInputs, CellPatch, ImageLocation, ResolvedImage, cell_for};
pub use deadline::next_deadline;
pub use decide::{
    Conflict, Failure, HeldBack, ImageContents, Observed, Plan, PlanInputs, PlannedBuild, PlannedTags,
    Published, UnknownState, UpToDate, plan,
};
pub use interest::Interest;
pub use matrix::{LeftAlone, Matrix, MatrixInputs, Skipped, matrix};
pub use node::{ARCH_LABEL, KERNEL_LABEL, NodeReason, OS_ID_LABEL, OS_VERSION_LABEL, node_target};
pub use reasons::{BuildReason, HoldReason, SkipReason};
pub use rollout::{
    Change, DaemonSetChange, DaemonSetCopy, DaemonSetRetirement, ImageChange, Manifests, NodeChange,
    PlannedRollout, PodRestart, RECORD_ANNOTATION, Record, RecordState, ResourceChange, RolloutDecision,
    RolloutObject, RolloutTarget, Strategy,
};
pub use selector::{NodeAffinity, Operator, Requirement, SelectorTerm};
pub use snapshot::{
    ClusterSnapshot, Container, DaemonSetFacts, LiveDaemonSet, NodeFacts, ObjectVersion, Owner, PodCount,
    PodFacts, ResourceFacts, Seen, UpdateStrategy,
};
pub use status::{Phase, StatusRow, status, status_table};
pub use table::{counts, sections, summary, table};
