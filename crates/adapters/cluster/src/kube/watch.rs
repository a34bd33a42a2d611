//! Runs the watches that fill the store. Each watch is a task, started and stopped as the store requires.

use std::{collections::HashMap, fmt::Debug, pin::pin, sync::Arc, time::Duration};

use futures::StreamExt;
use kube::{
    Api, Client, Resource,
    api::ApiResource,
    core::{DynamicResourceScope, Status},
    runtime::{
        utils::Backoff,
        watcher::{self, Event, watcher},
    },
};
use parking_lot::{Mutex, MutexGuard};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    super::error::{ApiError, MissingPermission, PermissionScope},
    errors::{causes, one_line},
    facts,
    object::{Object, ObjectFacts, ObjectKey},
    pods,
    stats::KubeStats,
    store::Store,
    target::{WatchFailure, WatchScope, WatchTarget},
};

/// Page size of lists. With 20 KiB of status for each node, a page of nodes takes 1 MB of text.
const PAGE: u32 = 50;

/// Verbs needed for reading.
pub(super) const READ_VERBS: &[&str] = &["get", "list", "watch"];

/// State shared by the watches, the store and the writes.
pub(super) struct Shared {
    pub(super) client: Client,
    pub(super) stats: Arc<KubeStats>,
    /// farrier's user name at the API server, if known.
    user: Option<String>,
    /// The pod in which farrier runs.
    own_pod: Option<ObjectKey>,
    /// Field manager in `managedFields`.
    pub(super) manager: String,
    /// Interval at which farrier checks whether the API serves an operator's kind.
    discovery_interval: Duration,
    store: Mutex<Store>,
    /// Notifies subscribers when the needed watches or the snapshot may have changed.
    change_notifier: watch::Sender<()>,
}

impl Shared {
    pub(super) fn new(
        client: Client,
        stats: Arc<KubeStats>,
        user: Option<String>,
        own_pod: Option<ObjectKey>,
        manager: String,
        discovery_interval: Duration,
        store: Store,
    ) -> Self {
        let (change_notifier, _) = watch::channel(());
        let store = Mutex::new(store);
        Self { client, stats, user, own_pod, manager, discovery_interval, store, change_notifier }
    }

    /// Locks the store. The guard is never held across an await.
    pub(super) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock()
    }

    pub(super) fn subscribe_changes(&self) -> watch::Receiver<()> {
        self.change_notifier.subscribe()
    }

    /// Changes the store, and notifies subscribers if `change` returns true.
    pub(super) fn update_store(&self, change: impl FnOnce(&mut Store) -> bool) {
        let notifies = change(&mut self.store());
        if notifies {
            self.change_notifier.send_replace(());
        }
    }

    /// Describes the permission that a `403` reports as missing. `verbs` are all verbs that farrier needs for the resource.
    pub(super) fn permission(
        &self,
        verb: &'static str,
        resource: &ApiResource,
        scope: PermissionScope,
        verbs: &'static [&'static str],
    ) -> MissingPermission {
        MissingPermission {
            user: self.user.clone(),
            verb,
            group: resource.group.clone(),
            resource: resource.plural.clone(),
            scope,
            verbs,
        }
    }
}

/// Starts and stops watches as the store needs them, until canceled.
pub(super) async fn supervise(shared: Arc<Shared>, cancel: CancellationToken) {
    let mut running: HashMap<WatchTarget, CancellationToken> = HashMap::new();
    let mut changes = shared.subscribe_changes();
    loop {
        changes.mark_unchanged();
        let (start, stop) = shared.store().reconcile();
        for target in stop {
            if let Some(token) = running.remove(&target) {
                token.cancel();
            }
        }
        for (target, scope, epoch) in start {
            let token = cancel.child_token();
            if let Some(replaced) = running.insert(target.clone(), token.clone()) {
                replaced.cancel();
            }
            let watch = Watch { shared: shared.clone(), target, scope, epoch };
            tokio::spawn(async move { token.run_until_cancelled(Box::pin(watch.run())).await });
        }
        tokio::select! {
            () = cancel.cancelled() => return,
            outcome = changes.changed() => if outcome.is_err() { return },
        }
    }
}

struct Watch {
    shared: Arc<Shared>,
    target: WatchTarget,
    scope: WatchScope,
    epoch: u64,
}

impl Watch {
    async fn run(self) {
        match &self.target {
            WatchTarget::Nodes => self.follow(|node| Some(facts::node(node))).await,
            WatchTarget::Pods { uid, .. } => {
                let is_controlled =
                    |pod: &Object| matches!(&pod.facts, ObjectFacts::Pod(pod) if pod.daemon_set == *uid);
                self.follow(|pod| Some(pods::pod(pod)).filter(is_controlled)).await;
            }
            WatchTarget::DaemonSets => {
                let warn = |error: &String| {
                    tracing::warn!(error, "skipping a DaemonSet that does not match the API schema");
                };
                let manager = &self.shared.manager;
                self.follow(|object| facts::daemon_set(object, manager).inspect_err(warn).ok()).await;
            }
            WatchTarget::Workloads { .. } => {
                let own_pod = self.shared.own_pod.as_ref();
                self.follow(|pod| Some(pods::workload(pod, own_pod))).await;
            }
            WatchTarget::Checks { .. } => self.follow(|job| Some(pods::check(job))).await,
            // The API may not serve this kind.
            WatchTarget::Resources(kind) => loop {
                if self.is_served().await != Some(false) {
                    let manager = &self.shared.manager;
                    self.follow(|object| Some(facts::resource(*kind, object, manager))).await;
                }
                self.record_failure(WatchFailure::NotServed);
                tokio::time::sleep(self.shared.discovery_interval).await;
            },
        }
    }

