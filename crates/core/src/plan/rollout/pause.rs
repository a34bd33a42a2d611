//! Pausing and resuming rollouts: while an object has the pause annotation, farrier writes nothing else to it.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::{
    Change, DaemonSetChange, HoldReason, PlanInputs, Record, RecordState, ResourceChange, RolloutObject,
    RolloutTarget, daemon_set::named, image::naming, live_object::LiveObject, per_kernel::OriginalRecord,
    resource, single::single,
};
use crate::plan::{
    ClusterSnapshot, PAUSED_ANNOTATION, PER_KERNEL_ANNOTATION, RECORD_ANNOTATION, ResourceFacts,
    clear_failures, labels::has_pause_annotation,
};

/// Returns the annotations that pause or resume the object. Resuming an object that is not paused clears its record
/// of rewrites that failed, were rolled back or were given up, so that the rollout can try again.
fn annotations_for(found: LiveObject<'_>, paused: bool, record: &Record) -> BTreeMap<String, String> {
    let mut annotations = found.annotations().clone();
    if paused != found.is_paused() {
        // Set to `false` instead of removed: an apply that omits an annotation of another writer would leave it in
        // place.
        annotations.insert(PAUSED_ANNOTATION.to_owned(), paused.to_string());
        return annotations;
    }
    let stands = |state| matches!(state, RecordState::Set | RecordState::Good);
    let is_over =
        matches!(found, LiveObject::DaemonSet(_, live) if OriginalRecord::read(live).is_rolled_back());
    if !paused && is_over {
        annotations.remove(PER_KERNEL_ANNOTATION);
    }
    if !paused && record.0.values().any(|field| !stands(field.state)) {
        let kept = record.0.iter().filter(|(_, field)| stands(field.state));
        annotations.remove(RECORD_ANNOTATION);
        return Record(kept.map(|(name, field)| (name.clone(), field.clone())).collect())
            .annotations(&annotations);
    }
    annotations
}

/// Whether the target's object is paused, in the cluster or in its manifest.
pub(super) fn is_paused(inputs: &PlanInputs<'_>, target: &RolloutTarget) -> bool {
    let mut found = LiveObject::all(inputs.snapshot).filter(|found| found.is(&target.object));
    let in_manifests = || match &target.object {
        RolloutObject::Resource(wanted) => single::<ResourceFacts>(inputs, target, wanted)
            .is_ok_and(|found| has_pause_annotation(&found.annotations)),
        _ => named(inputs, target).is_ok_and(|found| found.daemon_set.paused),
    };
    found.any(LiveObject::is_paused) || in_manifests()
}

/// Returns whether each object of a live cluster is paused, by the names that [`super::rollback`] takes.
pub fn paused(snapshot: &ClusterSnapshot) -> BTreeMap<String, bool> {
    LiveObject::all(snapshot).map(|found| (found.name(), found.is_paused())).collect()
}

/// Returns the changes that pause or resume the rollouts of an object; none where nothing is to be done. Resuming also
/// continues after a rollback, a failure or a conflict with another writer, and continues an upgrade that stopped
/// because its driver failed on nodes. The object's name is as in [`super::rollback`].
///
/// # Errors
/// The reason why the object cannot be written.
pub fn pause(snapshot: &ClusterSnapshot, name: &str, paused: bool) -> Result<Vec<Change>, HoldReason> {
    let found = LiveObject::all(snapshot).find(|found| found.name() == name).ok_or(HoldReason::NOT_FOUND)?;
    let record = Record::of(found.annotations())?;
    let annotations = annotations_for(found, paused, &record);
    let mut changes = match found {
        _ if annotations == *found.annotations() => Vec::new(),
        LiveObject::DaemonSet(_, live) if live.deleting => return Err(HoldReason::Deleting),
        LiveObject::DaemonSet(found, _) => {
            vec![Change::DaemonSet(DaemonSetChange { annotations, ..naming(found, &record) })]
        }
        LiveObject::Resource(found) => {
            let (kind, name, version) = (found.kind, found.name.clone(), found.version.clone());
            let spec = written(found, &record)?;
            vec![Change::Resource(ResourceChange {
                kind,
                name,
                version,
                spec,
                annotations,
                expected: None,
                proof: Vec::new(),
            })]
        }
    };
    if !paused {
        changes.extend(clear_failures(snapshot.nodes.iter().map(|node| &**node), name));
    }
    Ok(changes)
}

/// Returns the fields that farrier has set in a resource. The change must name them, because an apply gives up what it
/// omits.
fn written(found: &ResourceFacts, record: &Record) -> Result<Value, HoldReason> {
    match resource::section(found).zip(record.0.get(resource::FIELD)) {
        Some((driver, entry)) => Ok(resource::change(found, driver, entry.clone(), Vec::new())?.spec),
        None => Ok(json!({})),
    }
}

#[cfg(test)]
mod tests;
