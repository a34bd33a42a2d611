//! A live Kubernetes cluster that farrier watches and writes to.
//!
//! kube's client finds the cluster (kubeconfig, `KUBECONFIG`, in-cluster files). It handles TLS with rustls and the roots of the
//! kubeconfig or pod, client certificates, tokens, URLs and request bodies. A token file is read again every minute, and exec
//! plug-ins run again before their token expires. These features of the client are not enabled: proxies, the old cloud-specific
//! auth providers, and retries, which ignore the fence.
//!
//! kube-runtime's watcher handles pages, bookmarks, resumed watches, and new lists after `410 Gone`. farrier does not use
//! kube-runtime's reflector, which keeps whole objects of a single kind. This module differs in these points:
//!
//! - Objects are reduced to facts.
//! - The node labels of interest depend on the existing DaemonSets.
//! - A snapshot waits until all kinds have been listed.
//! - A missing permission is reported by name.
//! - A write is visible in the next snapshot at once, and older events do not undo it.

mod api_fields;
mod bodies;
mod call;
mod connect;
mod errors;
mod facts;
mod image_streams;
mod live;
mod names;
mod object;
mod operator_status;
mod permissions;
mod pods;
mod secrets;
mod stats;
mod store;
mod target;
mod watch;
mod write;

pub use self::{
    connect::{KubeOptions, client},
    errors::causes,
    live::KubeCluster,
    names::{ClusterNames, cluster_names},
    permissions::{RequestedPatch, TokenOwner},
    secrets::KubeSecrets,
    stats::{KubeStats, is_starting},
};