    /// Whether the API serves this kind. `None` means unknown: the following list will show whether the kind is served.
    async fn is_served(&self) -> Option<bool> {
        let ApiResource { api_version, plural, .. } = self.target.resource();
        match self.shared.client.list_api_group_resources(&api_version).await {
            Ok(list) => Some(list.resources.iter().any(|resource| resource.name == plural)),
            Err(kube::Error::Api(status)) if status.code == 404 => Some(false),
            Err(_) => None,
        }
    }

    fn api<K>(&self) -> Api<K>
    where
        K: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>,
    {
        let (client, resource) = (self.shared.client.clone(), self.target.resource());
        match self.target.namespace() {
            Some(namespace) => Api::namespaced_with(client, namespace, &resource),
            None => Api::all_with(client, &resource),
        }
    }

    fn watcher_config(&self) -> watcher::Config {
        let config = watcher::Config::default().page_size(PAGE);
        match &self.scope {
            WatchScope::Selector(labels) => config.labels(labels),
            WatchScope::Fields(fields) => config.fields(fields),
            WatchScope::Named(_) | WatchScope::Labels(_) | WatchScope::All => config,
        }
    }

    /// Lists and watches objects. Returns if the API does not serve the kind.
    async fn follow<K>(&self, convert: impl Fn(K) -> Option<Object>)
    where
        K: Resource<DynamicType = ApiResource, Scope = DynamicResourceScope>
            + Clone
            + DeserializeOwned
            + Debug
            + Send
            + 'static,
    {
        let (api, config) = (self.api::<K>(), self.watcher_config());
        let mut backoff = watcher::DefaultBackoff::default();
        let mut attempts = 0;
        loop {
            let mut stream = pin!(watcher(api.clone(), config.clone()));
            while let Some(next) = stream.next().await {
                let error = match next {
                    Ok(event) => {
                        // `Init` only announces a list. The list may still fail.
                        if !matches!(event, Event::Init) {
                            backoff.reset();
                            attempts = 0;
                            self.shared.stats.note_answer();
                        }
                        if let Some(event) = convert_event(event, &convert) {
                            self.shared.update_store(|store| store.event(&self.target, self.epoch, event));
                        }
                        continue;
                    }
                    Err(error) => error,
                };
                attempts += 1;
                if matches!(error, watcher::Error::WatchFailed(_)) && status(&error).is_none() {
                    // The connection broke during a response. `StatsLayer` sees only the start of a response.
                    self.shared.stats.note_unavailable();
                }
                let failure = self.classify(&error, attempts);
                tracing::debug!(target = ?self.target, attempts, %error, "watch failed");
                let forbidden = matches!(failure, WatchFailure::Forbidden(_));
                if matches!(failure, WatchFailure::NotServed) {
                    return;
                }
                self.record_failure(failure);
                let wait = backoff.next().unwrap_or_default().max(self.shared.stats.pause());
                tokio::time::sleep(wait).await;
                if forbidden {
                    // A resumed watch would not show when the permission is granted. Only a new list does.
                    break;
                }
            }
        }
    }

    fn record_failure(&self, failure: WatchFailure) {
        self.shared.update_store(|store| store.record_failure(&self.target, self.epoch, failure));
    }

    fn classify(&self, error: &watcher::Error, attempts: u32) -> WatchFailure {
        let verb = match error {
            watcher::Error::InitialListFailed(_) => "list",
            _ => "watch",
        };
        let reason = one_line(&causes(error));
        match status(error).map(|status| status.code) {
            Some(403) => {
                let scope = match (&self.target, self.target.namespace()) {
                    (_, Some(namespace)) => PermissionScope::Namespace(namespace.to_owned()),
                    (WatchTarget::Nodes | WatchTarget::Resources(_), None) => PermissionScope::Cluster,
                    (_, None) => PermissionScope::AllNamespaces,
                };
                let resource = self.target.resource();
                WatchFailure::Forbidden(self.shared.permission(verb, &resource, scope, READ_VERBS))
            }
            Some(401) => WatchFailure::Failing { attempts, error: ApiError::Unauthorized(reason) },
            Some(404) if matches!(self.target, WatchTarget::Resources(_)) => WatchFailure::NotServed,
            _ => WatchFailure::Failing { attempts, error: ApiError::Unavailable(reason) },
        }
    }
}

fn status(error: &watcher::Error) -> Option<&Status> {
    match error {
        watcher::Error::WatchError(status)
        | watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => Some(status),
        _ => None,
    }
}

fn convert_event<K>(event: Event<K>, convert: &impl Fn(K) -> Option<Object>) -> Option<Event<Object>> {
    Some(match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(object) => Event::InitApply(convert(object)?),
        Event::Apply(object) => Event::Apply(convert(object)?),
        Event::Delete(object) => Event::Delete(convert(object)?),
    })
}
