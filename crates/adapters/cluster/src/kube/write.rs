//! Applies the changes of a plan. Each write has the state that the plan saw as its precondition.
//!
//! The resource version of a DaemonSet or operator resource also changes with its status. Plans ignore the status, which changes
//! often during a rollout. The store remembers which versions are equivalent to the current one. A change that was planned from
//! any of these versions is applied to the current one.

use std::{collections::BTreeMap, time::Duration};

use farrier_core::plan::{
    COPY_OF_LABEL, Change, DaemonSetChange, DaemonSetCopy, DaemonSetRetirement, NodeChange, NodeCheck,
    NodeSeen, ObjectVersion, PodRestart, ResourceChange,
};
use k8s_openapi::api::{
    batch::v1::{CronJob, Job},
    core::v1::{Node, Pod},
};
use kube::{
    Api,
    api::{ApiResource, DeleteParams, DynamicObject, Patch, PatchParams, PostParams, Preconditions},
    core::Status,
};
use serde_json::Value;

use super::{
    super::error::{ApiError, ClusterError, MissingRight, Scope},
    bodies,
    facts::{self, PREFIX},
    forms::NodeObject,
    live::KubeCluster,
    object::{Facts, Key, Object, StoredObject},
    store::Store,
    target::Target,
};

/// How long a write waits for the watches to deliver its effect.
const ECHO: Duration = Duration::from_secs(1);
/// Maximum number of retries of a write because the status was written at the same time.
const RACES: u32 = 4;

pub(super) const PATCHED: &[&str] = &["get", "list", "watch", "patch"];
pub(super) const CHECK_VERBS: &[&str] = &["get", "list", "watch", "create"];
pub(super) const DAEMON_SET_VERBS: &[&str] = &["get", "list", "watch", "create", "patch", "delete"];

/// An object to write to.
struct Written {
    target: Target,
    key: Key,
    api: Api<DynamicObject>,
    right: MissingRight,
}

impl KubeCluster {
    pub(super) async fn write(&self, change: &Change) -> Result<(), ClusterError> {
        let (verb, written) = match change {
            Change::DaemonSet(change) => ("write", self.write_daemon_set(change).await),
            Change::Copy(change) => ("write", self.write_copy(change).await),
            Change::Retire(change) => ("delete", self.retire(change).await),
            Change::Restart(restart) => ("evict", self.evict(restart).await),
            Change::Node(change) => ("write", self.write_node(change).await),
            Change::Resource(change) => ("write", self.write_resource(change).await),
            Change::Check(check) => ("make", self.make_check(check).await),
        };
        written.map_err(|error| ClusterError::Api { action: format!("{verb} {}", change.object()), error })
    }

    async fn write_daemon_set(&self, change: &DaemonSetChange) -> Result<(), ApiError> {
        let DaemonSetChange { namespace, name, version, expected, .. } = change;
        let object = self.daemon_set("patch", namespace, name)?;
        let body = |kept: &StoredObject| {
            check_images(kept, expected)?;
            check_state(kept, version.as_ref())?;
            let Facts::DaemonSet(facts) = &kept.object.facts else { return Err(ApiError::Gone) };
            let live = facts.live.as_ref().ok_or(ApiError::Gone)?;
            bodies::daemon_set(change, live).map_err(ApiError::Unwritable)
        };
        self.apply_to_present(&object, body).await
    }

    async fn write_copy(&self, change: &DaemonSetCopy) -> Result<(), ApiError> {
        let DaemonSetCopy { namespace, name, version, .. } = change;
        let object = self.daemon_set("patch", namespace, name)?;
        if version.is_some() {
            let body = |kept: &StoredObject| {
                check_state(kept, version.as_ref())?;
                Ok(bodies::copy(change, Some(&kept.object.version)))
            };
            return self.apply_to_present(&object, body).await;
        }
        let mut races = 0;
        loop {
            // No plan has seen this object, so the API server is asked for it. An apply cannot require that no object exists.
            // Another client could create a DaemonSet of this name between the response and the write.
            let found = self.own_copy(&self.daemon_set("get", namespace, name)?).await?;
            match self.apply_fields(&object, &bodies::copy(change, found.as_ref())).await {
                Err(ApiError::Changed(_)) if races < RACES => races += 1,
                outcome => return outcome,
            }
        }
    }

