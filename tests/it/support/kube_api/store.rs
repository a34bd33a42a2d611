//! Objects and their history, with one resource version for all.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use bytes::Bytes;
use serde_json::{Value, json};

use super::{
    daemon_sets::Kubelets,
    faults::Faults,
    jobs::{self, Jobs},
    kinds::{self, Kind},
    selectors::Selectable,
};

/// Number of events kept per resource; older ones are dropped.
const HISTORY: usize = 50_000;

/// An object in serialized form, parsed only on demand.
#[derive(Debug)]
pub struct Object {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub revision: u64,
    pub labels: BTreeMap<String, String>,
    pub node_name: String,
    /// Further fields that field selectors support.
    fields: BTreeMap<String, String>,
    pub bytes: Bytes,
}

impl Object {
    fn new(value: &Value, revision: u64) -> Self {
        let metadata = &value["metadata"];
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let labels = metadata["labels"].as_object().into_iter().flatten();
        Self {
            namespace: text(&metadata["namespace"]),
            name: text(&metadata["name"]),
            uid: text(&metadata["uid"]),
            revision,
            labels: labels.map(|(key, value)| (key.clone(), text(value))).collect(),
            node_name: text(&value["spec"]["nodeName"]),
            fields: fields(value),
            bytes: Bytes::from(value.to_string()),
        }
    }

    pub fn value(&self) -> Value {
        serde_json::from_slice(&self.bytes).unwrap()
    }
}

impl Selectable for Object {
    fn labels(&self) -> &BTreeMap<String, String> {
        &self.labels
    }

    fn field(&self, name: &str) -> Option<&str> {
        match name {
            "metadata.name" => Some(&self.name),
            "metadata.namespace" => Some(&self.namespace),
            "spec.nodeName" => Some(&self.node_name),
            _ => Some(self.fields.get(name).map_or("", String::as_str)),
        }
    }
}

/// Returns the fields of Pods and Events that field selectors support.
fn fields(object: &Value) -> BTreeMap<String, String> {
    let wanted: &[&str] = match object["kind"].as_str() {
        Some("Pod") => &["/spec/restartPolicy", "/status/phase"],
        Some("Event") => &["/reason", "/type", "/reportingComponent", "/reportingController"],
        _ => return BTreeMap::new(),
    };
    let mut found = BTreeMap::new();
    for pointer in wanted {
        if let Some(text) = object.pointer(pointer).and_then(Value::as_str) {
            found.insert(pointer[1..].replace('/', "."), text.to_owned());
        }
    }
    if let Some(source) = object["source"]["component"].as_str() {
        found.insert("source".to_owned(), source.to_owned());
    }
    for about in ["involvedObject", "regarding"] {
        for (name, value) in object[about].as_object().into_iter().flatten() {
            found.insert(format!("{about}.{name}"), value.as_str().unwrap_or_default().to_owned());
        }
    }
    found
}

/// One change of one object. The last state of a deleted object carries the deletion's resource version.
#[derive(Clone, Debug)]
pub struct Event {
    pub revision: u64,
    pub before: Option<Arc<Object>>,
    pub after: Option<Arc<Object>>,
    /// Set for deletions.
    pub last: Option<Bytes>,
}

/// Namespace and name.
pub type Key = (String, String);

/// The server's complete state.
pub struct State {
    pub revision: u64,
    /// Watches from an older revision are refused.
    pub compacted: u64,
    /// `continue` tokens from older revisions have expired.
    pub tokens_from: u64,
    /// Incremented to make every watch send a bookmark.
    pub bookmarks: u64,
    pub kinds: Vec<Arc<Kind>>,
    objects: BTreeMap<String, BTreeMap<Key, Arc<Object>>>,
    history: BTreeMap<String, VecDeque<Event>>,
    pub faults: Faults,
    pub kubelets: Option<Kubelets>,
    /// Set once a test runs Jobs.
    pub jobs: Option<Jobs>,
    next_uid: u64,
}

impl State {
    pub fn new() -> Self {
        let mut state = Self {
            revision: 100,
            compacted: 0,
            tokens_from: 0,
            bookmarks: 0,
            kinds: kinds::built_in(),
            objects: BTreeMap::new(),
            history: BTreeMap::new(),
            faults: Faults::default(),
            kubelets: None,
            jobs: None,
            next_uid: 0,
        };
        let namespaces = Arc::clone(&state.kinds[0]);
        for name in ["default", "kube-system"] {
            let object = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
            state.insert(&namespaces, object);
        }
        state
    }

    pub fn kind(&self, group: &str, version: &str, plural: &str) -> Option<Arc<Kind>> {
        let wanted =
            |kind: &&Arc<Kind>| kind.group == group && kind.version == version && kind.plural == plural;
        self.kinds.iter().find(wanted).cloned()
    }

    /// Finds a kind by `apiVersion` and `kind`.
    pub fn kind_of(&self, object: &Value) -> Option<Arc<Kind>> {
        let wanted = |kind: &&Arc<Kind>| {
            object["apiVersion"] == kind.api_version().as_str() && object["kind"] == kind.kind.as_str()
        };
        self.kinds.iter().find(wanted).cloned()
    }

