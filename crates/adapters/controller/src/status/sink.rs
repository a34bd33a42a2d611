//! Writes DriverBuilds and Events to the API server.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use farrier_cluster::{Fence, kube::is_starting};
use futures::{StreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::{
    api::{apps::v1::DaemonSet, core::v1::ObjectReference, events::v1::Event},
    apimachinery::pkg::apis::meta::v1::MicroTime,
};
use kube::{
    Api, Client, Resource, ResourceExt,
    api::{DeleteParams, ListParams, ObjectMeta, Patch, PatchParams, PostParams, Preconditions},
    core::response::StatusDetails,
};
use oci::error_chain;
use serde_json::json;
use tokio::sync::Mutex;

use super::{DriverBuild, EventHistory, Regarding, StatusEvent, UnusedObjects, desired, events, writes};
use crate::live::{ReconcileView, StatusSink};

/// Maximum number of concurrent requests.
const MAX_CONCURRENT_REQUESTS: usize = 8;

/// Interval at which objects are listed again, to detect changes and deletions by other clients.
const RESYNC: SignedDuration = SignedDuration::from_hours(1);

/// Time before a failed list is retried.
const LIST_RETRY_DELAY: SignedDuration = SignedDuration::from_mins(5);

/// Maximum number of faults that are remembered as logged. Their texts come from the API server, so memory must be bounded.
const MAX_LOGGED_FAULTS: usize = 200;

/// Page size of a list.
const PAGE: u32 = 500;

/// Destination of the status, and the identity of its writer.
#[derive(Clone, Debug)]
pub struct StatusDestination {
    /// The namespace of the DriverBuilds.
    pub namespace: String,
    /// Field manager of server-side apply and reporter of Events: `farrier`, or `farrier-NAME`.
    pub manager: String,
    /// Name of this replica: the pod's name.
    pub instance: String,
}

/// Writes DriverBuilds and Events. A failed write never fails a reconcile: the failure is logged once, and the next reconcile
/// retries the write.
pub struct KubeStatus {
    client: Client,
    destination: StatusDestination,
    fence: Option<Arc<dyn Fence>>,
    state: Mutex<SinkState>,
    /// Whether `state` is stale and must be reset before its next use.
    is_stale: AtomicBool,
}

#[derive(Default)]
struct SinkState {
    /// Objects as last seen in or written to the API server.
    known: BTreeMap<String, DriverBuild>,
    /// Time of the next list. `None` before the first list.
    list_at: Option<Timestamp>,
    /// Whether the last list succeeded.
    listed: bool,
    unused_objects: UnusedObjects,
    event_history: Option<EventHistory>,
    /// Faults that were logged already.
    logged_faults: BTreeSet<String>,
}

impl KubeStatus {
    /// Creates a sink that writes to `destination` while `fence` allows writes.
    pub fn new(client: Client, destination: StatusDestination, fence: Option<Arc<dyn Fence>>) -> Self {
        Self { client, destination, fence, state: Mutex::default(), is_stale: AtomicBool::default() }
    }

    fn builds(&self) -> Api<DriverBuild> {
        Api::namespaced(self.client.clone(), &self.destination.namespace)
    }

    fn may_write(&self) -> bool {
        self.fence.as_ref().is_none_or(|fence| fence.closed_reason().is_none())
    }

    /// Lists the objects if the resync interval has passed or the clock was set back. Returns whether the objects are known.
    async fn list(&self, state: &mut SinkState, now: Timestamp) -> bool {
        if state.list_at.is_some_and(|next| now < next && next.duration_since(now) <= RESYNC) {
            return state.listed;
        }
        let mut known = BTreeMap::new();
        let mut params = ListParams::default().limit(PAGE);
        loop {
            match self.builds().list(&params).await {
                Ok(page) => {
                    known.extend(page.items.into_iter().map(|object| (object.name_any(), object)));
                    match page.metadata.continue_.filter(|next| !next.is_empty()) {
                        Some(next) => params = params.continue_token(&next),
                        None => break,
                    }
                }
                Err(error) => {
                    log_fault(state, "list DriverBuilds", &error);
                    if !is_starting(&error) {
                        (state.list_at, state.listed) = (Some(now + LIST_RETRY_DELAY), false);
                    }
                    return false;
                }
            }
        }
        (state.known, state.list_at, state.listed) = (known, Some(now + RESYNC), true);
        state.logged_faults.clear();
        true
    }

    async fn write_builds(&self, state: &mut SinkState, view: &ReconcileView) {
        let ReconcileView { plan, activity, configuration_error, now, .. } = view;
        let desired = desired(plan, activity, configuration_error.as_deref(), &state.known, *now);
        let names: BTreeSet<&str> =
            desired.iter().filter_map(|object| object.metadata.name.as_deref()).collect();
        let expired = state.unused_objects.expired(state.known.keys(), &names, *now);
        let super::Writes { objects, statuses, deletions } = writes(&desired, &state.known, &expired);
        let objects = objects.into_iter().map(|object| (object, true));
        let pending: Vec<_> = objects.chain(statuses.into_iter().map(|object| (object, false))).collect();
        let outcomes =
            stream::iter(pending)
                .map(|(object, with_spec)| async move {
                    (object.name_any(), self.write(&object, with_spec).await)
                })
                .buffer_unordered(MAX_CONCURRENT_REQUESTS)
                .collect::<Vec<_>>()
                .await;
        for (name, outcome) in outcomes {
            match outcome {
                Ok(Some(written)) => drop(state.known.insert(name, written)),
                Ok(None) => {}
                Err(error) => {
                    // Another client deleted the object. The next reconcile creates the object again.
                    if is_code(&error, 404) {
                        state.known.remove(&name);
                    }
                    log_fault(state, "write DriverBuilds", &error);
                }
            }
        }
        self.delete_builds(state, deletions).await;
    }

    async fn delete_builds(&self, state: &mut SinkState, names: Vec<String>) {
        for name in names {
            let Some(object) = state.known.get(&name).filter(|_| self.may_write()) else { continue };
            let uid = object.metadata.uid.clone();
            let preconditions = Some(Preconditions { uid, resource_version: None });
            let params = DeleteParams { preconditions, ..DeleteParams::default() };
            match self.builds().delete(&name, &params).await {
                Ok(_) => drop(state.known.remove(&name)),
                Err(error) if is_code(&error, 404) || is_code(&error, 409) => drop(state.known.remove(&name)),
                Err(error) => log_fault(state, "delete DriverBuilds", &error),
            }
        }
    }

    /// Writes one object and then its status, or the status alone. Returns `None` if the fence forbids writes.
    async fn write(&self, object: &DriverBuild, with_spec: bool) -> Result<Option<DriverBuild>, kube::Error> {
        let params = PatchParams::apply(&self.destination.manager).force();
        let name = object.name_any();
        let body_with = |metadata: serde_json::Value| {
            json!({
                "apiVersion": DriverBuild::api_version(&()), "kind": DriverBuild::kind(&()), "metadata": metadata,
            })
        };
        if with_spec {
            if !self.may_write() {
                return Ok(None);
            }
            let mut body = body_with(json!({"name": name, "labels": object.metadata.labels}));
            body["spec"] = json!(object.spec);
            self.builds().patch(&name, &params, &Patch::Apply(body)).await?;
        }
        if !self.may_write() {
            return Ok(None);
        }
        let mut body = body_with(json!({"name": name}));
        body["status"] = json!(object.status);
        self.builds().patch_status(&name, &params, &Patch::Apply(body)).await.map(Some)
    }

    async fn write_events(&self, state: &mut SinkState, view: &ReconcileView) {
        let (new_events, dropped, event_history) = events(state.event_history.as_ref(), view);
        state.event_history = Some(event_history);
        if dropped > 0 {
            tracing::info!(dropped, "one reconcile had more changes than farrier writes Events for");
        }
        for event in new_events {
            if !self.may_write() {
                return;
            }
            if let Err(error) = self.publish(state, &event, view.now).await {
                log_fault(state, "create Events", &error);
            }
        }
    }

    async fn publish(
        &self,
        state: &SinkState,
        event: &StatusEvent,
        now: Timestamp,
    ) -> Result<(), kube::Error> {
        let regarding = self.reference(state, &event.regarding).await;
        let namespace = regarding.namespace.clone().unwrap_or_else(|| "default".to_owned());
        let object: String = regarding.name.iter().flat_map(|name| name.chars()).take(200).collect();
        let (action, is_warning) = event.reason.action();
        let kind = if is_warning { "Warning" } else { "Normal" };
        let body = Event {
            metadata: ObjectMeta {
                name: Some(format!("{object}.{}", unique_suffix(event, now))),
                namespace: Some(namespace.clone()),
                ..ObjectMeta::default()
            },
            action: Some(action.to_owned()),
            event_time: Some(MicroTime(now)),
            note: Some(event.note.clone()),
            reason: Some(event.reason.to_string()),
            regarding: Some(regarding),
            reporting_controller: Some(self.destination.manager.clone()),
            reporting_instance: Some(self.destination.instance.chars().take(128).collect()),
            type_: Some(kind.to_owned()),
            ..Event::default()
        };
        let events: Api<Event> = Api::namespaced(self.client.clone(), &namespace);
        match events.create(&PostParams::default(), &body).await {
            // After a conflict the Event exists: an earlier request created it, and the response was lost.
            Err(error) if !is_code(&error, 409) => Err(error),
            _ => Ok(()),
        }
    }

    /// Returns a reference to the object. `kubectl describe` finds the object's Events by the uid in the reference.
    async fn reference(&self, state: &SinkState, regarding: &Regarding) -> ObjectReference {
        let (api_version, kind, namespace, name, uid) = match regarding {
            Regarding::DriverBuild(name) => {
                let uid = state.known.get(name).and_then(|object| object.metadata.uid.clone());
                let (version, kind) = (DriverBuild::api_version(&()), DriverBuild::kind(&()));
                (version.into_owned(), kind.into_owned(), Some(&*self.destination.namespace), &**name, uid)
            }
            // The kubelet uses the node's name as the uid. kubectl looks up the Events of a node by name and by uid.
            Regarding::Node(name) => ("v1".to_owned(), "Node".to_owned(), None, &**name, Some(name.clone())),
            Regarding::DaemonSet { namespace, name } => {
                let api: Api<DaemonSet> = Api::namespaced(self.client.clone(), namespace);
                let uid = api.get_metadata(name).await.ok().and_then(|object| object.metadata.uid);
                ("apps/v1".to_owned(), "DaemonSet".to_owned(), Some(&**namespace), &**name, uid)
            }
            Regarding::Resource { resource, name } => {
                let version = format!("{}/{}", resource.group(), resource.version());
                let (namespace, name) = name
                    .rsplit_once('/')
                    .map_or((None, &**name), |(namespace, name)| (Some(namespace), name));
                (version, resource.kind().to_owned(), namespace, name, None)
            }
        };
        ObjectReference {
            api_version: Some(api_version),
            kind: Some(kind),
            namespace: namespace.map(str::to_owned),
            name: Some(name.to_owned()),
            uid,
            ..ObjectReference::default()
        }
    }
}

#[async_trait::async_trait]
impl StatusSink for KubeStatus {
    async fn reconciled(&self, view: &ReconcileView) {
        if !self.may_write() {
            return;
        }
        let mut state = self.state.lock().await;
        if self.is_stale.swap(false, Ordering::SeqCst) {
            *state = SinkState::default();
        }
        if self.list(&mut state, view.now).await {
            self.write_builds(&mut state, view).await;
        }
        self.write_events(&mut state, view).await;
    }

    /// Resets the state at the next reconcile, because the current one may still use the state.
    fn forget(&self) {
        self.is_stale.store(true, Ordering::SeqCst);
    }
}

/// Returns a unique suffix for an Event's name: the time as in client-go, plus the reason.
fn unique_suffix(event: &StatusEvent, now: Timestamp) -> String {
    format!("{:x}{:02x}", now.as_nanosecond(), event.reason as u8)
}

fn is_code(error: &kube::Error, code: u16) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == code)
}

