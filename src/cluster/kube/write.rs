//! Adapter: makes the changes that a plan asks for, each with the state that the plan saw as its precondition.
//!
//! A DaemonSet's or resource's resource version also changes with its status, which no plan looks at, and often
//! while it is rolled out. The store remembers which versions are like the present one; a change that was planned
//! from any of those is made to the present one.

use std::{collections::BTreeMap, time::Duration};

use http::Method;
use serde_json::Value;

use super::{
    super::ClusterError,
    KubeCluster, bodies,
    call::Call,
    facts,
    objects::{NodeObject, PREFIX, WholeObject},
    store::{Store, Update},
    words::{MissingRight, Scope},
};
use crate::plan::{
    Change, DaemonSetChange, DaemonSetCopy, DaemonSetRetirement, LiveDaemonSet, NodeChange, ObjectVersion,
    PodRestart, ResourceChange,
};

const APPLY: &str = "application/apply-patch+yaml";
const MERGE: &str = "application/merge-patch+json";
const JSON: &str = "application/json";
/// Whose fields they are in `managedFields`. Force takes over a field that somebody else has set: the plan has
/// looked at its value, and leaves alone what was changed back.
const MANAGED: &str = "fieldManager=farrier&force=true";

/// How long a write waits until the watches have brought what it did.
const ECHO: Duration = Duration::from_secs(1);
/// How often a write is made anew because a status was written at the same time.
const RACES: u32 = 4;

impl KubeCluster {
    pub(super) async fn write(&self, change: &Change) -> Result<(), ClusterError> {
        match change {
            Change::DaemonSet(change) => self.write_daemon_set(change).await,
            Change::Copy(change) => self.write_copy(change).await,
            Change::Retire(change) => self.retire(change).await,
            Change::Restart(restart) => self.evict(restart).await,
            Change::Node(change) => self.write_node(change).await,
            Change::Resource(change) => self.write_resource(change).await,
        }
    }

    async fn write_daemon_set(&self, change: &DaemonSetChange) -> Result<(), ClusterError> {
        let DaemonSetChange { namespace, name, version, expected, .. } = change;
        let action = format!("write DaemonSet {namespace}/{name}");
        let path = format!("{}?{MANAGED}", daemon_set_path(&action, namespace, name)?);
        let object = self
            .write_present(namespace, name, |store| {
                let live = present(store, &action, namespace, name, version.as_ref(), Some(expected))?;
                let body = bodies::daemon_set(change, live).map_err(|reason| ClusterError::Refused {
                    object: format!("DaemonSet {namespace}/{name}"),
                    reason,
                })?;
                let right = daemon_sets("patch", namespace);
                Ok((self.apply_call(&action, path.clone(), body, right), live.version.clone()))
            })
            .await?;
        self.keep_daemon_set(object)
    }

    async fn write_copy(&self, change: &DaemonSetCopy) -> Result<(), ClusterError> {
        let DaemonSetCopy { namespace, name, version, .. } = change;
        let action = format!("write DaemonSet {namespace}/{name}");
        let path = daemon_set_path(&action, namespace, name)?;
        let call = |version: Option<&ObjectVersion>| {
            let right = daemon_sets("patch", namespace);
            self.apply_call(&action, format!("{path}?{MANAGED}"), bodies::copy(change, version), right)
        };
        if version.is_some() {
            let prepare = |store: &Store| {
                let live = present(store, &action, namespace, name, version.as_ref(), None)?;
                Ok((call(Some(&live.version)), live.version.clone()))
            };
            return self.keep_daemon_set(self.write_present(namespace, name, prepare).await?);
        }
        let mut races = 0;
        loop {
            // Seen by no plan yet: the API server is asked what has this name. An apply cannot demand that there is
            // nothing; between this answer and the write somebody could make a DaemonSet of this very name.
            let found = self.copy_of_ours(&action, &path, namespace).await?;
            match self.caller.call(&call(found.as_ref())).await {
                Err(ClusterError::Changed { .. }) if races < RACES => races += 1,
                answer => return self.keep_daemon_set(answer?),
            }
        }
    }

    /// Writes to a DaemonSet that the store knows, again where only its status was written at the same time.
    /// `prepare` makes the call for the present state, or says why the plan's is out of date.
    async fn write_present(
        &self,
        namespace: &str,
        name: &str,
        prepare: impl Fn(&Store) -> Result<(Call, ObjectVersion), ClusterError>,
    ) -> Result<Value, ClusterError> {
        let mut races = 0;
        loop {
            let (call, used) = prepare(&self.shared.store())?;
            let error = match self.caller.call(&call).await {
                Err(error @ ClusterError::Changed { .. }) if races < RACES => error,
                answer => return answer,
            };
            races += 1;
            let moved = |store: &Store| {
                store.daemon_set(namespace, name).is_none_or(|(_, live)| live.version != used)
            };
            if !self.await_store(moved).await {
                return Err(error);
            }
        }
    }

