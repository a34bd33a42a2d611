//! Pauses and resumes rollouts: while an object has the pause annotation, farrier writes nothing else to it.

use std::collections::BTreeMap;

use serde_json::Value;

use super::{
    Change, DaemonSetChange, HoldReason, PlanInputs, RecordState, ResourceChange, RewriteRecord,
    RolloutObject, RolloutTarget, daemon_set::target_container, image::unchanged_fields,
    live_object::LiveObject, per_kernel::OriginalRecord, resource, single::single,
};
use crate::plan::{
    ClusterSnapshot, PAUSED_ANNOTATION, PER_KERNEL_ANNOTATION, RECORD_ANNOTATION, ResourceFacts,
    clear_failures, labels::has_pause_annotation,
};

/// Returns the annotations that pause or resume the object. Resuming an object that is not paused clears the records of
/// rewrites that failed, conflict or were rolled back, so that the rollout can try again.
fn annotations_for(object: LiveObject<'_>, paused: bool, record: &RewriteRecord) -> BTreeMap<String, String> {
    let mut annotations = object.annotations().clone();
    if paused != object.is_paused() {
        // Set the annotation to `false` instead of removing it: an apply that omits an annotation of another writer
        // leaves it in place.
        annotations.insert(PAUSED_ANNOTATION.to_owned(), paused.to_string());
        return annotations;
    }
    let is_in_place = |state| matches!(state, RecordState::Set | RecordState::Good);
    let is_rolled_back =
        matches!(object, LiveObject::DaemonSet(_, live) if OriginalRecord::read(live).is_rolled_back());
    if !paused && is_rolled_back {
        annotations.remove(PER_KERNEL_ANNOTATION);
    }
    if !paused && record.0.values().any(|field| !is_in_place(field.state)) {
        let in_place = record.0.iter().filter(|(_, field)| is_in_place(field.state));
        annotations.remove(RECORD_ANNOTATION);
        return RewriteRecord(in_place.map(|(name, field)| (name.clone(), field.clone())).collect())
            .annotations(&annotations);
    }
    annotations
}

/// Whether the target's object is paused, in the cluster or in its manifest.
pub(super) fn is_paused(inputs: &PlanInputs<'_>, target: &RolloutTarget) -> bool {
    let mut objects = LiveObject::all(inputs.snapshot).filter(|object| object.is_named_by(&target.object));
    let in_manifests = || match &target.object {
        RolloutObject::Resource(name) => single::<ResourceFacts>(inputs, target, name)
            .is_ok_and(|resource| has_pause_annotation(&resource.annotations)),
        _ => target_container(inputs, target).is_ok_and(|container| container.daemon_set.paused),
    };
    objects.any(LiveObject::is_paused) || in_manifests()
}

/// Returns whether each object of a live cluster is paused, by its name as in [`super::rollback`].
pub fn paused(snapshot: &ClusterSnapshot) -> BTreeMap<String, bool> {
    LiveObject::all(snapshot).map(|object| (object.name(), object.is_paused())).collect()
}

/// Returns the changes that pause or resume the rollouts of an object; none where nothing is to be done. Resuming also
/// continues after a rollback, a failure or a conflict with another writer, and continues an upgrade that stopped
/// because its driver failed on nodes. The object's name is as in [`super::rollback`].
///
/// # Errors
/// The reason why the object cannot be written.
pub fn pause(snapshot: &ClusterSnapshot, name: &str, paused: bool) -> Result<Vec<Change>, HoldReason> {
    let object = LiveObject::all(snapshot).find(|object| object.name() == name);
    let object = object.ok_or(HoldReason::NOT_FOUND)?;
    let record = RewriteRecord::of(object.annotations())?;
    let annotations = annotations_for(object, paused, &record);
    let mut changes = match object {
        _ if annotations == *object.annotations() => Vec::new(),
        LiveObject::DaemonSet(_, live) if live.deleting => return Err(HoldReason::Deleting),
        LiveObject::DaemonSet(facts, _) => {
            vec![Change::DaemonSet(DaemonSetChange { annotations, ..unchanged_fields(facts, &record) })]
        }
        LiveObject::Resource(facts) => {
            let change = resource::change(facts, &Value::Null);
            vec![Change::Resource(ResourceChange { annotations, ..change })]
        }
    };
    if !paused {
        changes.extend(clear_failures(snapshot.nodes.iter().map(|node| &**node), name));
    }
    Ok(changes)
}

#[cfg(test)]
mod tests;
