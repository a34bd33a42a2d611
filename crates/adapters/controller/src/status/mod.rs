//! Publishes the status to the cluster as DriverBuild objects and Events.
//!
//! The pure modules [`desired`] and [`events`] decide what is written, based on the rows that `farrier status` prints.

mod desired;
mod driver_build;
mod events;
mod sink;
mod unused_objects;

pub use desired::{MANAGED_BY, Writes, desired, name_of, writes};
pub use driver_build::{DriverBuild, DriverBuildSpec, DriverBuildStatus, crd, crd_yaml};
pub use events::{EventHistory, EventReason, Regarding, StatusEvent, events};
pub use sink::{KubeStatus, StatusDestination};
pub use unused_objects::UnusedObjects;
