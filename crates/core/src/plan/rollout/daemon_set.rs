//! Finds the DaemonSet that a target names, if farrier may change it.

use super::{
    Context, DaemonSetFacts, HoldReason, ManifestLocation, PlanInputs, RolloutObject, RolloutTarget,
    resource, single::single,
};
use crate::{
    image::OperatorResource,
    plan::{Container, LiveDaemonSet, ManifestFacts, Owner},
};

/// Container whose image a rollout sets, with its DaemonSet.
#[derive(Clone, Copy)]
pub(super) struct TargetContainer<'a> {
    pub(super) daemon_set: &'a DaemonSetFacts,
    pub(super) container: &'a Container,
}

/// Container whose image a rollout sets, with its DaemonSet in a live cluster.
#[derive(Clone, Copy)]
pub(super) struct LiveTarget<'a> {
    pub(super) daemon_set: &'a DaemonSetFacts,
    /// The live part of `daemon_set`.
    pub(super) live: &'a LiveDaemonSet,
    /// Name of the container.
    pub(super) container: &'a str,
}

/// Returns the target's DaemonSet and container, if farrier may set the image.
pub(super) fn target_container<'a>(
    inputs: &PlanInputs<'a>,
    target: &RolloutTarget,
) -> Result<TargetContainer<'a>, HoldReason> {
    let found @ TargetContainer { daemon_set, container } = named_container(inputs, target)?;
    if let Some(owner) = &daemon_set.owner {
        return Err(HoldReason::Owned { remedy: remedy(owner), owner: owner.clone() });
    }
    if let Some(detail) = &container.why_not_editable {
        return Err(HoldReason::Fixed { detail: detail.clone() });
    }
    if !inputs.cells.location.pullable {
        return Err(HoldReason::NotPullable);
    }
    Ok(found)
}

/// Returns the DaemonSet and the container that a target names.
fn named_container<'a>(
    inputs: &PlanInputs<'a>,
    target: &RolloutTarget,
) -> Result<TargetContainer<'a>, HoldReason> {
    let RolloutObject::DaemonSet(name) = &target.object else { return Err(HoldReason::NOT_FOUND) };
    let daemon_set: &DaemonSetFacts = single(inputs, target, name)?;
    let mut containers = daemon_set.containers.iter().filter(|container| container.name == *name.container);
    let (Some(container), None) = (containers.next(), containers.next()) else {
        let found = daemon_set.containers.iter().map(|container| container.name.clone()).collect();
        return Err(HoldReason::NoContainer { container: name.container.to_string(), found });
    };
    Ok(TargetContainer { daemon_set, container })
}

/// Returns the image in the field that a target names, if the object can be read.
pub(super) fn current_image(inputs: &PlanInputs<'_>, target: &RolloutTarget) -> Option<String> {
    let image = match &target.object {
        RolloutObject::DaemonSet(_) => named_container(inputs, target).ok()?.container.image.clone(),
        RolloutObject::Resource(name) => resource::current(single(inputs, target, name).ok()?),
        RolloutObject::Nothing {} => return None,
    };
    Some(image).filter(|image| !image.is_empty())
}

/// Returns the target's DaemonSet in a live cluster, for rollouts that change more than one field.
pub(super) fn live_target<'a>(
    context: &Context<'a>,
    target: &RolloutTarget,
) -> Result<LiveTarget<'a>, HoldReason> {
    let TargetContainer { daemon_set, container } = target_container(context.inputs, target)?;
    let live = daemon_set.live.as_ref().ok_or(HoldReason::OnlyLive)?;
    if live.deleting {
        return Err(HoldReason::Deleting);
    }
    Ok(LiveTarget { daemon_set, live, container: &container.name })
}

/// Returns the manifests that were read from a location.
pub(super) fn manifests<'a>(
    inputs: &PlanInputs<'a>,
    location: &ManifestLocation,
) -> Result<&'a ManifestFacts, HoldReason> {
    let unreadable = |detail| HoldReason::Unreadable { detail };
    let manifests =
        inputs.manifests.get(location).ok_or_else(|| unreadable(format!("{location} was not read")))?;
    manifests.as_ref().map_err(|detail| unreadable(detail.clone()))
}

/// Suggests an alternative to writing a DaemonSet that an operator owns.
fn remedy(owner: &Owner) -> String {
    let Owner { kind, name } = owner;
    match OperatorResource::TARGETS.into_iter().find(|known| known.kind() == kind) {
        Some(_) => format!(
            "roll it out with {{strategy: custom-resource, resource: {kind}, name: {name}}} instead of this entry"
        ),
        None => format!("change {kind} {name} instead"),
    }
}
