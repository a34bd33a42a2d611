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
    super::error::{ApiError, MissingRight, Scope},
    errors::{causes, one_line},
    facts,
    object::{Facts, Key, Object},
    pods,
    stats::KubeStats,
    store::Store,
    target::{Target, Trouble, WatchScope},
};

/// Page size of lists. With 20 KiB of status for each node, a page of nodes takes 1 MB of text.
const PAGE: u32 = 50;

/// Verbs needed for reading.
pub(super) const READ: &[&str] = &["get", "list", "watch"];

/// State shared by the watches, the store and the writes.
pub(super) struct Shared {
    pub(super) client: Client,
    pub(super) stats: Arc<KubeStats>,
    /// farrier's user name at the API server, if known.
    user: Option<String>,
    /// The pod in which farrier runs.
    own_pod: Option<Key>,
    /// Interval at which farrier checks whether the API serves an operator's kind.
    discovery_interval: Duration,
    store: Mutex<Store>,
    /// Notifies listeners when the needed watches or the snapshot may have changed.
    bell: watch::Sender<()>,
}

impl Shared {
    pub(super) fn new(
        client: Client,
        stats: Arc<KubeStats>,
        user: Option<String>,
        own_pod: Option<Key>,
        discovery_interval: Duration,
        store: Store,
    ) -> Self {
        let (bell, _) = watch::channel(());
        Self { client, stats, user, own_pod, discovery_interval, store: Mutex::new(store), bell }
    }

    /// Locks the store. The guard is never held across an await.
    pub(super) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock()
    }

    pub(super) fn listen(&self) -> watch::Receiver<()> {
        self.bell.subscribe()
    }

    /// Changes the store, and notifies listeners if the change returns true.
    pub(super) fn tell(&self, change: impl FnOnce(&mut Store) -> bool) {
        let rings = change(&mut self.store());
        if rings {
            self.bell.send_replace(());
        }
    }

    /// Describes the permission that a `403` reports as missing. `verbs` are all verbs that farrier needs for the resource.
    pub(super) fn right(
        &self,
        verb: &'static str,
        resource: &ApiResource,
        scope: Scope,
        verbs: &'static [&'static str],
    ) -> MissingRight {
        MissingRight {
            user: self.user.clone(),
            verb,
            group: resource.group.clone(),
            resource: resource.plural.clone(),
            scope,
            verbs,
        }
    }
}

/// Runs the watches that the store needs, until canceled.
pub(super) async fn supervise(shared: Arc<Shared>, cancel: CancellationToken) {
    let mut running: HashMap<Target, CancellationToken> = HashMap::new();
    let mut bell = shared.listen();
    loop {
        bell.mark_unchanged();
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
            rung = bell.changed() => if rung.is_err() { return },
        }
    }
}

struct Watch {
    shared: Arc<Shared>,
    target: Target,
    scope: WatchScope,
    epoch: u64,
}

impl Watch {
    async fn run(self) {
        match &self.target {
            Target::Nodes => self.follow(|node| Some(facts::node(node))).await,
            Target::Pods { uid, .. } => {
                let own = |pod: &Object| matches!(&pod.facts, Facts::Pod(pod) if pod.daemon_set == *uid);
                self.follow(|pod| Some(pods::pod(pod)).filter(own)).await;
            }
            Target::DaemonSets => {
                let warn = |error: &String| {
                    tracing::warn!(error, "skipping a DaemonSet that does not match the API schema");
                };
                self.follow(|object| facts::daemon_set(object).inspect_err(warn).ok()).await;
            }
            Target::Workloads { .. } => {
                let own = self.shared.own_pod.as_ref();
                self.follow(|pod| Some(pods::workload(pod, own))).await;
            }
            Target::Checks { .. } => self.follow(|job| Some(pods::check(job))).await,
            // The API may not serve this kind.
            Target::Resources(kind) => loop {
                if self.is_served().await != Some(false) {
                    self.follow(|object| Some(facts::resource(*kind, object))).await;
                }
                self.trouble(Trouble::Absent);
                tokio::time::sleep(self.shared.discovery_interval).await;
            },
        }
    }