/// Returns the namespace whose absence made a request fail.
fn missing_namespace(error: &kube::Error) -> Option<&str> {
    let kube::Error::Api(status) = error else { return None };
    let is_namespace = |details: &&StatusDetails| status.code == 404 && details.kind == "namespaces";
    Some(&status.details.as_ref().filter(is_namespace)?.name)
}

/// Logs a fault once, with a hint.
fn log_fault(state: &mut SinkState, action: &str, error: &kube::Error) {
    if state.logged_faults.len() >= MAX_LOGGED_FAULTS {
        state.logged_faults.clear();
    }
    let message = error_chain(error);
    if is_starting(error) {
        tracing::debug!(action, error = message, "status write postponed");
        return;
    }
    if let Some(namespace) = missing_namespace(error) {
        if state.logged_faults.insert(format!("namespace {namespace}")) {
            let hint = "create the namespace, or correct the `rollout` of an image or farrier's own namespace; until then nothing \
                        is rolled out in it";
            tracing::warn!(namespace, hint, "there is no such namespace");
        }
        return;
    }
    let (key, hint) = match error {
        kube::Error::Api(status) if status.code == 403 => (
            format!("{action} 403"),
            "the ClusterRole or Role lacks this rule; apply the RBAC manifests that come with farrier",
        ),
        kube::Error::Api(status) if status.code == 404 && action == "list DriverBuilds" => {
            (format!("{action} 404"), "install the definition: farrier schema crd | kubectl apply -f -")
        }
        _ => (format!("{action} {message}"), "farrier retries automatically"),
    };
    if state.logged_faults.insert(key) {
        tracing::warn!(action, error = message, hint, "status cannot be written");
    }
}
