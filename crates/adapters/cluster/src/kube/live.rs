//! A live cluster for the reconcile loop.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use farrier_core::{
    image::OperatorResource,
    plan::{Candidates, Change, ClusterSnapshot, SnapshotScope},
};
use k8s_openapi::api::{apps::v1::DaemonSet, core::v1::Pod};
use kube::{
    Api, Client,
    api::{ApiResource, DynamicObject, ListParams, TypeMeta},
};
use serde_json::json;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    super::{
        error::{ApiError, ClusterError, PermissionScope},
        source::{Cluster, Fence},
    },
    call::Caller,
    connect::{Connection, DEFAULT_DISCOVERY_INTERVAL, KubeOptions, connect, own_user_name},
    image_streams::image_streams,
    stats::KubeStats,
    store::{Readiness, Store},
    target::WatchTarget,
    watch::{READ_VERBS, Shared, supervise},
};

/// Page size of full lists. A pod takes about 10 KiB.
const PAGE: u32 = 250;

/// A live cluster. The watches run until this value is dropped or its token is canceled.
pub struct KubeCluster {
    pub(super) shared: Arc<Shared>,
    pub(super) caller: Caller,
    /// URL of the API server, for display.
    address: String,
    namespace: String,
    /// Generation of the store at the last snapshot.
    snapshot_generation: AtomicU64,
    cancel: CancellationToken,
    /// Cancels the watches on drop.
    _watches: DropGuard,
}

impl KubeCluster {
    /// Connects to the cluster, looks up farrier's user name, and starts the watches. Does not wait for the first lists;
    /// [`Cluster::snapshot`] does.
    pub async fn connect(
        options: KubeOptions,
        scope: SnapshotScope,
        cancel: CancellationToken,
    ) -> Result<Arc<Self>, ClusterError> {
        let Connection { client, stats, address, namespace } = connect(&options).await?;
        let caller = Caller::new(stats.clone());
        let user = own_user_name(&caller, &client, &address).await?;
        tracing::info!(address, user = user.as_deref().unwrap_or_default(), "cluster found");
        let mut store = Store::new(scope);
        store.writable = options.writable;
        let own_pod = options.pod.map(|pod| (namespace.clone(), pod));
        let manager = options.instance.to_string();
        let interval = options.discovery_interval.unwrap_or(DEFAULT_DISCOVERY_INTERVAL);
        let shared = Shared::new(client, stats, user, own_pod, manager, interval, store);
        let shared = Arc::new(shared);
        let cancel = cancel.child_token();
        tokio::spawn(supervise(shared.clone(), cancel.clone()));
        let watches = cancel.clone().drop_guard();
        Ok(Arc::new(Self {
            shared,
            caller,
            address,
            namespace,
            snapshot_generation: AtomicU64::new(0),
            cancel,
            _watches: watches,
        }))
    }

    /// Sets the fence that every later write checks.
    pub fn set_fence(&self, fence: Arc<dyn Fence>) {
        self.caller.set_fence(fence);
    }

    /// Returns the client, for reads and writes by other modules. [`Self::stats`] counts its requests. The caller must check the
    /// fence before a write.
    pub fn client(&self) -> Client {
        self.shared.client.clone()
    }

    /// Returns farrier's own namespace.
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Returns the counters of requests.
    pub fn stats(&self) -> &KubeStats {
        &self.shared.stats
    }

    /// Lists all objects of a kind page by page, and passes each one to `process`.
    async fn for_each_object(
        &self,
        resource: &ApiResource,
        mut process: impl FnMut(DynamicObject) -> serde_json::Result<()>,
    ) -> Result<(), ApiError> {
        let permission = self.shared.permission("list", resource, PermissionScope::AllNamespaces, READ_VERBS);
        let api: Api<DynamicObject> = Api::all_with(self.client(), resource);
        let mut page = ListParams::default().limit(PAGE);
        loop {
            let list = self.caller.call(&permission, || api.list(&page)).await?;
            for item in list.items {
                process(item).map_err(|e| ApiError::Rejected(e.to_string()))?;
            }
            match list.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => page = page.continue_token(&token),
                None => return Ok(()),
            }
        }
    }
}

#[async_trait::async_trait]
impl Cluster for KubeCluster {
    fn describe(&self) -> String {
        format!("Kubernetes cluster at {}", self.address)
    }