    /// Finds a kind by a name such as `daemonsets.apps`.
    pub fn resource(&self, resource: &str) -> Arc<Kind> {
        let wanted = |kind: &&Arc<Kind>| kind.resource() == resource;
        let found = self.kinds.iter().find(wanted).cloned();
        found.unwrap_or_else(|| panic!("the fake API server does not serve {resource}"))
    }

    pub fn get(&self, kind: &Kind, namespace: &str, name: &str) -> Option<Arc<Object>> {
        self.objects.get(&kind.resource())?.get(&(namespace.to_owned(), name.to_owned())).cloned()
    }

    /// Lists objects in the key order of the real store. An empty `namespace` selects all namespaces.
    pub fn list<'a>(
        &'a self,
        kind: &Kind,
        namespace: &'a str,
    ) -> impl Iterator<Item = &'a Arc<Object>> + use<'a> {
        self.list_after(kind, namespace, Key::default())
    }

    /// Lists the objects after a key.
    pub fn list_after<'a>(
        &'a self,
        kind: &Kind,
        namespace: &'a str,
        after: Key,
    ) -> impl Iterator<Item = &'a Arc<Object>> + use<'a> {
        let behind = (std::ops::Bound::Excluded(after), std::ops::Bound::Unbounded);
        let objects = self.objects.get(&kind.resource()).into_iter();
        objects
            .flat_map(move |objects| objects.range(behind.clone()).map(|(_, object)| object))
            .filter(move |object| namespace.is_empty() || object.namespace == namespace)
    }

    pub fn events_since(&self, resource: &str, revision: u64) -> Vec<Event> {
        let Some(events) = self.history.get(resource) else { return Vec::new() };
        let from = events.partition_point(|event| event.revision <= revision);
        events.range(from..).cloned().collect()
    }

    /// Stores a new object and assigns its identity.
    pub fn insert(&mut self, kind: &Kind, mut object: Value) -> Arc<Object> {
        self.next_uid += 1;
        let now = jiff::Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
        object["metadata"]["uid"] = json!(format!("00000000-0000-4000-8000-{:012x}", self.next_uid));
        object["metadata"]["creationTimestamp"] = json!(now);
        if kind.generation {
            object["metadata"]["generation"] = json!(1);
        }
        if kind.kind == "Job" {
            jobs::select_by_uid(&mut object);
        }
        self.put(kind, None, object)
    }

    /// Stores a new state of an object.
    pub fn replace(&mut self, kind: &Kind, old: &Arc<Object>, object: Value) -> Arc<Object> {
        self.put(kind, Some(Arc::clone(old)), object)
    }

    fn put(&mut self, kind: &Kind, before: Option<Arc<Object>>, mut object: Value) -> Arc<Object> {
        self.revision += 1;
        object["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let object = Arc::new(Object::new(&object, self.revision));
        let key = (object.namespace.clone(), object.name.clone());
        self.objects.entry(kind.resource()).or_default().insert(key, Arc::clone(&object));
        self.remember(
            kind,
            Event { revision: self.revision, before, after: Some(Arc::clone(&object)), last: None },
        );
        object
    }

    pub fn remove(&mut self, kind: &Kind, object: &Arc<Object>) {
        let key = (object.namespace.clone(), object.name.clone());
        let found = self.objects.get_mut(&kind.resource()).and_then(|objects| objects.remove(&key));
        let Some(before) = found else { return };
        self.revision += 1;
        let mut last = before.value();
        last["metadata"]["resourceVersion"] = json!(self.revision.to_string());
        let last = Some(Bytes::from(last.to_string()));
        self.remember(kind, Event { revision: self.revision, before: Some(before), after: None, last });
    }

    fn remember(&mut self, kind: &Kind, event: Event) {
        let events = self.history.entry(kind.resource()).or_default();
        events.push_back(event);
        if events.len() > HISTORY
            && let Some(forgotten) = events.pop_front()
        {
            self.compacted = self.compacted.max(forgotten.revision);
        }
    }

    /// Drops all events so far: older watches and lists cannot continue.
    pub fn compact(&mut self) {
        // Compaction takes a new revision, so that clients at the last event are behind, too.
        self.revision += 1;
        self.compacted = self.revision;
        self.tokens_from = self.revision;
        self.history.clear();
    }

    /// Starts serving a custom resource.
    pub fn install(&mut self, kind: Kind) {
        if !self.kinds.iter().any(|known| known.resource() == kind.resource()) {
            self.kinds.push(Arc::new(kind));
        }
    }

    /// Stops serving a custom resource and deletes its objects.
    pub fn uninstall(&mut self, resource: &str) {
        let Some(at) = self.kinds.iter().position(|kind| kind.custom && kind.resource() == resource) else {
            return;
        };
        let kind = Arc::clone(&self.kinds[at]);
        let objects: Vec<Arc<Object>> = self.list(&kind, "").cloned().collect();
        for object in objects {
            self.remove(&kind, &object);
        }
        self.kinds.remove(at);
    }
}
