//! Rolls back rewrites: one step for each object of the cluster with a record.
//!
//! Previous values are restored without a registry lookup: they were in use before, and a person asks for the rollback.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::{
    Change, RecordState, ResourceChange, RewriteRecord,
    copy::{CopyRecord, original_of},
    image::unchanged_fields,
    live_object::LiveObject,
    record::FieldRecord,
    resource::{self, SPEC},
};
use crate::plan::{ClusterSnapshot, Instance, RECORD_ANNOTATION, labels::COPY_RECORD_ANNOTATION};

/// Result of a rollback for one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum RollbackOutcome {
    /// The previous value (`to`) is restored.
    Restored { from: String, to: String },
    /// Another writer has set the field since: the value stays, and farrier gives up the field.
    Released { holds: String },
    /// Nothing is to be done, with the reason.
    Nothing { why: String },
}

impl RollbackOutcome {
    /// Returns the result in a word, and its details.
    pub fn summary(&self) -> (&'static str, String) {
        match self {
            Self::Restored { from, to } => ("restored", format!("{from} -> {to}")),
            Self::Released { holds } => {
                ("release", format!("it now holds {holds}, which farrier did not set; left unchanged"))
            }
            Self::Nothing { why } => ("nothing", why.clone()),
        }
    }
}

/// Rollback of one object.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RollbackStep {
    /// `namespace/name` of a DaemonSet, `Kind/name` of an operator's resource.
    pub object: String,
    /// Result for each container, or for the resource's `spec`.
    pub fields: BTreeMap<String, RollbackOutcome>,
    /// Error if farrier's record cannot be parsed.
    pub error: Option<String>,
    /// Command that lets the controller set the object again.
    pub resume: String,
    /// Change for an adapter to make.
    pub change: Option<Change>,
}

/// Returns the steps that roll back farrier's rewrites: in the selected objects, or in all objects with a record.
///
/// # Errors
/// The selected names that the cluster does not have.
pub fn rollback(snapshot: &ClusterSnapshot, selected: &[String]) -> Result<Vec<RollbackStep>, Vec<String>> {
    let objects: Vec<_> = LiveObject::all(snapshot).map(|object| (object.name(), object)).collect();
    let is_unknown = |name: &&String| objects.iter().all(|(known, _)| known != *name);
    let unknown: Vec<String> = selected.iter().filter(is_unknown).cloned().collect();
    if !unknown.is_empty() {
        return Err(unknown);
    }
    let objects = objects.into_iter().filter(|(name, _)| selected.is_empty() || selected.contains(name));
    Ok(objects.filter_map(|(name, object)| step(name, object)).collect())
}

/// Returns the objects that only other farriers of the cluster have set, each with the name of such a farrier.
pub fn set_by_others(snapshot: &ClusterSnapshot, instance: &Instance) -> BTreeMap<String, String> {
    let mut writers: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for object in LiveObject::all(snapshot) {
        if let Ok(record) = RewriteRecord::of(object.annotations()) {
            writers.entry(object.name()).or_default().extend(record.0.into_values().map(|field| field.by));
        }
        let LiveObject::DaemonSet(facts, live) = object else { continue };
        // A per-kernel rollout has its records in the copies.
        let text = live.annotations.get(COPY_RECORD_ANNOTATION);
        let copy = text.and_then(|text| serde_json::from_str::<CopyRecord>(text).ok());
        if let (Some(original), Some(copy)) = (original_of(live), copy) {
            writers.entry(format!("{}/{original}", facts.namespace)).or_default().push(copy.by);
        }
    }
    // Records of older versions have no name.
    let this = instance.to_string();
    writers.retain(|_, names| names.iter().all(|name| !name.is_empty() && *name != this));
    writers.into_iter().filter_map(|(object, names)| Some((object, names.into_iter().next()?))).collect()
}

