//! Adapter: the reconcile loop: observe, plan, build, check, assemble, publish, roll out, report.
//!
//! [`farrier_core::plan`] makes the decisions; this module carries them out.

mod apply;
mod broken_chains;
pub mod live;
mod observe;
mod reconcile;
mod reconcile_report;
pub mod registry_alone;
pub mod rollback;

pub use observe::LookupCache;
pub use reconcile::Planned;
pub use reconcile_report::{ReconcileReport, RolloutReport, TargetReport};

#[cfg(test)]
pub(crate) use crate::build::testing;
