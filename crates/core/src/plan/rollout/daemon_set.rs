//! Finds the DaemonSet that a target names, if farrier may change it.

use farrier_yaml::similar;

use super::{
    Context, DaemonSetFacts, HoldReason, ManifestLocation, PlanInputs, RolloutObject, RolloutTarget,
};
use crate::{
    image::OperatorResource,
    plan::{Container, LiveDaemonSet, ManifestFacts, ObservedKind, Owner},
};

/// Number of skipped files to name.
const SHOWN: usize = 3;

#[derive(Clone, Copy)]
pub(super) struct Named<'a> {
    pub(super) daemon_set: &'a DaemonSetFacts,
    pub(super) container: &'a Container,
}

/// Returns the target's DaemonSet and container, if farrier may set the image.
pub(super) fn named<'a>(inputs: &PlanInputs<'a>, target: &RolloutTarget) -> Result<Named<'a>, HoldReason> {
    let RolloutObject::DaemonSet(wanted) = &target.object else { return Err(HoldReason::NOT_FOUND) };
    let daemon_set = single(
        inputs,
        target,
        ObservedKind::DaemonSets,
        &inputs.snapshot.daemon_sets,
        |found| &found.daemon_sets,
        |found| found.is_named(wanted),
        |all| {
            let known = all.iter().map(|found| format!("{}/{}", found.namespace, found.name));
            let wanted = format!("{}/{}", &*wanted.namespace, &*wanted.daemon_set);
            HoldReason::NotFound { nearest: nearest(&wanted, known.collect()) }
        },
    )?;
    let mut containers = daemon_set.containers.iter().filter(|found| found.name == *wanted.container);
    let (Some(container), None) = (containers.next(), containers.next()) else {
        let found = daemon_set.containers.iter().map(|container| container.name.clone()).collect();
        return Err(HoldReason::NoContainer { container: wanted.container.to_string(), found });
    };
    if let Some(owner) = &daemon_set.owner {
        return Err(HoldReason::Owned { remedy: remedy(owner), owner: owner.clone() });
    }
    if let Some(detail) = &container.fixed {
        return Err(HoldReason::Fixed { detail: detail.clone() });
    }
    if !inputs.cells.location.pullable {
        return Err(HoldReason::NotPullable);
    }
    Ok(Named { daemon_set, container })
}

/// Returns the target's DaemonSet in a live cluster, for rollouts that change more than one field.
pub(super) fn original<'a>(
    context: &Context<'a>,
    target: &RolloutTarget,
) -> Result<(&'a DaemonSetFacts, &'a LiveDaemonSet, &'a str), HoldReason> {
    let Named { daemon_set, container } = named(context.inputs, target)?;
    let live = daemon_set.live.as_ref().ok_or(HoldReason::OnlyLive)?;
    if live.deleting {
        return Err(HoldReason::Deleting);
    }
    Ok((daemon_set, live, &container.name))
}

/// Returns the single object that a target names, in the cluster or in its manifests. `live` are the cluster's objects;
/// `not_found` gets the candidates.
pub(super) fn single<'a, T>(
    inputs: &PlanInputs<'a>,
    target: &RolloutTarget,
    what: ObservedKind,
    live: &'a [T],
    of_manifests: fn(&'a ManifestFacts) -> &'a [T],
    is_named: impl Fn(&T) -> bool,
    not_found: impl FnOnce(&[T]) -> HoldReason,
) -> Result<&'a T, HoldReason> {
    let (candidates, skipped) = match (&target.place, inputs.snapshot.unseen.get(&what)) {
        (None, Some(detail)) => return Err(HoldReason::Unseen { what, detail: detail.clone() }),
        (None, None) => (live, &inputs.snapshot.skipped),
        (Some(place), _) => manifests(inputs, place).map(|found| (of_manifests(found), &found.skipped))?,
    };
    let mut named = candidates.iter().filter(|found| is_named(found));
    match (named.next(), named.count()) {
        (None, _) => Err(missing(skipped).unwrap_or_else(|| not_found(candidates))),
        (Some(found), 0) => Ok(found),
        (Some(_), more) => Err(HoldReason::Ambiguous { count: more + 1 }),
    }
}

/// Returns the known object (`namespace/name`) that a mistyped name likely means. The object has a similar name, or the same name in
/// another namespace.
pub(super) fn nearest(wanted: &str, known: Vec<String>) -> Option<String> {
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

/// Returns the manifests that were read from a place.
pub(super) fn manifests<'a>(
    inputs: &PlanInputs<'a>,
    place: &ManifestLocation,
) -> Result<&'a ManifestFacts, HoldReason> {
    let unreadable = |detail| HoldReason::Unreadable { detail };
    let read = inputs.manifests.get(place).ok_or_else(|| unreadable(format!("{place} was not read")))?;
    read.as_ref().map_err(|detail| unreadable(detail.clone()))
}

/// Suggests an alternative to writing a DaemonSet that an operator owns.
fn remedy(owner: &Owner) -> String {
    let Owner { kind, name } = owner;
    match OperatorResource::ALL.into_iter().find(|known| known.kind() == kind) {
        Some(_) => format!(
            "roll it out with {{strategy: custom-resource, resource: {kind}, name: {name}}} instead of this entry"
        ),
        None => format!("change {kind} {name} instead"),
    }
}
