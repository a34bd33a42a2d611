//! Reads nodes and rewrites rollout targets, in a cluster or a directory of manifests, for the controller.
#![forbid(unsafe_code)]

mod dir;
mod edit;
mod error;
mod image_field;
pub mod kube;
mod kustomize;
mod manifest;
mod source;

pub use dir::Directory;
pub use error::{ApiError, ClusterError, MissingPermission, PermissionScope};
pub use kube::{
    ClusterNames, KubeCluster, KubeOptions, KubeSecrets, RequestedPatch, TokenOwner, cluster_names,
};
pub use manifest::nodes_and_daemon_sets;
pub use source::{Cluster, Fence};
