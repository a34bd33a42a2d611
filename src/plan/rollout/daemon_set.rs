//! Pure: the DaemonSet of a live cluster that a rollout changes in more than one field.

use super::{
    Context, DaemonSetFacts, HoldReason, RolloutObject, RolloutTarget,
    image::{find_daemon_set, remedy},
};
use crate::plan::{LiveDaemonSet, NodeAffinity};

/// The DaemonSet that a target names, with its container, where farrier may change it.
pub(super) fn original<'a>(
    context: &Context<'a>,
    target: &'a RolloutTarget,
) -> Result<(&'a DaemonSetFacts, &'a LiveDaemonSet, &'a str), HoldReason> {
    let found = find_daemon_set(context.inputs, target)?;
    let RolloutObject::DaemonSet { container: name, .. } = &target.object else {
        return Err(HoldReason::NotFound);
    };
    if found.containers.iter().filter(|container| container.name == *name).count() != 1 {
        let found = found.containers.iter().map(|container| container.name.clone()).collect();
        return Err(HoldReason::NoContainer { found });
    }
    if let Some(owner) = &found.owner {
        return Err(HoldReason::Owned { remedy: remedy(owner), owner: owner.clone() });
    }
    let live = found.live.as_ref().ok_or(HoldReason::OnlyLive)?;
    if live.deleting {
        return Err(HoldReason::Deleting);
    }
    if !context.inputs.pullable {
        return Err(HoldReason::NotPullable);
    }
    Ok((found, live, name))
}

/// Why it is not known which nodes a DaemonSet reaches.
pub(super) fn not_understood(found: &DaemonSetFacts) -> HoldReason {
    let detail = match &found.affinity {
        NodeAffinity::Unsupported(detail) => detail.clone(),
        NodeAffinity::Any | NodeAffinity::Terms(_) => "a field other than metadata.name".to_owned(),
    };
    HoldReason::Affinity { detail }
}
