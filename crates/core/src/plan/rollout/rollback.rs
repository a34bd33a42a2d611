//! Rolls back rewrites.
//!
//! Each object of the cluster that has a record gets a step.
//! Previous values are restored without a registry lookup: they were in use before, and a person asks for them.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::{
    Change, Record, RecordState,
    image::owned_fields,
    live_object::LiveObject,
    record::FieldRecord,
    resource::{self, FIELD},
};
use crate::plan::{ClusterSnapshot, RECORD_ANNOTATION};

/// Result of a rollback for one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome")]
pub enum RollbackOutcome {
    /// The previous value (`to`) is restored.
    Restored { from: String, to: String },
    /// Another writer has set the field since: its value stays, and farrier leaves the field, too.
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
    /// Command after which the controller sets the object again.
    pub resume: String,
    /// Change for an adapter to make.
    pub change: Option<Change>,
}

/// Returns the steps that roll back farrier's rewrites: in the selected objects, or in all objects with a record.
///
/// # Errors
/// The selected names that the cluster does not have.
pub fn rollback(snapshot: &ClusterSnapshot, selected: &[String]) -> Result<Vec<RollbackStep>, Vec<String>> {
    let objects: Vec<_> = LiveObject::all(snapshot).map(|found| (found.name(), found)).collect();
    let is_unknown = |name: &&String| objects.iter().all(|(found, _)| found != *name);
    let unknown: Vec<String> = selected.iter().filter(is_unknown).cloned().collect();
    if !unknown.is_empty() {
        return Err(unknown);
    }
    let wanted = objects.into_iter().filter(|(name, _)| selected.is_empty() || selected.contains(name));
    Ok(wanted.filter_map(|(name, found)| step(name, found)).collect())
}

/// Returns the step for an object; `None` where it has no record.
fn step(object: String, found: LiveObject<'_>) -> Option<RollbackStep> {
    let resume = resume(found);
    let before = match Record::of(found.annotations()) {
        Ok(record) if record.0.is_empty() => return None,
        Ok(record) => record,
        Err(unreadable) => {
            let error = Some(unreadable.to_string());
            return Some(RollbackStep { object, fields: BTreeMap::new(), error, resume, change: None });
        }
    };
    let (mut fields, mut after) = (BTreeMap::new(), Record::default());
    for (name, field) in &before.0 {
        let outcome = outcome(found, name, field);
        let stays = matches!(outcome, RollbackOutcome::Nothing { .. });
        let state = if stays { field.state } else { RecordState::RolledBack };
        after.0.insert(name.clone(), FieldRecord { state, ..field.clone() });
        fields.insert(name.clone(), outcome);
    }
    let change = if after == before { None } else { change(found, &after, &fields) };
    Some(RollbackStep { object, fields, error: None, resume, change })
}

/// Returns the command that lets the controller set the object again.
fn resume(found: LiveObject<'_>) -> String {
    let (resource, namespace, name) = match found {
        LiveObject::DaemonSet(found, _) => ("daemonset".to_owned(), &*found.namespace, &*found.name),
        LiveObject::Resource(found) => {
            let (namespace, name) = found.split_name();
            (format!("{}.{}", found.kind.plural(), found.kind.group()), namespace, name)
        }
    };
    let namespace = if namespace.is_empty() { String::new() } else { format!(" --namespace {namespace}") };
    format!("kubectl annotate {resource} {name}{namespace} {RECORD_ANNOTATION}-")
}

fn outcome(found: LiveObject<'_>, name: &str, field: &FieldRecord) -> RollbackOutcome {
    let current = match found {
        LiveObject::DaemonSet(found, _) => found.image_of(name).map(Value::from),
        LiveObject::Resource(found) => resource::section(found)
            .filter(|_| name == FIELD)
            .map(|section| resource::values(&field.set, section)),
    };
    let text = |value: &Value| match found {
        LiveObject::DaemonSet(..) => value.as_str().unwrap_or_default().to_owned(),
        LiveObject::Resource(_) => resource::text_of(value),
    };
    let nothing = |why: &str| RollbackOutcome::Nothing { why: why.to_owned() };
    match (field.state, current) {
        (_, None) => nothing("it no longer exists"),
        (RecordState::RolledBack, _) => nothing("it was rolled back before"),
        (RecordState::Failed, _) => nothing("its pods failed, and the previous value was restored then"),
        (RecordState::Conflict, _) => nothing("another writer has set it, so farrier left it unchanged"),
        (RecordState::Set | RecordState::Good, Some(now)) if now == field.set => {
            RollbackOutcome::Restored { from: text(&now), to: text(&field.replaced) }
        }
        (RecordState::Set | RecordState::Good, Some(now)) => RollbackOutcome::Released { holds: text(&now) },
    }
}

/// Returns the change that restores fields and writes the new record.
fn change(
    found: LiveObject<'_>,
    record: &Record,
    fields: &BTreeMap<String, RollbackOutcome>,
) -> Option<Change> {
    match found {
        LiveObject::DaemonSet(found, _) => {
            let mut change = owned_fields(found, record);
            for container in &found.containers {
                if let Some(RollbackOutcome::Restored { to, .. }) = fields.get(&container.name) {
                    change.expected.insert(container.name.clone(), container.image.clone());
                    change.images.insert(container.name.clone(), to.clone());
                }
            }
            Some(Change::DaemonSet(change))
        }
        LiveObject::Resource(found) => {
            let (driver, entry) = (resource::section(found)?, record.0.get(FIELD)?.clone());
            resource::change(found, driver, entry, Vec::new()).ok().map(Change::Resource)
        }
    }
}

#[cfg(test)]
mod tests;