    /// Waits until all kinds have been listed once. Later calls return immediately, even if the API server is unavailable; then
    /// `stale_since` of the snapshot is set. If a kernel family names an ImageStream, each snapshot requests the ImageStream from
    /// the API server.
    async fn snapshot(&self) -> Result<ClusterSnapshot, ClusterError> {
        let failed =
            |error| ClusterError::Api { action: format!("read the cluster at {}", self.address), error };
        let stopped = || failed(ApiError::Unavailable("farrier is stopping".to_owned()));
        let mut changes = self.shared.subscribe_changes();
        let (snapshot, streams) = loop {
            changes.mark_unchanged();
            {
                let store = self.shared.store();
                match store.readiness() {
                    Readiness::Ready => {
                        self.snapshot_generation.store(store.generation(), Ordering::Relaxed);
                        break (store.snapshot(), store.image_streams());
                    }
                    Readiness::Waiting => {}
                    Readiness::Failed(error) => return Err(failed(error)),
                }
            }
            tokio::select! {
                () = self.cancel.cancelled() => return Err(stopped()),
                outcome = changes.changed() => outcome.map_err(|_| stopped())?,
            }
        };
        let image_streams = image_streams(self, streams).await.map_err(failed)?;
        Ok(ClusterSnapshot { image_streams, stale_since: self.shared.stats.silent_since(), ..snapshot })
    }

    async fn mentions(&self, images: &Candidates) -> Result<BTreeSet<String>, ClusterError> {
        let mut mentioned = BTreeSet::new();
        images.mentioned_in_snapshot(&self.snapshot().await?, &mut mentioned);
        for resource in [ApiResource::erase::<DaemonSet>(&()), ApiResource::erase::<Pod>(&())] {
            // Keep only the mentioned images in memory, and not the objects.
            let process = |item| {
                images.mentioned_in(&serde_json::to_string(&item)?, &mut mentioned);
                Ok(())
            };
            self.for_each_object(&resource, process).await.map_err(|error| {
                let kind = &resource.plural;
                let action = format!("list {kind} in all namespaces, to find the images that they use");
                ClusterError::Api { action, error }
            })?;
        }
        Ok(mentioned)
    }

    async fn manifests(&self) -> Result<Vec<String>, ClusterError> {
        let operators = OperatorResource::TARGETS.map(|kind| WatchTarget::Resources(kind).resource());
        let kinds = [WatchTarget::Nodes.resource(), WatchTarget::DaemonSets.resource()];
        let mut texts = Vec::new();
        for resource in kinds.into_iter().chain(operators) {
            let process = |mut item: DynamicObject| {
                // The items of a list do not contain their kind.
                item.types =
                    Some(TypeMeta { api_version: resource.api_version.clone(), kind: resource.kind.clone() });
                item.metadata.managed_fields = None;
                if let Some(status) = item.data.get_mut("status") {
                    *status = json!({"nodeInfo": status.get("nodeInfo")});
                }
                texts.push(serde_json::to_string(&item)?);
                Ok(())
            };
            match self.for_each_object(&resource, process).await {
                Err(ApiError::Gone) if !resource.group.is_empty() => {}
                Err(error @ ApiError::Forbidden(_)) if resource.kind != "Node" => {
                    tracing::warn!(error = %error, "skipping a kind that cannot be listed");
                }
                outcome => outcome.map_err(|error| ClusterError::Api {
                    action: format!("list {}", resource.plural),
                    error,
                })?,
            }
        }
        Ok(texts)
    }

    async fn apply(&self, change: &Change) -> Result<(), ClusterError> {
        self.write(change).await
    }

    async fn changed(&self) {
        let snapshot_generation = self.snapshot_generation.load(Ordering::Relaxed);
        let mut changes = self.shared.subscribe_changes();
        while self.shared.store().generation() <= snapshot_generation {
            if changes.changed().await.is_err() {
                // The watches have ended, so that no further change will arrive.
                std::future::pending::<()>().await;
            }
        }
    }

    fn set_snapshot_scope(&self, scope: &SnapshotScope) {
        self.shared.update_store(|store| {
            store.set_snapshot_scope(scope.clone());
            true
        });
    }
}
