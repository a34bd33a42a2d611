//! Adapter: the watches that fill the store, one task each, started and stopped as the store needs them.
//!
//! kube-runtime's watcher lists in pages, then watches from the list's resource version, with bookmarks; it goes on
//! from there when the server ends the watch, and lists again after `410 Gone`.

use std::{
    collections::HashMap,
    fmt::Debug,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use futures::StreamExt;
use k8s_openapi::{ClusterResourceScope, NamespaceResourceScope};
use kube::{
    Api, Client, Resource,
    api::{ApiResource, GroupVersionKind},
    core::Status,
    runtime::{utils::Backoff, watcher},
};
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::{
    errors::causes,
    facts,
    objects::{NodeObject, PodObject, WholeObject},
    stats::KubeStats,
    store::{Event, Store, Target, Trouble, Update, WatchScope},
    words::{MissingRight, Scope, one_line},
};
use crate::image::OperatorResource;

/// Objects of one page of a list. With 20 KiB of status each, a page of nodes is 5 MB of text.
const PAGE: u32 = 250;

/// Verbs that reading takes.
const READ: &[&str] = &["get", "list", "watch"];

/// What the adapter's parts share.
pub(super) struct Shared {
    pub(super) client: Client,
    pub(super) stats: Arc<KubeStats>,
    /// Who farrier is to the API server, where it says so.
    pub(super) user: Option<String>,
    /// How often it is looked whether the API serves an operator's kind by now.
    pub(super) discovery_interval: Duration,
    store: Mutex<Store>,
    /// Rung when the needed watches or a snapshot may have become others; the value is the store's generation.
    bell: watch::Sender<u64>,
}

impl Shared {
    pub(super) fn new(
        client: Client,
        stats: Arc<KubeStats>,
        user: Option<String>,
        discovery_interval: Duration,
        store: Store,
    ) -> Self {
        let (bell, _) = watch::channel(0);
        Self { client, stats, user, discovery_interval, store: Mutex::new(store), bell }
    }

    /// The store. Never held over an await.
    pub(super) fn store(&self) -> MutexGuard<'_, Store> {
        self.store.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn listen(&self) -> watch::Receiver<u64> {
        self.bell.subscribe()
    }

    /// Tells all who listen.
    pub(super) fn ring(&self) {
        let generation = self.store().generation();
        self.bell.send_replace(generation);
    }

    fn event(&self, target: &Target, epoch: u64, event: Event) {
        let rings = self.store().event(target, epoch, event);
        if rings {
            self.ring();
        }
    }

    fn trouble(&self, target: &Target, epoch: u64, trouble: Trouble) {
        let rings = self.store().trouble(target, epoch, trouble);
        if rings {
            self.ring();
        }
    }
}

/// Keeps the watches running that the store needs, until cancelled.
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
            tokio::spawn(async move { token.run_until_cancelled(watch.run()).await });
        }
        tokio::select! {
            () = cancel.cancelled() => return,
            rung = bell.changed() => if rung.is_err() { return },
        }
    }
}

/// One watch.
struct Watch {
    shared: Arc<Shared>,
    target: Target,
    scope: WatchScope,
    epoch: u64,
}

/// How a watch ends, where it ends at all.
enum End {
    /// The list is to be made anew.
    Again,
    /// The API does not serve the kind (any more).
    Absent,
}

impl Watch {
    async fn run(self) {
        let client = self.shared.client.clone();
        match &self.target {
            Target::Nodes => {
                let convert = |node: NodeObject| Some(node.into_update());
                self.follow(all::<NodeObject>(client), convert).await;
            }
            Target::Pods { namespace, uid, .. } => {
                let convert =
                    |pod: PodObject| (pod.facts.daemon_set == *uid).then(|| Update::Pod(Box::new(pod.facts)));
                self.follow(namespaced::<PodObject>(client, namespace), convert).await;
            }
            Target::DaemonSets => {
                let kind = GroupVersionKind::gvk("apps", "v1", "DaemonSet");
                let resource = ApiResource::from_gvk_with_plural(&kind, "daemonsets");
                let convert = |object: WholeObject| match facts::daemon_set(object) {
                    Ok(facts) => Some(Update::DaemonSet(Box::new(facts))),
                    Err(error) => {
                        tracing::warn!(error, "DaemonSet is not of the API's form, passed over");
                        None
                    }
                };
                self.follow(Api::<WholeObject>::all_with(client, &resource), convert).await;
            }
            Target::Resources(kind) => self.follow_resources(*kind).await,
        }
    }

    /// Follows a kind that the API need not serve: it is looked for until it does.
    async fn follow_resources(&self, kind: OperatorResource) {
        let gvk = GroupVersionKind::gvk(kind.group(), kind.version(), kind.kind());
        let resource = ApiResource::from_gvk_with_plural(&gvk, kind.plural());
        loop {
            if let Some(false) = self.served(kind).await {
                self.shared.trouble(&self.target, self.epoch, Trouble::Absent);
                tokio::time::sleep(self.shared.discovery_interval).await;
                continue;
            }
            let api = Api::<WholeObject>::all_with(self.shared.client.clone(), &resource);
            let convert = |object: WholeObject| Some(Update::Resource(facts::resource(kind, object)));
            self.follow(api, convert).await;
            self.shared.trouble(&self.target, self.epoch, Trouble::Absent);
            tokio::time::sleep(self.shared.discovery_interval).await;
        }
    }

