//! Runs the reconcile loop (observe, plan, build, roll out, report) for `farrier run` and other commands.
//!
//! [`farrier_core::plan`] makes the decisions; this crate carries them out.
#![forbid(unsafe_code)]

mod apply;
mod broken_chains;
pub mod live;
mod lookup_cache;
mod observe;
mod reconcile;
mod reconcile_report;
pub mod rollback;
pub mod runtime;
pub mod status;
pub mod without_cluster;

pub use lookup_cache::LookupCache;
pub use reconcile::{Planned, observe_and_plan};
pub use reconcile_report::{ReconcileReport, RolloutReport, TargetReport};
