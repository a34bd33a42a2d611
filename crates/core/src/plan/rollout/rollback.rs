//! Rolls back rewrites.
//!
//! One function per kind of object lists all objects in the cluster, with a step for each one that has a record.
//! Previous values are restored without a registry lookup: they were in use before, and a person asks for them.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::Value;

use super::{
    Change, HoldReason, Record, RecordState,
    image::naming,
    record::FieldRecord,
    resource::{self, FIELD},
};
use crate::plan::{ClusterSnapshot, DaemonSetFacts, RECORD_ANNOTATION, ResourceFacts};

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
    let objects = [daemon_sets(snapshot), resources(snapshot)].concat();
    let unknown: Vec<String> =
        selected.iter().filter(|name| !objects.iter().any(|(found, _)| found == *name)).cloned().collect();
    if !unknown.is_empty() {
        return Err(unknown);
    }
    let wanted = objects.into_iter().filter(|(name, _)| selected.is_empty() || selected.contains(name));
    Ok(wanted.filter_map(|(_, step)| step).collect())
}

fn daemon_sets(snapshot: &ClusterSnapshot) -> Vec<(String, Option<RollbackStep>)> {
    let step = |found: &DaemonSetFacts| {
        let object = format!("{}/{}", found.namespace, found.name);
        let live = found.live.as_ref()?;
        let resume = format!(
            "kubectl annotate daemonset {} --namespace {} {RECORD_ANNOTATION}-",
            found.name, found.namespace
        );
        let current = |field: &str| found.image_of(field).map(Value::from);
        let image = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let rollback = roll_back(Record::of(&live.annotations), current, image);
        let change = |record: &Record, restored: &[String]| {
            let mut change = naming(found, record);
            for container in found.containers.iter().filter(|found| restored.contains(&found.name)) {
                let to = record.0.get(&container.name).and_then(|field| field.replaced.as_str());
                change.expected.insert(container.name.clone(), container.image.clone());
                change.images.insert(container.name.clone(), to.unwrap_or_default().to_owned());
            }
            Some(Change::DaemonSet(change))
        };
        Some((object.clone(), rollback.step(object, resume, change)))
    };
    snapshot.daemon_sets.iter().filter_map(step).collect()
}

fn resources(snapshot: &ClusterSnapshot) -> Vec<(String, Option<RollbackStep>)> {
    let step = |found: &ResourceFacts| {
        let object = format!("{}/{}", found.kind, found.name);
        let (plural, group) = (found.kind.plural(), found.kind.group());
        let (namespace, name) = found.split_name();
        let namespace =
            if namespace.is_empty() { String::new() } else { format!(" --namespace {namespace}") };
        let resume = format!("kubectl annotate {plural}.{group} {name}{namespace} {RECORD_ANNOTATION}-");
        let record = Record::of(&found.annotations);
        let fields = record.as_ref().ok().and_then(|record| record.0.get(FIELD)).cloned();
        let current = |field: &str| {
            let field = fields.as_ref().filter(|_| field == FIELD)?;
            Some(resource::values(&field.set, resource::section(found)?))
        };
        let rollback = roll_back(record, current, resource::text_of);
        let change = |record: &Record, _: &[String]| {
            let entry = record.0.get(FIELD)?.clone();
            let driver = resource::section(found)?;
            resource::change(found, driver, entry, Vec::new()).ok().map(Change::Resource)
        };
        (object.clone(), rollback.step(object, resume, change))
    };
    snapshot.resources.iter().map(step).collect()
}

/// Results for the fields of a record.
struct Rollback {
    outcomes: BTreeMap<String, RollbackOutcome>,
    record: Record,
    error: Option<String>,
}

impl Rollback {
    /// Returns the object's step. `change` creates its change from the new record and the names of the fields to
    /// restore.
    fn step(
        self,
        object: String,
        resume: String,
        change: impl FnOnce(&Record, &[String]) -> Option<Change>,
    ) -> Option<RollbackStep> {
        let Self { outcomes, record, error } = self;
        if outcomes.is_empty() && error.is_none() {
            return None;
        }
        let restored =
            outcomes.iter().filter(|(_, outcome)| matches!(outcome, RollbackOutcome::Restored { .. }));
        let restored: Vec<String> = restored.map(|(field, _)| field.clone()).collect();
        let differs = outcomes.values().any(|outcome| !matches!(outcome, RollbackOutcome::Nothing { .. }));
        let change = if differs { change(&record, &restored) } else { None };
        Some(RollbackStep { object, fields: outcomes, error, resume, change })
    }
}

fn roll_back(
    record: Result<Record, HoldReason>,
    current: impl Fn(&str) -> Option<Value>,
    to_text: impl Fn(&Value) -> String,
) -> Rollback {
    let mut rollback = Rollback { outcomes: BTreeMap::new(), record: Record::default(), error: None };
    let record = match record {
        Ok(record) => record,
        Err(unreadable) => {
            rollback.error = Some(unreadable.to_string());
            return rollback;
        }
    };
    for (name, field) in &record.0 {
        let nothing = |why: &str| RollbackOutcome::Nothing { why: why.to_owned() };
        let updated = FieldRecord { state: RecordState::RolledBack, ..field.clone() };
        let (outcome, entry) = match (field.state, current(name)) {
            (_, None) => (nothing("it no longer exists"), field.clone()),
            (RecordState::RolledBack, _) => (nothing("it was rolled back before"), field.clone()),
            (RecordState::Failed, _) => {
                (nothing("its pods failed, and the previous value was restored then"), field.clone())
            }
            (RecordState::Conflict, _) => {
                (nothing("another writer has set it, so farrier left it unchanged"), field.clone())
            }
            (RecordState::Set | RecordState::Good, Some(now)) if now == field.set => {
                (RollbackOutcome::Restored { from: to_text(&now), to: to_text(&field.replaced) }, updated)
            }
            (RecordState::Set | RecordState::Good, Some(now)) => {
                (RollbackOutcome::Released { holds: to_text(&now) }, updated)
            }
        };
        rollback.outcomes.insert(name.clone(), outcome);
        rollback.record.0.insert(name.clone(), entry);
    }
    rollback
}

#[cfg(test)]
mod tests;
