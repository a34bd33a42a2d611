//! Reads nodes and rewrites rollout targets, in a cluster or a directory of manifests, for the controller.
#![forbid(unsafe_code)]

mod dir;
mod edit;
mod error;
pub mod kube;
mod manifest;
mod source;

pub use dir::Directory;
pub use error::{ApiError, ClusterError, MissingRight, Scope};
pub use kube::{AskedPatch, KubeCluster, KubeOptions, KubeSecrets, Named, Person, named};
pub use manifest::nodes_and_daemon_sets;
pub use source::{Cluster, Fence};
