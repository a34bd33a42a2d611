//! Applies the changes of a plan. The precondition of each write is the state that the plan saw.
//!
//! A status update also changes the resource version of a DaemonSet or operator resource, often many times during a rollout.
//! Plans ignore the status. The store therefore records the earlier versions that are equivalent to the current one. A change
//! that was planned from an equivalent version is applied to the current version.

use std::{collections::BTreeMap, time::Duration};

use farrier_core::plan::{
    COPY_OF_LABEL, Change, DaemonSetChange, DaemonSetCopy, DaemonSetFacts, DaemonSetRetirement, NodeAffinity,
    NodeChange, NodeCheck, NodePrecondition, ObjectVersion, PodRestart, ResourceChange,
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
    super::error::{ApiError, ClusterError, MissingPermission, PermissionScope},
    api_fields::NodeObject,
    bodies,
    facts::{self, PREFIX},
    live::KubeCluster,
    object::{Object, ObjectFacts, ObjectKey, StoredObject},
    store::Store,
    target::WatchTarget,
};

/// How long a write waits until the watches have delivered its effect.
const STORE_UPDATE_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum number of retries of a write after concurrent writes of the object's status.
const MAX_CONFLICT_RETRIES: u32 = 4;

pub(super) const PATCH_VERBS: &[&str] = &["get", "list", "watch", "patch"];
pub(super) const CHECK_VERBS: &[&str] = &["get", "list", "watch", "create"];
pub(super) const DAEMON_SET_VERBS: &[&str] = &["get", "list", "watch", "create", "patch", "delete"];

