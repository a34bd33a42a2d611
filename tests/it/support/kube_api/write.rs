//! Create, update, patch, apply and delete.

use std::sync::Arc;

use serde_json::{Value, json};

use super::{
    answer::Failure,
    kinds::Kind,
    managed::{self, Author},
    store::{Object, State},
    validate,
};

/// The object that a write addresses.
#[derive(Clone, Copy, Debug)]
pub struct Target<'a> {
    pub kind: &'a Arc<Kind>,
    pub namespace: &'a str,
    pub name: &'a str,
}

/// The written object, and whether it is new.
pub type Written = Result<(Arc<Object>, bool), Failure>;

impl State {
    fn existing(&self, target: Target<'_>) -> Result<Arc<Object>, Failure> {
        let found = self.get(target.kind, target.namespace, target.name);
        found.ok_or_else(|| Failure::not_found(target.kind, target.name))
    }

    pub fn create(&mut self, target: Target<'_>, mut object: Value, author: Author<'_>) -> Written {
        let Target { kind, namespace, .. } = target;
        check_type(kind, &object)?;
        if object["metadata"]["resourceVersion"].as_str().is_some_and(|given| !given.is_empty()) {
            return Err(Failure::bad_request("resourceVersion should not be set on objects to be created"));
        }
        if let Some(prefix) = object["metadata"]["generateName"].as_str()
            && object["metadata"]["name"].is_null()
        {
            object["metadata"]["name"] = json!(format!("{prefix}{:05x}", self.revision));
        }
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if self.get(kind, namespace, &name).is_some() {
            return Err(Failure::exists(kind, &name));
        }
        let empty = skeleton(Target { name: &name, ..target });
        validate::set_defaults(kind, &mut object);
        let object = managed::update(kind, &empty, &object, author);
        self.add(Target { name: &name, ..target }, object)
    }

    fn add(&mut self, target: Target<'_>, mut object: Value) -> Written {
        let Target { kind, namespace, name } = target;
        let namespaces = Arc::clone(&self.kinds[0]);
        if kind.namespaced && self.get(&namespaces, "", namespace).is_none() {
            return Err(Failure::not_found(&namespaces, namespace));
        }
        validate::set_defaults(kind, &mut object);
        validate::validate(kind, name, None, &object)?;
        if kind.kind == "DaemonSet" {
            object["status"] = json!({
                "currentNumberScheduled": 0, "numberMisscheduled": 0, "desiredNumberScheduled": 0,
                "numberReady": 0,
            });
        }
        if kind.kind == "CustomResourceDefinition" {
            object["status"] = json!({"conditions": [
                {"type": "NamesAccepted", "status": "True"}, {"type": "Established", "status": "True"},
            ]});
            if let Some(defined) = Kind::defined_by(&object) {
                self.install(defined);
            }
        }
        Ok((self.insert(kind, object), true))
    }

    pub fn put_object(&mut self, target: Target<'_>, object: &Value, author: Author<'_>) -> Written {
        check_type(target.kind, object)?;
        check_name(target, object)?;
        let old = self.existing(target)?;
        let given = object["metadata"]["resourceVersion"].as_str().unwrap_or_default();
        if given.is_empty() && (target.kind.custom || target.kind.kind == "Lease") {
            let why = "Invalid value: 0: must be specified for an update".to_owned();
            let problem =
                super::answer::Problem("metadata.resourceVersion".to_owned(), "FieldValueInvalid", why);
            return Err(Failure::invalid(target.kind, target.name, &[problem]));
        }
        self.change(target, &old, object, author)
    }

    pub fn merge_patch(&mut self, target: Target<'_>, patch: &Value, author: Author<'_>) -> Written {
        let old = self.existing(target)?;
        let mut object = old.value();
        let revision = object["metadata"]["resourceVersion"].take();
        merge(&mut object, patch);
        if object["metadata"]["resourceVersion"].is_null() {
            object["metadata"]["resourceVersion"] = revision;
        }
        check_name(target, &object)?;
        self.change(target, &old, &object, author)
    }

