//! Adapter: a live Kubernetes cluster, watched and written to.
//!
//! What is left to kube's client: finding the cluster (kubeconfig, `KUBECONFIG`, in-cluster files), TLS with rustls
//! and the kubeconfig's or pod's roots, client certificates, tokens (a token file is read again every minute, exec
//! plug-ins are run again before their token runs out). Not enabled: proxies, the cloud-specific old auth providers.
//!
//! What kube-runtime's watcher does: pages, bookmarks, resuming a watch, listing again after `410 Gone`. What is
//! added here: objects are cut down to facts while they are parsed, the nodes' labels of interest follow from the
//! DaemonSets that are there, missing rights are named, and a write is known to the next snapshot at once.

mod bodies;
mod call;
mod connect;
mod errors;
mod facts;
mod mentions;
mod objects;
mod stats;
mod store;
mod watch;
mod words;
mod write;

use std::{
    collections::BTreeSet,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use kube::Client;
use tokio_util::sync::{CancellationToken, DropGuard};

use self::{
    call::Caller,
    store::{Readiness, Store},
    watch::Shared,
};
pub use self::{
    stats::{ApiKind, ApiOutcome, ApiVerb, KubeStats},
    words::{MissingRight, Scope},
};
use super::{Cluster, ClusterError, Fence};
use crate::plan::{Candidates, Change, ClusterSnapshot, Interest};

/// Which cluster, and as what.
#[derive(Clone, Debug)]
pub struct KubeOptions {
    /// A kubeconfig; `None` takes what `KUBECONFIG` names, else `~/.kube/config`, else the pod's service account.
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig's context; `None` takes the current one.
    pub context: Option<String>,
    /// farrier's own namespace; `None` takes the pod's, the context's, or `farrier`.
    pub namespace: Option<String>,
    /// How often it is looked whether the API serves an operator's kind by now, where it did not.
    pub discovery_interval: Duration,
}

/// A connection to the API server for what farrier reads beside the fleet, such as Secrets.
pub async fn client(options: &KubeOptions) -> Result<Client, ClusterError> {
    Ok(connect::client(options).await?.client)
}

impl Default for KubeOptions {
    fn default() -> Self {
        Self { kubeconfig: None, context: None, namespace: None, discovery_interval: Duration::from_secs(30) }
    }
}

/// A live cluster. Its watches run until it is dropped, or the token that it was given is cancelled.
pub struct KubeCluster {
    shared: Arc<Shared>,
    caller: Caller,
    /// Where the API server is, for people.
    address: String,
    namespace: String,
    /// The store's generation when the last snapshot was taken.
    taken: AtomicU64,
    cancel: CancellationToken,
    _watches: DropGuard,
}

impl KubeCluster {
    /// Finds the cluster, asks who farrier is there, and begins to watch. The first lists need not be complete then:
    /// [`Cluster::snapshot`] waits for them.
    pub async fn connect(
        options: KubeOptions,
        interest: Interest,
        cancel: CancellationToken,
    ) -> Result<Arc<Self>, ClusterError> {
        let connect::Connection { client, stats, address, namespace } = connect::client(&options).await?;
        let caller = Caller::new(client.clone());
        let user = connect::who_am_i(&caller, &address).await?;
        tracing::info!(address, user = user.as_deref().unwrap_or_default(), "cluster found");
        let store = Store::new(interest);
        let shared = Arc::new(Shared::new(client, stats, user, options.discovery_interval, store));
        let cancel = cancel.child_token();
        tokio::spawn(watch::supervise(shared.clone(), cancel.clone()));
        let watches = cancel.clone().drop_guard();
        Ok(Arc::new(Self {
            shared,
            caller,
            address,
            namespace,
            taken: AtomicU64::new(0),
            cancel,
            _watches: watches,
        }))
    }

    /// Watches what other definitions ask for.
    pub fn set_interest(&self, interest: Interest) {
        self.shared.store().set_interest(interest);
        self.shared.ring();
    }

    /// From now on every write asks first.
    pub fn set_fence(&self, fence: Arc<dyn Fence>) {
        self.caller.set_fence(fence);
    }

    /// The client, for what other parts read and write. Its requests are counted, too; the fence is theirs to ask.
    pub fn client(&self) -> Client {
        self.shared.client.clone()
    }

    /// farrier's own namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Who farrier is to the API server, where it says so: `system:serviceaccount:farrier:farrier`.
    pub fn user(&self) -> Option<&str> {
        self.shared.user.as_deref()
    }

    /// Counters of requests.
    pub fn stats(&self) -> Arc<KubeStats> {
        self.shared.stats.clone()
    }

    /// Has everything been listed that a snapshot needs?
    pub fn is_synced(&self) -> bool {
        matches!(self.shared.store().readiness(), Readiness::Ready)
    }
}

#[async_trait::async_trait]
impl Cluster for KubeCluster {
    fn describe(&self) -> String {
        format!("Kubernetes cluster at {}", self.address)
    }

    /// Waits until everything has been listed once. Later it is at hand, also while the API server is away: a write
    /// then finds out.
    async fn snapshot(&self) -> Result<ClusterSnapshot, ClusterError> {
        let action = || format!("read the cluster at {}", self.address);
        let mut bell = self.shared.listen();
        loop {
            bell.mark_unchanged();
            {
                let store = self.shared.store();
                match store.readiness() {
                    Readiness::Ready => {
                        self.taken.store(store.generation(), Ordering::Relaxed);
                        return Ok(store.snapshot());
                    }
                    Readiness::Waiting => {}
                    Readiness::Forbidden(right) => {
                        return Err(ClusterError::Forbidden { action: action(), missing: Box::new(right) });
                    }
                    Readiness::Unauthorized(reason) => {
                        return Err(ClusterError::Unauthorized { action: action(), reason });
                    }
                    Readiness::Failing(reason) => {
                        return Err(ClusterError::Unavailable { action: action(), reason });
                    }
                }
            }
            let stopped =
                || ClusterError::Unavailable { action: action(), reason: "farrier is stopping".to_owned() };
            tokio::select! {
                () = self.cancel.cancelled() => return Err(stopped()),
                rung = bell.changed() => rung.map_err(|_| stopped())?,
            }
        }
    }

    async fn mentions(&self, images: &Candidates) -> Result<BTreeSet<String>, ClusterError> {
        let mut mentioned = BTreeSet::new();
        images.mentioned_in_snapshot(&self.snapshot().await?, &mut mentioned);
        self.add_mentions(images, &mut mentioned).await?;
        Ok(mentioned)
    }

    async fn apply(&self, change: &Change) -> Result<(), ClusterError> {
        self.write(change).await
    }

    async fn changed(&self) {
        let taken = self.taken.load(Ordering::Relaxed);
        let mut bell = self.shared.listen();
        while self.shared.store().generation() <= taken {
            if bell.changed().await.is_err() {
                // Nothing changes any more.
                std::future::pending::<()>().await;
            }
        }
    }

    fn set_interest(&self, interest: &Interest) {
        Self::set_interest(self, interest.clone());
    }
}