/// Object of a write, with the API and the permission that the write uses.
struct WriteTarget {
    target: WatchTarget,
    key: ObjectKey,
    api: Api<DynamicObject>,
    permission: MissingPermission,
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
            Change::Check(check) => ("create", self.create_check(check).await),
        };
        written.map_err(|error| ClusterError::Api { action: format!("{verb} {}", change.object()), error })
    }

    async fn write_daemon_set(&self, change: &DaemonSetChange) -> Result<(), ApiError> {
        let DaemonSetChange { namespace, name, version, expected, .. } = change;
        let object = self.daemon_set_target("patch", namespace, name)?;
        let body = |stored: &StoredObject| {
            check_images(stored, expected)?;
            check_state(stored, version.as_ref())?;
            let ObjectFacts::DaemonSet(facts) = &stored.object.facts else { return Err(ApiError::Gone) };
            let live = facts.live.as_ref().ok_or(ApiError::Gone)?;
            bodies::daemon_set(change, live).map_err(ApiError::Unwritable)
        };
        let Object { version, facts } = self.apply_to_stored(&object, body).await?;
        if change.affinity == Some(NodeAffinity::Any)
            && let ObjectFacts::DaemonSet(facts) = &facts
            && facts.placement.affinity != NodeAffinity::Any
        {
            self.remove_affinity(&object, &version).await?;
        }
        check_kept(&facts, |after| change.lost_field(after))
    }

    /// Removes the required node affinity from this version of a DaemonSet. An apply that omits the field removes it only if
    /// no other manager owns it.
    async fn remove_affinity(&self, object: &WriteTarget, version: &ObjectVersion) -> Result<(), ApiError> {
        let body = |stored: &StoredObject| {
            check_state(stored, Some(version))?;
            Ok(bodies::without_affinity(&stored.object.version))
        };
        let params = &PatchParams::apply(&self.shared.manager);
        let write = |body: Value| async move { self.patch(object, params, &Patch::Merge(&body)).await };
        self.write_stored(object, body, write).await.map(drop)
    }

    async fn write_copy(&self, change: &DaemonSetCopy) -> Result<(), ApiError> {
        let DaemonSetCopy { namespace, name, version, .. } = change;
        let object = self.daemon_set_target("patch", namespace, name)?;
        if version.is_some() {
            let body = |stored: &StoredObject| {
                check_state(stored, version.as_ref())?;
                Ok(bodies::copy(change, Some(&stored.object.version)))
            };
            let applied = self.apply_to_stored(&object, body).await?;
            return check_kept(&applied.facts, |after| change.lost_field(after));
        }
        let mut conflicts = 0;
        loop {
            // The store does not contain this object yet, so read it from the API server. An apply cannot require that no object
            // exists: between the read and the write, another client could still create a DaemonSet of this name.
            let existing = self.own_copy(&self.daemon_set_target("get", namespace, name)?).await?;
            match self.apply_fields(&object, &bodies::copy(change, existing.as_ref())).await {
                Err(ApiError::Changed(_)) if conflicts < MAX_CONFLICT_RETRIES => conflicts += 1,
                outcome => return check_kept(&outcome?.facts, |after| change.lost_field(after)),
            }
        }
    }

    /// Returns the version of a copy that farrier created but whose watch event has not arrived, or `None` if no DaemonSet has
    /// this name. A DaemonSet of another client is a conflict.
    async fn own_copy(&self, object: &WriteTarget) -> Result<Option<ObjectVersion>, ApiError> {
        let daemon_set = self.caller.call(&object.permission, || object.api.get_opt(&object.key.1)).await?;
        let Some(DynamicObject { metadata, .. }) = daemon_set else { return Ok(None) };
        if metadata.labels.as_ref().is_some_and(|labels| labels.contains_key(COPY_OF_LABEL)) {
            return Ok(Some(facts::version(&metadata)));
        }
        Err(ApiError::Changed("a DaemonSet with this name exists, but farrier did not create it".to_owned()))
    }

    async fn retire(&self, change: &DaemonSetRetirement) -> Result<(), ApiError> {
        let DaemonSetRetirement { namespace, name, version } = change;
        let object = self.daemon_set_target("delete", namespace, name)?;
        let WriteTarget { target, key, api, permission } = &object;
        let delete = |current: ObjectVersion| async move {
            // The DaemonSet's pods are deleted in the background.
            let params = DeleteParams::background().preconditions(Preconditions {
                uid: Some(current.uid),
                resource_version: Some(current.resource_version),
            });
            self.caller.call(permission, || api.delete(name, &params)).await
        };
        let current = |stored: &StoredObject| {
            check_state(stored, Some(version))?;
            Ok(stored.object.version.clone())
        };
        match self.write_stored(&object, current, delete).await {
            // The object is already deleted.
            Ok(_) | Err(ApiError::Gone) => {}
            Err(error) => return Err(error),
        }
        self.await_store(|store| {
            store.get(target, key).is_none_or(|stored| {
                let ObjectFacts::DaemonSet(facts) = &stored.object.facts else { return true };
                facts.live.as_ref().is_none_or(|live| live.deleting || live.version.uid != version.uid)
            })
        })
        .await;
        Ok(())
    }

    async fn evict(&self, restart: &PodRestart) -> Result<(), ApiError> {
        let PodRestart { namespace, name, uid, why: _, drained, grace_seconds: _ } = restart;
        check_names([namespace, name])?;
        // A drain evicts pods in any namespace: the definition asks for it, and the cluster's administrator grants the
        // permission.
        if !drained {
            self.check_namespace(namespace)?;
        }
        let mut permission =
            self.permission("create", &ApiResource::erase::<Pod>(&()), Some(namespace), &["create"]);
        permission.resource.push_str("/eviction");
        let api: Api<Pod> = Api::namespaced(self.client(), namespace);
        let (params, body) = (PostParams::default(), bodies::eviction(restart));
        let evict = || api.create_subresource::<_, Status>("eviction", name, &params, &body);
        self.caller.call(&permission, evict).await?;
        self.await_store(|store| store.pod_has_ended(uid)).await;
        Ok(())
    }

    /// Writes a node with a merge patch. An apply would remove the fields that other parts of a plan wrote to the same node.
    async fn write_node(&self, change: &NodeChange) -> Result<(), ApiError> {
        let NodeChange { name, labels, annotations, cordon: _, untaint, precondition } = change;
        check_names([name])?;
        if let Some(key) = labels.keys().chain(annotations.keys()).find(|key| !key.starts_with(PREFIX)) {
            return Err(ApiError::Unwritable(format!("{key:?} does not start with {PREFIX}")));
        }
        let resource = ApiResource::erase::<Node>(&());
        let object = WriteTarget {
            target: WatchTarget::Nodes,
            key: (String::new(), name.clone()),
            api: Api::all_with(self.client(), &resource),
            permission: self.permission("patch", &resource, None, PATCH_VERBS),
        };
        let nodes: Api<NodeObject> = Api::all_with(self.client(), &resource);
        let (nodes, permission, params) =
            (&nodes, &object.permission, &PatchParams::apply(&self.shared.manager));
        let write = |body: Value| async move {
            let patch = Patch::Merge(body);
            self.caller.call(permission, || nodes.patch(name, params, &patch)).await
        };
        let node = match (untaint, precondition) {
            (Some(untaint), _) => {
                // The store has no complete taints, and a merge patch replaces the whole list.
                let current = self.caller.call(permission, || object.api.get(name)).await?;
                if current.metadata.creation_timestamp.as_ref().map(|time| time.0) != untaint.created {
                    return Err(ApiError::Changed("another node has this name now".to_owned()));
                }
                let Some(body) = bodies::untaint(&current, untaint) else { return Ok(()) };
                write(body).await?
            }
            (None, None) => write(bodies::node(change, None)).await?,
            (None, Some(precondition)) => {
                let body = |stored: &StoredObject| {
                    check_node(stored, precondition)?;
                    Ok(bodies::node(change, Some(&stored.object.version)))
                };
                self.write_stored(&object, body, write).await?
            }
        };
        self.store_response(&WatchTarget::Nodes, facts::node(node));
        Ok(())
    }

    /// Creates the Job of a check. If the Job exists already, an earlier farrier process created it before it was killed.
    async fn create_check(&self, check: &NodeCheck) -> Result<(), ApiError> {
        let NodeCheck { node, namespace, template, name, driver_pod: _ } = check;
        check_names([node, namespace, template, name])?;
        self.check_namespace(namespace)?;
        let permission =
            self.permission("get", &ApiResource::erase::<CronJob>(&()), Some(namespace), &["get"]);
        let templates: Api<CronJob> = Api::namespaced(self.client(), namespace);
        let cron_job = self.caller.call(&permission, || templates.get(template)).await;
        let cron_job = cron_job.map_err(|error| match error {
            // `Gone` would trigger a new plan, which would request the same CronJob.
            ApiError::Gone => ApiError::Unwritable(format!("there is no CronJob {template} in {namespace}")),
            other => other,
        })?;
        let job = bodies::check(check, cron_job)
            .ok_or_else(|| ApiError::Unwritable(format!("CronJob {template} has no pod template")))?;
        let permission =
            self.permission("create", &ApiResource::erase::<Job>(&()), Some(namespace), CHECK_VERBS);
        let jobs: Api<Job> = Api::namespaced(self.client(), namespace);
        let params = PostParams::default();
        match self.caller.call(&permission, || jobs.create(&params, &job)).await {
            Ok(_) | Err(ApiError::Changed(_)) => Ok(()),
            Err(error) => Err(error),
        }
    }

    async fn write_resource(&self, change: &ResourceChange) -> Result<(), ApiError> {
        let ResourceChange { kind, name, version, .. } = change;
        let (namespace, name) =
            name.rsplit_once('/').map_or((None, &**name), |(namespace, name)| (Some(namespace), name));
        check_names(namespace.into_iter().chain([name]))?;
        let target = WatchTarget::Resources(*kind);
        let resource = target.resource();
        let api = match namespace {
            Some(namespace) => {
                self.check_namespace(namespace)?;
                Api::namespaced_with(self.client(), namespace, &resource)
            }
            None => Api::all_with(self.client(), &resource),
        };
        let object = WriteTarget {
            key: (namespace.unwrap_or_default().to_owned(), name.to_owned()),
            api,
            permission: self.permission("patch", &resource, namespace, PATCH_VERBS),
            target,
        };
        let body = |stored: &StoredObject| {
            check_state(stored, version.as_ref())?;
            Ok(bodies::resource(change, &stored.object.version))
        };
        self.apply_to_stored(&object, body).await.map(drop)
    }

    fn daemon_set_target(
        &self,
        verb: &'static str,
        namespace: &str,
        name: &str,
    ) -> Result<WriteTarget, ApiError> {
        check_names([namespace, name])?;
        self.check_namespace(namespace)?;
        let resource = WatchTarget::DaemonSets.resource();
        Ok(WriteTarget {
            target: WatchTarget::DaemonSets,
            key: (namespace.to_owned(), name.to_owned()),
            api: Api::namespaced_with(self.client(), namespace, &resource),
            permission: self.permission(verb, &resource, Some(namespace), DAEMON_SET_VERBS),
        })
    }

    /// Rejects a namespace in which farrier may not write. Plans already hold the rollouts of such a namespace. This check covers
    /// changes that no plan has checked.
    fn check_namespace(&self, namespace: &str) -> Result<(), ApiError> {
        let writable = &self.shared.store().writable;
        if writable.contains(namespace) {
            return Ok(());
        }
        Err(ApiError::Unwritable(format!("farrier writes in {writable}, but not in {namespace}")))
    }

    pub(super) fn permission(
        &self,
        verb: &'static str,
        resource: &ApiResource,
        namespace: Option<&str>,
        verbs: &'static [&'static str],
    ) -> MissingPermission {
        let scope = namespace
            .map_or(PermissionScope::Cluster, |namespace| PermissionScope::Namespace(namespace.to_owned()));
        self.shared.permission(verb, resource, scope, verbs)
    }

    /// Applies fields to an object in the store. `body` returns the fields for the object's current state, or why the plan is
    /// stale. Returns the object's new state.
    async fn apply_to_stored(
        &self,
        object: &WriteTarget,
        body: impl Fn(&StoredObject) -> Result<Value, ApiError>,
    ) -> Result<Object, ApiError> {
        self.write_stored(object, body, |body| async move { self.apply_fields(object, &body).await }).await
    }

    /// Writes to an object in the store. Retries after a conflict if another client changed only the object's status. `prepare`
    /// returns the body for the object's current state, or why the plan is stale.
    async fn write_stored<B, T, F: Future<Output = Result<T, ApiError>>>(
        &self,
        object: &WriteTarget,
        prepare: impl Fn(&StoredObject) -> Result<B, ApiError>,
        write: impl Fn(B) -> F,
    ) -> Result<T, ApiError> {
        let WriteTarget { target, key, .. } = object;
        let mut conflicts = 0;
        loop {
            let (current, body) = {
                let store = self.shared.store();
                let stored = store.get(target, key).ok_or(ApiError::Gone)?;
                (stored.object.version.clone(), prepare(stored)?)
            };
            let error = match write(body).await {
                Err(error @ ApiError::Changed(_)) if conflicts < MAX_CONFLICT_RETRIES => error,
                outcome => return outcome,
            };
            conflicts += 1;
            let has_new_version =
                |store: &Store| store.get(target, key).is_none_or(|stored| stored.object.version != current);
            if !self.await_store(has_new_version).await {
                return Err(error);
            }
        }
    }

    async fn apply_fields(&self, object: &WriteTarget, body: &Value) -> Result<Object, ApiError> {
        // Force takes ownership of a field that another client has set. This is safe: the plan has checked the field's value, and
        // holds the rollout if another client changed the value back.
        let params = PatchParams::apply(&self.shared.manager).force();
        self.patch(object, &params, &Patch::Apply(body)).await
    }

    async fn patch(
        &self,
        object: &WriteTarget,
        params: &PatchParams,
        patch: &Patch<&Value>,
    ) -> Result<Object, ApiError> {
        let WriteTarget { target, key, api, permission } = object;
        let response = self.caller.call(permission, || api.patch(&key.1, params, patch)).await?;
        let object = match target {
            WatchTarget::Resources(kind) => facts::resource(*kind, response, &self.shared.manager),
            _ => facts::daemon_set(response, &self.shared.manager).map_err(|reason| {
                ApiError::Rejected(format!("the server's answer cannot be read: {reason}"))
            })?,
        };
        self.store_response(target, object.clone());
        Ok(object)
    }

    /// Stores the object that a write returned, so that the next snapshot contains it.
    fn store_response(&self, target: &WatchTarget, object: Object) {
        self.shared.update_store(|store| {
            store.put(target, object);
            true
        });
    }

    /// Waits briefly until `done` is true for the store. Returns whether it became true.
    async fn await_store(&self, done: impl Fn(&Store) -> bool) -> bool {
        let mut changes = self.shared.subscribe_changes();
        let wait = async {
            while !done(&self.shared.store()) {
                if changes.changed().await.is_err() {
                    return false;
                }
            }
            true
        };
        tokio::time::timeout(STORE_UPDATE_TIMEOUT, wait).await.unwrap_or(false)
    }
}