    /// Does the API serve this kind? `None` where it does not say; then the list will.
    async fn served(&self, kind: OperatorResource) -> Option<bool> {
        let group_version = format!("{}/{}", kind.group(), kind.version());
        match self.shared.client.list_api_group_resources(&group_version).await {
            Ok(list) => Some(list.resources.iter().any(|resource| resource.name == kind.plural())),
            Err(kube::Error::Api(status)) if status.code == 404 => Some(false),
            Err(_) => None,
        }
    }

    /// Follows a list; returns when the API does not serve the kind.
    async fn follow<K>(&self, api: Api<K>, convert: impl Fn(K) -> Option<Update>)
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut config = watcher::Config::default().page_size(PAGE);
        if let WatchScope::Selector(selector) = &self.scope {
            config = config.labels(selector);
        }
        let mut backoff = watcher::DefaultBackoff::default();
        let mut attempts = 0;
        loop {
            match self.stream(&api, &config, &convert, &mut backoff, &mut attempts).await {
                End::Again => {}
                End::Absent => return,
            }
        }
    }

    async fn stream<K>(
        &self,
        api: &Api<K>,
        config: &watcher::Config,
        convert: &impl Fn(K) -> Option<Update>,
        backoff: &mut watcher::DefaultBackoff,
        attempts: &mut u32,
    ) -> End
    where
        K: Resource + Clone + DeserializeOwned + Debug + Send + 'static,
    {
        let mut stream = pin!(watcher(api.clone(), config.clone()));
        while let Some(next) = stream.next().await {
            let error = match next {
                Ok(event) => {
                    // A list that only begins has not succeeded.
                    if !matches!(event, watcher::Event::Init) {
                        backoff.reset();
                        *attempts = 0;
                    }
                    if let Some(event) = translate(event, convert) {
                        self.shared.event(&self.target, self.epoch, event);
                    }
                    continue;
                }
                Err(error) => error,
            };
            *attempts += 1;
            let trouble = self.trouble(&error, *attempts);
            tracing::debug!(target = ?self.target, attempts, %error, "watch failed");
            let forbidden = matches!(trouble, Trouble::Forbidden(_));
            let absent = matches!(trouble, Trouble::Absent);
            if absent {
                return End::Absent;
            }
            self.shared.trouble(&self.target, self.epoch, trouble);
            let wait = backoff.next().unwrap_or_default().max(self.shared.stats.pause());
            tokio::time::sleep(wait).await;
            if forbidden {
                // A list tells when the right is there again; a watch that goes on would not.
                return End::Again;
            }
        }
        End::Again
    }

    fn trouble(&self, error: &watcher::Error, attempts: u32) -> Trouble {
        let verb = match error {
            watcher::Error::InitialListFailed(_) => "list",
            watcher::Error::WatchStartFailed(_)
            | watcher::Error::WatchError(_)
            | watcher::Error::WatchFailed(_)
            | watcher::Error::NoResourceVersion => "watch",
        };
        let reason = one_line(&causes(error));
        match status(error).map(|status| status.code) {
            Some(403) => Trouble::Forbidden(self.right(verb)),
            Some(401) => Trouble::Unauthorized { attempts, reason },
            Some(404) if matches!(self.target, Target::Resources(_)) => Trouble::Absent,
            _ => Trouble::Failing { attempts, reason },
        }
    }

    fn right(&self, verb: &'static str) -> MissingRight {
        let (group, resource, scope) = match &self.target {
            Target::Nodes => ("", "nodes", Scope::Cluster),
            Target::DaemonSets => ("apps", "daemonsets", Scope::AllNamespaces),
            Target::Pods { namespace, .. } => ("", "pods", Scope::Namespace(namespace.clone())),
            Target::Resources(kind) => (kind.group(), kind.plural(), Scope::Cluster),
        };
        MissingRight {
            user: self.shared.user.clone(),
            verb,
            group: group.to_owned(),
            resource: resource.to_owned(),
            scope,
            verbs: READ,
        }
    }
}

fn status(error: &watcher::Error) -> Option<&Status> {
    match error {
        watcher::Error::WatchError(status)
        | watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => Some(status),
        watcher::Error::InitialListFailed(_)
        | watcher::Error::WatchStartFailed(_)
        | watcher::Error::WatchFailed(_)
        | watcher::Error::NoResourceVersion => None,
    }
}

fn translate<K>(event: watcher::Event<K>, convert: &impl Fn(K) -> Option<Update>) -> Option<Event> {
    Some(match event {
        watcher::Event::Init => Event::Start,
        watcher::Event::InitDone => Event::Done,
        watcher::Event::InitApply(object) => Event::Listed(convert(object)?),
        watcher::Event::Apply(object) => Event::Changed(convert(object)?),
        watcher::Event::Delete(object) => Event::Deleted(convert(object)?),
    })
}

fn all<K: Resource<DynamicType = (), Scope = ClusterResourceScope>>(client: Client) -> Api<K> {
    Api::all(client)
}

fn namespaced<K>(client: Client, namespace: &str) -> Api<K>
where
    K: Resource<DynamicType = (), Scope = NamespaceResourceScope>,
{
    Api::namespaced(client, namespace)
}