/// Returns the step for an object; `None` where it has no record.
fn step(name: String, object: LiveObject<'_>) -> Option<RollbackStep> {
    let resume = resume(object);
    let before = match RewriteRecord::of(object.annotations()) {
        Ok(record) if record.0.is_empty() => return None,
        Ok(record) => record,
        Err(unreadable) => {
            let (fields, error) = (BTreeMap::new(), Some(unreadable.to_string()));
            return Some(RollbackStep { object: name, fields, error, resume, change: None });
        }
    };
    let (mut fields, mut after) = (BTreeMap::new(), RewriteRecord::default());
    for (field, record) in &before.0 {
        let outcome = outcome(object, field, record);
        let is_unchanged = matches!(outcome, RollbackOutcome::Nothing { .. });
        let state = if is_unchanged { record.state } else { RecordState::RolledBack };
        after.0.insert(field.clone(), FieldRecord { state, ..record.clone() });
        fields.insert(field.clone(), outcome);
    }
    let change = if after == before { None } else { change(object, &after, &fields) };
    Some(RollbackStep { object: name, fields, error: None, resume, change })
}

/// Returns the command that lets the controller set the object again.
fn resume(object: LiveObject<'_>) -> String {
    let (resource, namespace, name) = match object {
        LiveObject::DaemonSet(facts, _) => ("daemonset".to_owned(), &*facts.namespace, &*facts.name),
        LiveObject::Resource(facts) => {
            let (namespace, name) = facts.split_name();
            (format!("{}.{}", facts.kind.plural(), facts.kind.group()), namespace, name)
        }
    };
    let namespace = if namespace.is_empty() { String::new() } else { format!(" --namespace {namespace}") };
    format!("kubectl annotate {resource} {name}{namespace} {RECORD_ANNOTATION}-")
}

fn outcome(object: LiveObject<'_>, field: &str, record: &FieldRecord) -> RollbackOutcome {
    let current = match object {
        LiveObject::DaemonSet(facts, _) => facts.image_of(field).map(Value::from),
        LiveObject::Resource(facts) => resource::section(facts)
            .filter(|_| field == SPEC)
            .map(|section| resource::values(&record.set, section)),
    };
    let text = |value: &Value| match object {
        LiveObject::DaemonSet(..) => value.as_str().unwrap_or_default().to_owned(),
        LiveObject::Resource(_) => resource::text_of(value),
    };
    let nothing = |why: &str| RollbackOutcome::Nothing { why: why.to_owned() };
    match (record.state, current) {
        (_, None) => nothing("the field no longer exists"),
        (RecordState::RolledBack, _) => nothing("it was rolled back before"),
        (RecordState::Failed, _) => nothing("its pods failed, and the previous value was restored then"),
        (RecordState::Conflict, _) => nothing("another writer has set it, so farrier left it unchanged"),
        (RecordState::Set | RecordState::Good, Some(value)) if record.holds(&value) => {
            RollbackOutcome::Restored { from: text(&value), to: text(&record.replaced) }
        }
        (RecordState::Set | RecordState::Good, Some(value)) => {
            RollbackOutcome::Released { holds: text(&value) }
        }
    }
}

/// Returns the change that restores fields and writes the new record.
fn change(
    object: LiveObject<'_>,
    record: &RewriteRecord,
    fields: &BTreeMap<String, RollbackOutcome>,
) -> Option<Change> {
    match object {
        LiveObject::DaemonSet(facts, _) => {
            let mut change = unchanged_fields(facts, record);
            for container in &facts.containers {
                if let Some(RollbackOutcome::Restored { to, .. }) = fields.get(&container.name) {
                    change.expected.insert(container.name.clone(), container.image.clone());
                    change.images.insert(container.name.clone(), to.clone());
                }
            }
            Some(Change::DaemonSet(change))
        }
        LiveObject::Resource(facts) => {
            let replaced = match fields.get(SPEC) {
                Some(RollbackOutcome::Restored { .. }) => &record.0.get(SPEC)?.replaced,
                _ => &Value::Null,
            };
            let annotations = record.annotations(&facts.annotations);
            let change = ResourceChange { annotations, ..resource::change(facts, replaced) };
            Some(Change::Resource(change))
        }
    }
}

#[cfg(test)]
mod tests;