    /// Whether the API serves this kind; `None` if the API server does not say, so that the list will show it.
    async fn is_served(&self) -> Option<bool> {
        let ApiResource { api_version, plural, .. } = self.target.resource();
        match self.shared.client.list_api_group_resources(&api_version).await {
            Ok(list) => Some(list.resources.iter().any(|resource| resource.name == plural)),
            Err(kube::Error::Api(status)) if status.code == 404 => Some(false),
            Err(_) => None,
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
        let (client, resource) = (self.shared.client.clone(), self.target.resource());
        let api: Api<K> = match &self.target {
            Target::Pods { namespace, .. } | Target::Checks { namespace } => {
                Api::namespaced_with(client, namespace, &resource)
            }
            _ => Api::all_with(client, &resource),
        };
        let mut config = watcher::Config::default().page_size(PAGE);
        match &self.scope {
            WatchScope::Selector(labels) => config = config.labels(labels),
            WatchScope::Fields(fields) => config = config.fields(fields),
            WatchScope::Named(_) | WatchScope::Labels(_) | WatchScope::All => {}
        }
        let mut backoff = watcher::DefaultBackoff::default();
        let mut attempts = 0;
        loop {
            let mut stream = pin!(watcher(api.clone(), config.clone()));
            while let Some(next) = stream.next().await {
                let error = match next {
                    Ok(event) => {
                        // The start of a list does not yet count as a success.
                        if !matches!(event, Event::Init) {
                            backoff.reset();
                            attempts = 0;
                        }
                        if let Some(event) = translate(event, &convert) {
                            self.shared.tell(|store| store.event(&self.target, self.epoch, event));
                        }
                        continue;
                    }
                    Err(error) => error,
                };
                attempts += 1;
                if matches!(error, watcher::Error::WatchFailed(_)) && status(&error).is_none() {
                    // The connection broke during a response.
                    self.shared.stats.note_unavailable();
                }
                let trouble = self.judge(&error, attempts);
                tracing::debug!(target = ?self.target, attempts, %error, "watch failed");
                let forbidden = matches!(trouble, Trouble::Forbidden(_));
                if matches!(trouble, Trouble::Absent) {
                    return;
                }
                self.trouble(trouble);
                let wait = backoff.next().unwrap_or_default().max(self.shared.stats.pause());
                tokio::time::sleep(wait).await;
                if forbidden {
                    // Only a new list shows when the permission is granted; a resumed watch would not.
                    break;
                }
            }
        }
    }

    fn trouble(&self, trouble: Trouble) {
        self.shared.tell(|store| store.trouble(&self.target, self.epoch, trouble));
    }

    fn judge(&self, error: &watcher::Error, attempts: u32) -> Trouble {
        let verb = match error {
            watcher::Error::InitialListFailed(_) => "list",
            _ => "watch",
        };
        let reason = one_line(&causes(error));
        match status(error).map(|status| status.code) {
            Some(403) => {
                let scope = match &self.target {
                    Target::Nodes | Target::Resources(_) => Scope::Cluster,
                    Target::DaemonSets | Target::Workloads { .. } => Scope::AllNamespaces,
                    Target::Pods { namespace, .. } | Target::Checks { namespace } => {
                        Scope::Namespace(namespace.clone())
                    }
                };
                Trouble::Forbidden(self.shared.right(verb, &self.target.resource(), scope, READ))
            }
            Some(401) => Trouble::Failing { attempts, error: ApiError::Unauthorized(reason) },
            Some(404) if matches!(self.target, Target::Resources(_)) => Trouble::Absent,
            _ => Trouble::Failing { attempts, error: ApiError::Unavailable(reason) },
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

fn translate<K>(event: Event<K>, convert: &impl Fn(K) -> Option<Object>) -> Option<Event<Object>> {
    Some(match event {
        Event::Init => Event::Init,
        Event::InitDone => Event::InitDone,
        Event::InitApply(object) => Event::InitApply(convert(object)?),
        Event::Apply(object) => Event::Apply(convert(object)?),
        Event::Delete(object) => Event::Delete(convert(object)?),
    })
}
