//! Finds the single object that a rollout names.

use farrier_yaml::similar;

use super::{DaemonSetFacts, HoldReason, PlanInputs, RolloutTarget, daemon_set::manifests};
use crate::{
    image::{DaemonSetContainer, ResourceName},
    plan::{ClusterSnapshot, ManifestFacts, ObservedKind, ResourceFacts},
};

/// Number of skipped files to name.
const SHOWN: usize = 3;

/// An object that a rollout can name.
pub(super) trait Object: Sized {
    /// Name in a rollout.
    type Name;
    const KIND: ObservedKind;

    fn in_cluster(snapshot: &ClusterSnapshot) -> &[Self];
    fn in_manifests(manifests: &ManifestFacts) -> &[Self];
    fn has_name(&self, wanted: &Self::Name) -> bool;
    /// Returns the hold where no object has the name.
    fn not_found(wanted: &Self::Name, all: &[Self]) -> HoldReason;
}

impl Object for DaemonSetFacts {
    type Name = DaemonSetContainer;
    const KIND: ObservedKind = ObservedKind::DaemonSets;

    fn in_cluster(snapshot: &ClusterSnapshot) -> &[Self] {
        &snapshot.daemon_sets
    }

    fn in_manifests(manifests: &ManifestFacts) -> &[Self] {
        &manifests.daemon_sets
    }

    fn has_name(&self, wanted: &Self::Name) -> bool {
        self.is_named(wanted)
    }

    fn not_found(wanted: &Self::Name, all: &[Self]) -> HoldReason {
        let known = all.iter().map(|found| format!("{}/{}", found.namespace, found.name));
        let wanted = format!("{}/{}", &*wanted.namespace, &*wanted.daemon_set);
        HoldReason::NotFound { nearest: nearest(&wanted, known.collect()) }
    }
}

impl Object for ResourceFacts {
    type Name = ResourceName;
    const KIND: ObservedKind = ObservedKind::Resources;

    fn in_cluster(snapshot: &ClusterSnapshot) -> &[Self] {
        &snapshot.resources
    }

    fn in_manifests(manifests: &ManifestFacts) -> &[Self] {
        &manifests.resources
    }

    fn has_name(&self, wanted: &Self::Name) -> bool {
        self.is_named(wanted)
    }

    fn not_found(wanted: &Self::Name, all: &[Self]) -> HoldReason {
        let known = all.iter().filter(|found| found.kind == wanted.resource);
        let known = known.map(|found| found.name.clone()).collect();
        HoldReason::NoResource { nearest: nearest(&wanted.full_name(), known) }
    }
}

/// Returns the single object that a target names, in the cluster or in its manifests.
pub(super) fn single<'a, T: Object>(
    inputs: &PlanInputs<'a>,
    target: &RolloutTarget,
    wanted: &T::Name,
) -> Result<&'a T, HoldReason> {
    let (all, skipped) = match (&target.place, inputs.snapshot.unseen.get(&T::KIND)) {
        (None, Some(detail)) => return Err(HoldReason::Unseen { what: T::KIND, detail: detail.clone() }),
        (None, None) => (T::in_cluster(inputs.snapshot), &inputs.snapshot.skipped),
        (Some(place), _) => manifests(inputs, place).map(|found| (T::in_manifests(found), &found.skipped))?,
    };
    let mut named = all.iter().filter(|found| found.has_name(wanted));
    match (named.next(), named.count()) {
        (None, _) => Err(missing(skipped).unwrap_or_else(|| T::not_found(wanted, all))),
        (Some(found), 0) => Ok(found),
        (Some(_), more) => Err(HoldReason::Ambiguous { count: more + 1 }),
    }
}

/// Returns the known object (`namespace/name`) that a mistyped name likely means. The object has a similar name, or the same name in
/// another namespace.
fn nearest(wanted: &str, known: Vec<String>) -> Option<String> {
    let last = |name: &str| name.rsplit('/').next().map(str::to_owned);
    let similar = similar(wanted, known.iter().map(String::as_str)).map(str::to_owned);
    similar.or_else(|| known.into_iter().find(|known| last(known) == last(wanted)))
}

/// Returns the hold for an object that may be among the skipped files.
fn missing(skipped: &[String]) -> Option<HoldReason> {
    (!skipped.is_empty()).then(|| HoldReason::NotInManifests {
        skipped: skipped.iter().take(SHOWN).cloned().collect(),
        more: skipped.len().saturating_sub(SHOWN),
    })
}
