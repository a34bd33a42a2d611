//! Adapter: a live Kubernetes cluster, watched and written to.
//!
//! What is left to kube's client: finding the cluster (kubeconfig, `KUBECONFIG`, in-cluster files), TLS with rustls
//! and the kubeconfig's or pod's roots, client certificates, tokens (a token file is read again every minute, exec
//! plug-ins are run again before their token runs out), URLs and bodies of requests. Not enabled: proxies, the
//! cloud-specific old auth providers, and its retries, which know no fence.
//!
//! What kube-runtime's watcher does: pages, bookmarks, resuming a watch, listing again after `410 Gone`. Its reflector
//! is not used. A reflector keeps whole objects of one kind, and here objects are cut down to facts, the nodes' labels
//! of interest follow from the DaemonSets that are there, a snapshot waits until all kinds have been listed, a missing
//! right is named, and a write is known to the next snapshot at once, which no older event undoes.

mod bodies;
mod call;
mod connect;
mod errors;
mod facts;
mod forms;
mod image_streams;
mod live;
mod named;
mod object;
mod pods;
mod rights;
mod stats;
mod store;
mod target;
mod watch;
mod write;

pub use self::{
    connect::{KubeOptions, client},
    errors::causes,
    live::KubeCluster,
    named::{Named, named},
    rights::{AskedPatch, Person},
    stats::{KubeStats, is_starting},
};
