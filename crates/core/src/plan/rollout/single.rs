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
    fn has_name(&self, name: &Self::Name) -> bool;
    /// Returns the hold where no object has the name.
    fn not_found(name: &Self::Name, all: &[Self]) -> HoldReason;
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

    fn has_name(&self, name: &Self::Name) -> bool {
        self.is_named(name)
    }

    fn not_found(name: &Self::Name, all: &[Self]) -> HoldReason {
        let known = all.iter().map(|other| format!("{}/{}", other.namespace, other.name));
        let name = format!("{}/{}", &*name.namespace, &*name.daemon_set);
        HoldReason::NotFound { nearest: nearest(&name, known.collect()) }
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

    fn has_name(&self, name: &Self::Name) -> bool {
        self.is_named(name)
    }

    fn not_found(name: &Self::Name, all: &[Self]) -> HoldReason {
        let known = all.iter().filter(|other| other.kind == name.resource);
        let known = known.map(|other| other.name.clone()).collect();
        HoldReason::NoResource { nearest: nearest(&name.full_name(), known) }
    }
}

/// Returns the single object that a target names, in the cluster or in its manifests.
pub(super) fn single<'a, T: Object>(
    inputs: &PlanInputs<'a>,
    target: &RolloutTarget,
    name: &T::Name,
) -> Result<&'a T, HoldReason> {
    let (all, skipped) = match (&target.location, inputs.snapshot.unseen.get(&T::KIND)) {
        (None, Some(detail)) => return Err(HoldReason::Unseen { what: T::KIND, detail: detail.clone() }),
        (None, None) => (T::in_cluster(inputs.snapshot), &inputs.snapshot.skipped),
        (Some(location), _) => manifests(inputs, location).map(|all| (T::in_manifests(all), &all.skipped))?,
    };
    let mut objects = all.iter().filter(|object| object.has_name(name));
    match (objects.next(), objects.count()) {
        (None, _) => Err(missing(skipped).unwrap_or_else(|| T::not_found(name, all))),
        (Some(object), 0) => Ok(object),
        (Some(_), more) => Err(HoldReason::Ambiguous { count: more + 1 }),
    }
}

/// Returns the known object (`namespace/name`) that a mistyped name likely means: an object with a similar name, or with the
/// same name in another namespace.
fn nearest(name: &str, known: Vec<String>) -> Option<String> {
    let base_name = |name: &str| name.rsplit('/').next().map(str::to_owned);
    let similar = similar(name, known.iter().map(String::as_str)).map(str::to_owned);
    similar.or_else(|| known.into_iter().find(|known| base_name(known) == base_name(name)))
}

/// Returns the hold for an object that may be among the skipped files.
fn missing(skipped: &[String]) -> Option<HoldReason> {
    (!skipped.is_empty()).then(|| HoldReason::NotInManifests {
        skipped: skipped.iter().take(SHOWN).cloned().collect(),
        more: skipped.len().saturating_sub(SHOWN),
    })
}