    /// Returns the state of a DaemonSet that farrier created but has not seen since; `None` if it does not exist. A DaemonSet of
    /// another client is a conflict.
    async fn own_copy(&self, object: &Written) -> Result<Option<ObjectVersion>, ApiError> {
        let found = self.caller.call(&object.right, || object.api.get_opt(&object.key.1)).await?;
        let Some(DynamicObject { metadata, .. }) = found else { return Ok(None) };
        if metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(COPY_OF_LABEL)) {
            return Ok(Some(facts::version(&metadata)));
        }
        Err(ApiError::Changed("a DaemonSet with this name exists, but farrier did not create it".to_owned()))
    }

    async fn retire(&self, change: &DaemonSetRetirement) -> Result<(), ApiError> {
        let DaemonSetRetirement { namespace, name, version } = change;
        let object = self.daemon_set("delete", namespace, name)?;
        let written = &object;
        let delete = |present: ObjectVersion| async move {
            // The DaemonSet's pods are deleted in the background.
            let params = DeleteParams::background().preconditions(Preconditions {
                uid: Some(present.uid),
                resource_version: Some(present.resource_version),
            });
            self.caller.call(&written.right, || written.api.delete(name, &params)).await
        };
        let present = |kept: &StoredObject| {
            check_state(kept, Some(version))?;
            Ok(kept.object.version.clone())
        };
        match self.write_present(&object, present, delete).await {
            // The object is already deleted.
            Ok(_) | Err(ApiError::Gone) => {}
            Err(error) => return Err(error),
        }
        self.await_store(|store| {
            store.get(&object.target, &object.key).is_none_or(|kept| {
                let Facts::DaemonSet(facts) = &kept.object.facts else { return true };
                facts.live.as_ref().is_none_or(|live| live.deleting || live.version.uid != version.uid)
            })
        })
        .await;
        Ok(())
    }

    async fn evict(&self, restart: &PodRestart) -> Result<(), ApiError> {
        let PodRestart { namespace, name, uid, why: _, drained, grace_seconds: _ } = restart;
        check_names([namespace, name])?;
        // Users of the device run in any namespace. The definition requests their eviction, and the cluster's administrator
        // grants the permission.
        if !drained {
            self.check_namespace(namespace)?;
        }
        let mut right = self.right("create", &ApiResource::erase::<Pod>(&()), Some(namespace), &["create"]);
        right.resource.push_str("/eviction");
        let api: Api<Pod> = Api::namespaced(self.client(), namespace);
        let (params, body) = (PostParams::default(), bodies::eviction(restart));
        let evict = || api.create_subresource::<_, Status>("eviction", name, &params, &body);
        self.caller.call(&right, evict).await?;
        self.await_store(|store| store.pod_ends(uid)).await;
        Ok(())
    }

    /// Writes a node with a merge patch instead of an apply, because several parts of a plan write to the same node.
    async fn write_node(&self, change: &NodeChange) -> Result<(), ApiError> {
        let NodeChange { name, labels, annotations, cordon: _, seen } = change;
        check_names([name])?;
        if let Some(key) = labels.keys().chain(annotations.keys()).find(|key| !key.starts_with(PREFIX)) {
            return Err(ApiError::Unwritable(format!("{key:?} is not a key of farrier")));
        }
        let resource = ApiResource::erase::<Node>(&());
        let object = Written {
            target: Target::Nodes,
            key: (String::new(), name.clone()),
            api: Api::all_with(self.client(), &resource),
            right: self.right("patch", &resource, None, PATCHED),
        };
        let nodes: Api<NodeObject> = Api::all_with(self.client(), &resource);
        let (nodes, right, params) = (&nodes, &object.right, &PatchParams::apply(&self.manager));
        let write = |body: Value| async move {
            let patch = Patch::Merge(body);
            self.caller.call(right, || nodes.patch(name, params, &patch)).await
        };
        let node = match seen {
            None => write(bodies::node(change, None)).await?,
            Some(seen) => {
                let body = |kept: &StoredObject| {
                    check_node(kept, seen)?;
                    Ok(bodies::node(change, Some(&kept.object.version)))
                };
                self.write_present(&object, body, write).await?
            }
        };
        self.keep(&Target::Nodes, facts::node(node));
        Ok(())
    }

    /// Creates the Job of a check. A Job of the same name was created by a farrier that was killed, and is kept.
    async fn make_check(&self, check: &NodeCheck) -> Result<(), ApiError> {
        let NodeCheck { node, namespace, template, name, driver_pod: _ } = check;
        check_names([node, namespace, template, name])?;
        self.check_namespace(namespace)?;
        let right = self.right("get", &ApiResource::erase::<CronJob>(&()), Some(namespace), &["get"]);
        let templates: Api<CronJob> = Api::namespaced(self.client(), namespace);
        let found = self.caller.call(&right, || templates.get(template)).await;
        let found = found.map_err(|error| match error {
            // `Gone` would trigger a new plan, which would request the same CronJob.
            ApiError::Gone => ApiError::Unwritable(format!("there is no CronJob {template} in {namespace}")),
            other => other,
        })?;
        let job = bodies::check(check, found)
            .ok_or_else(|| ApiError::Unwritable(format!("CronJob {template} has no pod template")))?;
        let right = self.right("create", &ApiResource::erase::<Job>(&()), Some(namespace), CHECK_VERBS);
        let jobs: Api<Job> = Api::namespaced(self.client(), namespace);
        let params = PostParams::default();
        match self.caller.call(&right, || jobs.create(&params, &job)).await {
            Ok(_) | Err(ApiError::Changed(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn write_resource(&self, change: &ResourceChange) -> Result<(), ApiError> {
        let ResourceChange { kind, name, version, .. } = change;
        check_names([name])?;
        let target = Target::Resources(*kind);
        let resource = target.resource();
        let object = Written {
            key: (String::new(), name.clone()),
            api: Api::all_with(self.client(), &resource),
            right: self.right("patch", &resource, None, PATCHED),
            target,
        };
        let body = |kept: &StoredObject| {
            check_state(kept, Some(version))?;
            Ok(bodies::resource(change, &kept.object.version))
        };
        self.apply_to_present(&object, body).await
    }

    fn daemon_set(&self, verb: &'static str, namespace: &str, name: &str) -> Result<Written, ApiError> {
        check_names([namespace, name])?;
        self.check_namespace(namespace)?;
        let resource = Target::DaemonSets.resource();
        Ok(Written {
            target: Target::DaemonSets,
            key: (namespace.to_owned(), name.to_owned()),
            api: Api::namespaced_with(self.client(), namespace, &resource),
            right: self.right(verb, &resource, Some(namespace), DAEMON_SET_VERBS),
        })
    }

    /// Rejects other namespaces. Plans already hold such rollouts, so this catches changes that no plan has checked.
    fn check_namespace(&self, namespace: &str) -> Result<(), ApiError> {
        let writable = &self.shared.store().writable;
        if writable.contains(namespace) {
            return Ok(());
        }
        Err(ApiError::Unwritable(format!("farrier writes in {writable}, but not in {namespace}")))
    }

    pub(super) fn right(
        &self,
        verb: &'static str,
        resource: &ApiResource,
        namespace: Option<&str>,
        verbs: &'static [&'static str],
    ) -> MissingRight {
        let scope = namespace.map_or(Scope::Cluster, |namespace| Scope::Namespace(namespace.to_owned()));
        self.shared.right(verb, resource, scope, verbs)
    }

    /// Applies fields to an object in the store. `body` creates them for the current state, or returns why the plan is stale.
    async fn apply_to_present(
        &self,
        object: &Written,
        body: impl Fn(&StoredObject) -> Result<Value, ApiError>,
    ) -> Result<(), ApiError> {
        self.write_present(object, body, |body| async move { self.apply_fields(object, &body).await }).await
    }

    /// Writes to an object in the store. Retries if only the object's status was written at the same time.
    async fn write_present<B, T, F: Future<Output = Result<T, ApiError>>>(
        &self,
        object: &Written,
        prepare: impl Fn(&StoredObject) -> Result<B, ApiError>,
        write: impl Fn(B) -> F,
    ) -> Result<T, ApiError> {
        let Written { target, key, .. } = object;
        let mut races = 0;
        loop {
            let (present, body) = {
                let store = self.shared.store();
                let kept = store.get(target, key).ok_or(ApiError::Gone)?;
                (kept.object.version.clone(), prepare(kept)?)
            };
            let error = match write(body).await {
                Err(error @ ApiError::Changed(_)) if races < RACES => error,
                outcome => return outcome,
            };
            races += 1;
            let moved =
                |store: &Store| store.get(target, key).is_none_or(|kept| kept.object.version != present);
            if !self.await_store(moved).await {
                return Err(error);
            }
        }
    }

    async fn apply_fields(&self, object: &Written, body: &Value) -> Result<(), ApiError> {
        let Written { target, key, api, right } = object;
        // Force takes ownership of a field that another client has set. The plan has checked the field's value, and skips fields
        // that were changed back.
        let (params, patch) = (PatchParams::apply(&self.manager).force(), Patch::Apply(body));
        let answer = self.caller.call(right, || api.patch(&key.1, &params, &patch)).await?;
        let answer = match target {
            Target::Resources(kind) => facts::resource(*kind, answer),
            _ => facts::daemon_set(answer).map_err(|reason| {
                ApiError::Rejected(format!("the server's answer cannot be read: {reason}"))
            })?,
        };
        self.keep(target, answer);
        Ok(())
    }

    /// Stores the object that a write returned, so that the next snapshot contains it.
    fn keep(&self, target: &Target, object: Object) {
        self.shared.tell(|store| {
            store.put(target, object);
            true
        });
    }

    /// Waits briefly until `done` is true for the store. Returns whether it became true.
    async fn await_store(&self, done: impl Fn(&Store) -> bool) -> bool {
        let mut bell = self.shared.listen();
        let wait = async {
            while !done(&self.shared.store()) {
                if bell.changed().await.is_err() {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(ECHO, wait).await.unwrap_or(false)
    }
}

/// Checks that the object is in a state equivalent to the one that the plan saw.
fn check_state(kept: &StoredObject, seen: Option<&ObjectVersion>) -> Result<(), ApiError> {
    let reason = match seen {
        Some(seen) if seen.uid != kept.object.version.uid => "it was deleted and created again",
        Some(seen) if !kept.is_same(seen) => "another writer changed it",
        _ => return Ok(()),
    };
    Err(ApiError::Changed(reason.to_owned()))
}

/// Checks that a node's upgrade and cordon are as the plan saw them.
fn check_node(kept: &StoredObject, seen: &NodeSeen) -> Result<(), ApiError> {
    let Facts::Node(facts) = &kept.object.facts else { return Err(ApiError::Gone) };
    if NodeSeen::of(facts) == *seen {
        return Ok(());
    }
    Err(ApiError::Changed("another writer cordoned the node, or changed its upgrade".to_owned()))
}

/// Checks that a DaemonSet has the images that the plan saw.
fn check_images(kept: &StoredObject, expected: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let Facts::DaemonSet(facts) = &kept.object.facts else { return Ok(()) };
    for (name, expected) in expected {
        let found = facts.containers.iter().find(|container| container.name == *name);
        let found = found.map(|container| container.image.as_str()).unwrap_or_default();
        if found != expected {
            let reason = format!("container {name} has image {found:?}, but the plan expects {expected:?}");
            return Err(ApiError::Changed(reason));
        }
    }
    Ok(())
}

/// kube inserts names into the URL's path unescaped, so names with characters that have a meaning there are rejected (guarantee
/// 4).
fn check_names<'n>(
    names: impl IntoIterator<Item = &'n (impl AsRef<str> + ?Sized + 'n)>,
) -> Result<(), ApiError> {
    let plain = |name: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
        !name.is_empty() && name.bytes().all(known) && !name.starts_with('.')
    };
    match names.into_iter().map(AsRef::as_ref).find(|name| !plain(name)) {
        None => Ok(()),
        Some(name) => Err(ApiError::Unwritable(format!("{name:?} is not a valid object name"))),
    }
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
