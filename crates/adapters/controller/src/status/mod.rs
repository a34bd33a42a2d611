//! Publishes the status to the cluster as DriverBuild objects and Events.
//!
//! Pure modules ([`desired`], [`events`]) decide what is written, from the rows that `farrier status` prints.

mod desired;
mod driver_build;
mod events;
mod history;
mod sink;

pub use desired::{MANAGED_BY, Writes, desired, name_of, writes};
pub use driver_build::{DriverBuild, DriverBuildSpec, DriverBuildStatus, crd, crd_yaml};
pub use events::{EventHistory, EventReason, Regarding, StatusEvent, events};
pub use history::History;
pub use sink::{KubeStatus, Place};