    fn change(
        &mut self,
        target: Target<'_>,
        old: &Arc<Object>,
        object: &Value,
        author: Author<'_>,
    ) -> Written {
        precondition(target, old, object)?;
        let mut object = object.clone();
        validate::set_defaults(target.kind, &mut object);
        let live = old.value();
        let mut new = managed::update(target.kind, &live, &object, author);
        new["metadata"]["uid"] = match &object["metadata"]["uid"] {
            Value::Null => live["metadata"]["uid"].clone(),
            given => given.clone(),
        };
        self.store(target, old, &live, new)
    }

    pub fn apply(&mut self, target: Target<'_>, config: &Value, author: Author<'_>, force: bool) -> Written {
        let Target { kind, name, .. } = target;
        check_type(kind, config)?;
        check_name(target, config)?;
        if !config["metadata"]["managedFields"].is_null() {
            return Err(Failure::bad_request("metadata.managedFields must be nil"));
        }
        let Some(old) = self.get(kind, target.namespace, name) else {
            if author.subresource.is_some() {
                return Err(Failure::not_found(kind, name));
            }
            // Like the real server, create the object although a resource version was given; only a uid prevents that.
            if let Some(uid) = config["metadata"]["uid"].as_str() {
                let why = format!(
                    "uid mismatch: the provided object specified uid {uid}, and no existing object was found"
                );
                return Err(Failure::conflict(kind, name, &why));
            }
            let object = managed::apply(kind, &skeleton(target), config, author, force)?;
            return self.add(target, object);
        };
        precondition(target, &old, config)?;
        let live = old.value();
        let mut new = managed::apply(kind, &live, config, author, force)?;
        if let uid @ Value::String(_) = &config["metadata"]["uid"] {
            new["metadata"]["uid"] = uid.clone();
        }
        self.store(target, &old, &live, new)
    }

    fn store(&mut self, target: Target<'_>, old: &Arc<Object>, live: &Value, mut new: Value) -> Written {
        let Target { kind, name, .. } = target;
        validate::set_defaults(kind, &mut new);
        validate::validate(kind, name, Some(live), &new)?;
        if same(live, &new) {
            return Ok((Arc::clone(old), false));
        }
        if kind.generation && live["spec"] != new["spec"] {
            let generation = live["metadata"]["generation"].as_u64().unwrap_or_default() + 1;
            new["metadata"]["generation"] = json!(generation);
        }
        Ok((self.replace(kind, old, new), false))
    }

    /// Deletes an object. `options` is the body: `DeleteOptions` or null.
    pub fn delete(&mut self, target: Target<'_>, options: &Value) -> Result<Arc<Object>, Failure> {
        let Target { kind, name, .. } = target;
        let old = self.existing(target)?;
        check_preconditions(kind, &old, options)?;
        if options["dryRun"].as_array().is_some_and(|given| !given.is_empty()) {
            return Ok(old);
        }
        if kind.kind == "CustomResourceDefinition" {
            self.uninstall(name);
        }
        if kind.kind == "Pod" && self.has_kubelet(&old) {
            self.terminate(&old, options["gracePeriodSeconds"].as_u64());
            return Ok(self.get(kind, target.namespace, name).unwrap_or(old));
        }
        if kind.kind == "Job" && options["propagationPolicy"] == "Foreground" && self.jobs.is_some() {
            let mut job = old.value();
            job["metadata"]["deletionTimestamp"] = json!(super::pod_fate::text(jiff::Timestamp::now()));
            job["metadata"]["deletionGracePeriodSeconds"] = json!(0);
            job["metadata"]["finalizers"] = json!(["foregroundDeletion"]);
            return Ok(self.replace(kind, &old, job));
        }
        let orphan = options["propagationPolicy"] == "Orphan";
        self.remove(kind, &old);
        if matches!(kind.kind.as_str(), "DaemonSet" | "Job") && !orphan {
            self.remove_dependents(&old.uid);
        }
        Ok(old)
    }