    /// The state of a DaemonSet that farrier made before and has not seen since; `None` where there is none. One that
    /// somebody else made is a conflict.
    async fn copy_of_ours(
        &self,
        action: &str,
        path: &str,
        namespace: &str,
    ) -> Result<Option<ObjectVersion>, ClusterError> {
        let call = Call {
            action: action.to_owned(),
            method: Method::GET,
            path: path.to_owned(),
            content_type: JSON,
            body: Value::Null,
            right: self.known(daemon_sets("get", namespace)),
        };
        match self.caller.call(&call).await {
            Ok(object) if object["metadata"]["labels"].get(crate::plan::COPY_OF_LABEL).is_some() => {
                Ok(Some(WholeObject::new(object).version))
            }
            Ok(_) => Err(ClusterError::Changed {
                action: action.to_owned(),
                reason: "there is a DaemonSet of this name, and farrier did not make it".to_owned(),
            }),
            Err(ClusterError::Gone { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    async fn retire(&self, change: &DaemonSetRetirement) -> Result<(), ClusterError> {
        let DaemonSetRetirement { namespace, name, version } = change;
        let action = format!("delete DaemonSet {namespace}/{name}");
        let path = daemon_set_path(&action, namespace, name)?;
        let prepare = |store: &Store| {
            let live = present(store, &action, namespace, name, Some(version), None)?;
            let call = Call {
                action: action.clone(),
                method: Method::DELETE,
                path: path.clone(),
                content_type: JSON,
                body: bodies::retirement(&live.version),
                right: self.known(daemon_sets("delete", namespace)),
            };
            Ok((call, live.version.clone()))
        };
        match self.write_present(namespace, name, prepare).await {
            // Gone is what was wanted.
            Ok(_) | Err(ClusterError::Gone { .. }) => {}
            Err(error) => return Err(error),
        }
        self.await_store(|store| {
            store
                .daemon_set(namespace, name)
                .is_none_or(|(_, live)| live.deleting || live.version.uid != version.uid)
        })
        .await;
        Ok(())
    }

    async fn evict(&self, restart: &PodRestart) -> Result<(), ClusterError> {
        let PodRestart { namespace, name, uid, why: _ } = restart;
        let action = format!("evict pod {namespace}/{name}");
        check_names(&action, [namespace, name])?;
        let call = Call {
            action,
            method: Method::POST,
            path: format!("/api/v1/namespaces/{namespace}/pods/{name}/eviction"),
            content_type: JSON,
            body: bodies::eviction(restart),
            right: self.known(MissingRight {
                user: None,
                verb: "create",
                group: String::new(),
                resource: "pods/eviction".to_owned(),
                scope: Scope::Namespace(namespace.clone()),
                verbs: &["create"],
            }),
        };
        self.caller.call(&call).await?;
        self.await_store(|store| store.pod_ends(uid)).await;
        Ok(())
    }

    async fn write_node(&self, change: &NodeChange) -> Result<(), ClusterError> {
        let NodeChange { name, labels, annotations } = change;
        let action = format!("write node {name}");
        check_names(&action, [name])?;
        if let Some(key) = labels.keys().chain(annotations.keys()).find(|key| !key.starts_with(PREFIX)) {
            let reason = format!("{key:?} is not farrier's");
            return Err(ClusterError::Refused { object: format!("node {name}"), reason });
        }
        let call = Call {
            action: action.clone(),
            method: Method::PATCH,
            path: format!("/api/v1/nodes/{name}?fieldManager=farrier"),
            content_type: MERGE,
            body: bodies::node(change),
            right: self.known(MissingRight {
                user: None,
                verb: "patch",
                group: String::new(),
                resource: "nodes".to_owned(),
                scope: Scope::Cluster,
                verbs: &["get", "list", "watch", "patch"],
            }),
        };
        let object = self.caller.call(&call).await?;
        let node: NodeObject = serde_json::from_value(object).map_err(|error| ClusterError::Rejected {
            action,
            reason: format!("its answer is no Node: {error}"),
        })?;
        self.keep(node.into_update());
        Ok(())
    }

    async fn write_resource(&self, change: &ResourceChange) -> Result<(), ClusterError> {
        let ResourceChange { kind, name, version, .. } = change;
        let action = format!("write {kind} {name}");
        check_names(&action, [name])?;
        let path = format!("/apis/{}/{}/{}/{name}?{MANAGED}", kind.group(), kind.version(), kind.plural());
        let mut races = 0;
        loop {
            let present = {
                let store = self.shared.store();
                let Some((facts, same)) = store.resource(*kind, name, version) else {
                    return Err(ClusterError::Gone { action });
                };
                if !same {
                    return Err(ClusterError::Changed {
                        action,
                        reason: "its spec or annotations differ".to_owned(),
                    });
                }
                facts.version.clone()
            };
            let right = MissingRight {
                user: None,
                verb: "patch",
                group: kind.group().to_owned(),
                resource: kind.plural().to_owned(),
                scope: Scope::Cluster,
                verbs: &["get", "list", "watch", "patch"],
            };
            let call = self.apply_call(&action, path.clone(), bodies::resource(change, &present), right);
            match self.caller.call(&call).await {
                Ok(object) => {
                    self.keep(Update::Resource(facts::resource(*kind, WholeObject::new(object))));
                    return Ok(());
                }
                Err(error @ ClusterError::Changed { .. }) if races < RACES => {
                    races += 1;
                    let moved = |store: &Store| {
                        store.resource(*kind, name, version).is_none_or(|(facts, _)| facts.version != present)
                    };
                    if !self.await_store(moved).await {
                        return Err(error);
                    }
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn apply_call(&self, action: &str, path: String, body: Value, right: MissingRight) -> Call {
        Call {
            action: action.to_owned(),
            method: Method::PATCH,
            path,
            content_type: APPLY,
            body,
            right: self.known(right),
        }
    }

    /// A right, with who lacks it.
    fn known(&self, right: MissingRight) -> MissingRight {
        MissingRight { user: self.shared.user.clone(), ..right }
    }

    fn keep_daemon_set(&self, object: Value) -> Result<(), ClusterError> {
        let object = WholeObject::new(object);
        let action = format!("write DaemonSet {}", object.name());
        let facts = facts::daemon_set(object)
            .map_err(|reason| ClusterError::Rejected { action, reason: format!("its answer: {reason}") })?;
        self.keep(Update::DaemonSet(Box::new(facts)));
        Ok(())
    }

    /// What a write returned is known at once, so that the next snapshot has it.
    fn keep(&self, update: Update) {
        self.shared.store().put(update, false);
        self.shared.ring();
    }

    /// Waits a little until the store is as it should be; says whether it is.
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

/// The present state of a DaemonSet, where it is what the plan saw.
fn present<'s>(
    store: &'s Store,
    action: &str,
    namespace: &str,
    name: &str,
    version: Option<&ObjectVersion>,
    expected: Option<&BTreeMap<String, String>>,
) -> Result<&'s LiveDaemonSet, ClusterError> {
    let action = || action.to_owned();
    let Some((facts, live)) = store.daemon_set(namespace, name) else {
        return Err(ClusterError::Gone { action: action() });
    };
    if version.is_some_and(|version| version.uid != live.version.uid) {
        let reason = "it was deleted and made anew".to_owned();
        return Err(ClusterError::Changed { action: action(), reason });
    }
    for (container, expected) in expected.into_iter().flatten() {
        let found = facts.containers.iter().find(|known| known.name == *container);
        let found = found.map(|container| container.image.as_str()).unwrap_or_default();
        if found != expected {
            return Err(ClusterError::Conflict {
                object: format!("DaemonSet {namespace}/{name}, container {container}"),
                expected: expected.clone(),
                found: found.to_owned(),
            });
        }
    }
    if version.is_some_and(|version| !store.is_same_daemon_set(namespace, name, version)) {
        let reason = "another writer changed it".to_owned();
        return Err(ClusterError::Changed { action: action(), reason });
    }
    Ok(live)
}

fn daemon_sets(verb: &'static str, namespace: &str) -> MissingRight {
    MissingRight {
        user: None,
        verb,
        group: "apps".to_owned(),
        resource: "daemonsets".to_owned(),
        scope: Scope::Namespace(namespace.to_owned()),
        verbs: &["get", "list", "watch", "create", "patch", "delete"],
    }
}

fn daemon_set_path(action: &str, namespace: &str, name: &str) -> Result<String, ClusterError> {
    check_names(action, [namespace, name])?;
    Ok(format!("/apis/apps/v1/namespaces/{namespace}/daemonsets/{name}"))
}

/// Names go into a path: nothing that means something there may be in one (guarantee 4).
fn check_names<'n>(
    action: &str,
    names: impl IntoIterator<Item = &'n (impl AsRef<str> + ?Sized + 'n)>,
) -> Result<(), ClusterError> {
    let plain = |name: &str| {
        let known = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'.');
        !name.is_empty() && name.bytes().all(known) && !name.starts_with('.')
    };
    match names.into_iter().map(AsRef::as_ref).find(|name| !plain(name)) {
        None => Ok(()),
        Some(name) => Err(ClusterError::Rejected {
            action: action.to_owned(),
            reason: format!("{name:?} is no name of an object"),
        }),
    }
}

#[cfg(test)]
#[path = "write_tests.rs"]
mod tests;
