//! Pure: which states of an object are one and the same for a plan, and which of two is newer.

use std::collections::BTreeMap;

use super::{SAME, Tracked};
use crate::plan::{DaemonSetFacts, ObjectVersion, ResourceFacts};

/// Keeps a state of an object; says whether a plan can tell it from the one before.
pub(super) fn track<K: Ord, T>(
    map: &mut BTreeMap<K, Tracked<T>>,
    key: K,
    facts: T,
    same: impl Fn(&T, &T) -> bool,
    version: impl Fn(&T) -> &ObjectVersion,
) -> bool {
    let present = version(&facts).resource_version.clone();
    match map.get_mut(&key) {
        Some(old) if same(&old.facts, &facts) => {
            if !old.same.contains(&present) {
                old.same.push_back(present);
                if old.same.len() > SAME {
                    old.same.pop_front();
                }
            }
            old.facts = facts;
            false
        }
        Some(_) | None => {
            map.insert(key, Tracked { facts, same: [present].into() });
            true
        }
    }
}

pub(super) fn same_resource(old: &ResourceFacts, new: &ResourceFacts) -> bool {
    let ResourceFacts { kind, name, version, annotations, spec } = old;
    (*kind, name, &version.uid) == (new.kind, &new.name, &new.version.uid)
        && (annotations, spec) == (&new.annotations, &new.spec)
}

/// The manifest is all there is, but for the version.
pub(super) fn same_daemon_set(old: &DaemonSetFacts, new: &DaemonSetFacts) -> bool {
    match (&old.live, &new.live) {
        (Some(old), Some(new)) => old.version.uid == new.version.uid && old.manifest == new.manifest,
        (None | Some(_), None) | (None, Some(_)) => false,
    }
}

/// Is the first state of the same object newer than the second?
pub(super) fn is_newer(known: &ObjectVersion, new: &ObjectVersion) -> bool {
    known.uid == new.uid && older(&new.resource_version, &known.resource_version)
}

/// Resource versions are comparable as numbers (KEP-5504). What is no number is taken for newer.
pub(super) fn older(version: &str, than: &str) -> bool {
    match (version.parse::<u128>(), than.parse::<u128>()) {
        (Ok(version), Ok(than)) => version < than,
        _ => false,
    }
}