/// Checks that a DaemonSet in the API server's answer has all fields that the write set.
fn check_kept(
    facts: &ObjectFacts,
    lost_field: impl Fn(&DaemonSetFacts) -> Option<String>,
) -> Result<(), ApiError> {
    let ObjectFacts::DaemonSet(facts) = facts else { return Ok(()) };
    lost_field(facts).map_or(Ok(()), |field| Err(ApiError::NotKept(field)))
}

/// Checks that the object's current version is equivalent to the version that the plan saw.
fn check_state(stored: &StoredObject, planned: Option<&ObjectVersion>) -> Result<(), ApiError> {
    let reason = match planned {
        Some(planned) if planned.uid != stored.object.version.uid => "it was deleted and created again",
        Some(planned) if !stored.is_equivalent_version(planned) => "another writer changed it",
        _ => return Ok(()),
    };
    Err(ApiError::Changed(reason.to_owned()))
}

/// Checks that a node's upgrade and cordon are as the plan saw them.
fn check_node(stored: &StoredObject, precondition: &NodePrecondition) -> Result<(), ApiError> {
    let ObjectFacts::Node(facts) = &stored.object.facts else { return Err(ApiError::Gone) };
    if NodePrecondition::of(facts) == *precondition {
        return Ok(());
    }
    Err(ApiError::Changed("another writer cordoned the node, or changed its upgrade".to_owned()))
}

/// Checks that a DaemonSet has the images that the plan saw.
fn check_images(stored: &StoredObject, expected: &BTreeMap<String, String>) -> Result<(), ApiError> {
    let ObjectFacts::DaemonSet(facts) = &stored.object.facts else { return Ok(()) };
    for (name, expected) in expected {
        let container = facts.containers.iter().find(|container| container.name == *name);
        let image = container.map(|container| container.image.as_str()).unwrap_or_default();
        if image != expected {
            let reason = format!("container {name} has image {image:?}, but the plan expects {expected:?}");
            return Err(ApiError::Changed(reason));
        }
    }
    Ok(())
}

/// Rejects names with characters that have a meaning in URLs, because kube inserts names into the path unescaped.
fn check_names<'n>(
    names: impl IntoIterator<Item = &'n (impl AsRef<str> + ?Sized + 'n)>,
) -> Result<(), ApiError> {
    match names.into_iter().map(AsRef::as_ref).find(|name| !is_safe_in_path(name)) {
        None => Ok(()),
        Some(name) => Err(ApiError::Unwritable(format!("{name:?} is not a valid object name"))),
    }
}

fn is_safe_in_path(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
    !name.is_empty() && name.bytes().all(is_plain) && !name.starts_with('.')
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
