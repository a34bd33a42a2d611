//! Merges the changes of rollouts that name the same DaemonSet. One write sets all of its containers, so that its pods restart
//! once, and no rollout mistakes another rollout for another writer.

use std::collections::BTreeMap;

use super::{Change, DaemonSetChange, PlannedRollout, RewriteRecord};
use crate::plan::{ClusterSnapshot, LiveDaemonSet, PER_KERNEL_ANNOTATION, RECORD_ANNOTATION};

/// Moves the changes of all rollouts to a DaemonSet to one of them: the first that sets an image or takes steps, or else the first
/// that has changes.
pub(super) fn one_write_for_each_object(snapshot: &ClusterSnapshot, planned: &mut [PlannedRollout]) {
    let mut objects: BTreeMap<(String, String), Vec<usize>> = BTreeMap::new();
    for (index, rollout) in planned.iter().enumerate().filter(|(_, rollout)| !rollout.changes.is_empty()) {
        if let Some((namespace, name)) = rollout.target.live_daemon_set() {
            objects.entry((namespace.to_owned(), name.to_owned())).or_default().push(index);
        }
    }
    for ((namespace, name), indices) in objects.into_iter().filter(|(_, indices)| indices.len() > 1) {
        let daemon_set = snapshot.daemon_set(&namespace, &name);
        let Some(live) = daemon_set.and_then(|daemon_set| daemon_set.live.as_ref()) else { continue };
        let mut merged: Vec<Change> = Vec::new();
        for index in &indices {
            let changes = std::mem::take(&mut planned[*index].changes);
            let has_restarts = merged.iter().any(|change| matches!(change, Change::Restart(_)));
            for change in changes {
                add(live, &mut merged, change, has_restarts);
            }
        }
        // A write that replaces the pods makes their restart unnecessary.
        if merged.iter().any(|change| matches!(change, Change::DaemonSet(_))) {
            merged.retain(|change| !matches!(change, Change::Restart(_)));
        }
        let first = indices.iter().find(|index| planned[**index].decision.is_change()).unwrap_or(&indices[0]);
        planned[*first].changes = merged;
    }
}

/// Adds a change of another rollout. Only one rollout restarts pods at a time: each by itself restarts as many pods as may be
/// unavailable.
fn add(live: &LiveDaemonSet, merged: &mut Vec<Change>, change: Change, has_restarts: bool) {
    let change = match change {
        Change::Restart(_) if has_restarts => return,
        Change::DaemonSet(change) => {
            let existing = merged.iter_mut().find_map(|other| match other {
                Change::DaemonSet(other) => Some(other),
                _ => None,
            });
            match existing {
                Some(other) => return join(live, other, change),
                None => Change::DaemonSet(change),
            }
        }
        other => other,
    };
    if !merged.contains(&change) {
        merged.push(change);
    }
}

/// Adds the fields of a change to another change of the same DaemonSet.
fn join(live: &LiveDaemonSet, into: &mut DaemonSetChange, change: DaemonSetChange) {
    let DaemonSetChange { expected, images, affinity, annotations, required_images, .. } = change;
    for (container, image) in images {
        if expected.get(&container) != Some(&image) || !into.images.contains_key(&container) {
            into.images.insert(container, image);
        }
    }
    into.expected.extend(expected);
    if annotations.get(PER_KERNEL_ANNOTATION) != live.annotations.get(PER_KERNEL_ANNOTATION) {
        into.affinity = affinity;
    }
    into.required_images.extend(required_images);
    // The later change wins where it differs from the cluster.
    let before = RewriteRecord::of(&live.annotations).unwrap_or_default();
    let mut record = RewriteRecord::of(&into.annotations).unwrap_or_default();
    for (field, entry) in RewriteRecord::of(&annotations).unwrap_or_default().0 {
        if before.0.get(&field) != Some(&entry) {
            record.0.insert(field, entry);
        }
    }
    for key in live.annotations.keys().filter(|key| !annotations.contains_key(*key)) {
        into.annotations.remove(key);
    }
    let changed = annotations.into_iter().filter(|(key, value)| live.annotations.get(key) != Some(value));
    into.annotations.extend(changed.filter(|(key, _)| key != RECORD_ANNOTATION));
    into.annotations = record.annotations(&into.annotations);
}

#[cfg(test)]
mod tests;
