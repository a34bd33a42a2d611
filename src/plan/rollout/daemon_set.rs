//! Pure: the DaemonSet of a live cluster that a rollout changes in more than one field.

use std::collections::BTreeMap;

use super::{
    Context, DaemonSetFacts, HoldReason, RECORD_ANNOTATION, Record, RolloutObject, RolloutTarget,
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

/// Images that an earlier rollout set, with the annotation that says so. An apply that left them out would give them
/// up, and a container without an image is no container.
pub(super) fn image_record(
    found: &DaemonSetFacts,
    live: &LiveDaemonSet,
) -> (BTreeMap<String, String>, BTreeMap<String, String>) {
    let Some(text) = live.annotations.get(RECORD_ANNOTATION) else { return Default::default() };
    let record: Record = serde_json::from_str(text).unwrap_or_default();
    let ours = found.containers.iter().filter(|container| record.0.contains_key(&container.name));
    let images = ours.map(|container| (container.name.clone(), container.image.clone())).collect();
    (images, [(RECORD_ANNOTATION.to_owned(), text.clone())].into())
}