    /// Deletes the owner's pods, like the garbage collector.
    fn remove_dependents(&mut self, uid: &str) {
        let pods = self.resource("pods");
        let owned = |object: &&Arc<Object>| {
            let owners =
                object.value()["metadata"]["ownerReferences"].as_array().cloned().unwrap_or_default();
            owners.iter().any(|owner| owner["uid"] == uid)
        };
        let owned: Vec<Arc<Object>> = self.list(&pods, "").filter(owned).cloned().collect();
        for pod in owned {
            self.terminate(&pod, None);
        }
    }
}

/// Returns a new object before any manager owns a field.
fn skeleton(target: Target<'_>) -> Value {
    let Target { kind, namespace, name } = target;
    let mut object = json!({
        "apiVersion": kind.api_version(), "kind": kind.kind, "metadata": {"name": name},
    });
    if kind.namespaced {
        object["metadata"]["namespace"] = json!(namespace);
    }
    object
}

pub fn check_preconditions(kind: &Kind, old: &Object, options: &Value) -> Result<(), Failure> {
    let wanted = &options["preconditions"];
    let revision = old.revision.to_string();
    let why = if let Some(uid) = wanted["uid"].as_str().filter(|uid| *uid != old.uid) {
        format!(
            "the UID in the precondition ({uid}) does not match the UID in record ({}). The object might have \
             been deleted and then recreated",
            old.uid
        )
    } else if let Some(given) = wanted["resourceVersion"].as_str().filter(|given| *given != revision) {
        format!(
            "the ResourceVersion in the precondition ({given}) does not match the ResourceVersion in record \
             ({revision}). The object might have been modified"
        )
    } else {
        return Ok(());
    };
    let message = format!("Operation cannot be fulfilled on {} \"{}\": {why}", kind.qualified(), old.name);
    let mut details = json!({"name": old.name, "kind": kind.kind});
    if !kind.group.is_empty() {
        details["group"] = json!(kind.group);
    }
    Err(Failure::new(409, "Conflict", message, details))
}

fn check_type(kind: &Kind, object: &Value) -> Result<(), Failure> {
    if object["kind"] == kind.kind.as_str() && object["apiVersion"] == kind.api_version().as_str() {
        return Ok(());
    }
    let message = format!(
        "the object provided is unrecognized (must be of type {}): {} {}",
        kind.kind, object["apiVersion"], object["kind"]
    );
    Err(Failure::bad_request(message))
}

fn check_name(target: Target<'_>, object: &Value) -> Result<(), Failure> {
    let given = object["metadata"]["name"].as_str().unwrap_or(target.name);
    if given == target.name {
        return Ok(());
    }
    let message =
        format!("the name of the object ({given}) does not match the name on the URL ({})", target.name);
    Err(Failure::bad_request(message))
}

fn precondition(target: Target<'_>, old: &Object, given: &Value) -> Result<(), Failure> {
    match given["metadata"]["resourceVersion"].as_str() {
        Some(revision) if !revision.is_empty() && revision != old.revision.to_string() => {
            Err(Failure::modified(target.kind, target.name))
        }
        _ => Ok(()),
    }
}

/// Returns whether two objects are equal, ignoring the times in `managedFields`.
fn same(old: &Value, new: &Value) -> bool {
    let timeless = |object: &Value| {
        let mut object = object.clone();
        let entries = object["metadata"]["managedFields"].as_array_mut();
        for entry in entries.into_iter().flatten() {
            entry["time"] = Value::Null;
        }
        if object["metadata"]["managedFields"].is_null()
            && let Some(metadata) = object["metadata"].as_object_mut()
        {
            metadata.remove("managedFields");
        }
        object
    };
    timeless(old) == timeless(new)
}

/// Applies a JSON merge patch (RFC 7386).
fn merge(value: &mut Value, patch: &Value) {
    let Some(patch) = patch.as_object() else {
        value.clone_from(patch);
        return;
    };
    if !value.is_object() {
        *value = json!({});
    }
    for (name, patch) in patch {
        if patch.is_null() {
            value.as_object_mut().map(|map| map.remove(name));
        } else {
            merge(&mut value[name.as_str()], patch);
        }
    }
}
