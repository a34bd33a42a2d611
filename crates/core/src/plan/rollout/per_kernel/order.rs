//! Lets an upgrade process the nodes of a `per-kernel` rollout in order. A node gets the image of its kernel's copy
//! when it is handed over to the copy, or when its pod of the copy is replaced.

use super::{
    super::{
        copy::{CopyRecord, LiveCopy},
        handover::is_handed_over,
        upgrade::{have_same_modules, lacks_modules, plan_upgrade, pods_by_node},
        watch::is_same_image,
    },
    Context, Fleet,
};
use crate::plan::{DriverPod, NodeFacts, PlannedUpgrade, UpgradeNode, UpgradeNote};

/// Plans the upgrade of the rollout's nodes. There is no upgrade before the original has the fence, nor after a
/// person has rolled back the rollout.
pub(super) fn planned<'a>(context: &Context<'a>, fleet: &Fleet<'a>) -> Option<PlannedUpgrade> {
    let Fleet { original, members, .. } = fleet;
    if !original.is_fenced() || original.is_rolled_back() {
        return None;
    }
    let pods = pods_by_node(context.inputs.snapshot);
    let contents = &context.observed.contents;
    let reached = members.iter().map(|member| (member.node, member.target.as_ref().ok(), member.handed_over));
    let noted = fleet.undetermined.iter().filter(|node| UpgradeNote::of(node).is_some());
    let noted = noted.map(|node| (*node, None, is_handed_over(node, &original.label)));
    let nodes = reached.chain(noted).map(|(node, kernel, handed_over)| {
        let copy = kernel.and_then(|kernel| original.copies.get(kernel));
        // All containers have the same image, because only rollouts of one image share an upgrade.
        let image = |copy: &LiveCopy<'a>| copy.facts.image_of(fleet.containers.first()?);
        let target = match kernel {
            Some(_) => copy.filter(|copy| is_usable(fleet, copy, node)).and_then(image),
            // The node's note still counts while the labels of the node are missing.
            None => UpgradeNote::of(node)
                .and_then(|note| original.copies.values().filter_map(image).find(|image| note.to == *image)),
        };
        let target = target.unwrap_or_default();
        let owner = if handed_over { copy.map(|copy| copy.live) } else { Some(original.live) };
        let pod = owner.and_then(|live| pods.get(&(live.version.uid.as_str(), node.name.as_str())));
        let driver = pod.copied().map(|pod| {
            let is_current = |image: &str| {
                let has_same_modules =
                    |kernel| have_same_modules(kernel, contents.get(image), contents.get(target));
                handed_over && (is_same_image(image, target) || kernel.is_some_and(has_same_modules))
            };
            let lacks = |image: &str| lacks_modules(kernel, contents.get(image));
            DriverPod::of(pod, fleet.containers.iter().copied(), is_current, lacks)
        });
        UpgradeNode {
            target,
            hand_over: (!handed_over).then_some(original.label.as_str()),
            fits: kernel.map(|_| !target.is_empty()),
            ..UpgradeNode::of(node, driver)
        }
    });
    let live = original.copies.values().map(|copy| copy.live).chain([original.live]);
    let desired = live.map(|live| live.desired).sum();
    plan_upgrade(context, original.facts, original.live, desired, nodes.collect())
}

/// Whether the node may get the copy's pod.
fn is_usable(fleet: &Fleet<'_>, copy: &LiveCopy<'_>, node: &NodeFacts) -> bool {
    let has_failed = copy.record.as_ref().is_none_or(CopyRecord::is_failed);
    !copy.live.deleting
        && copy.belongs_to(fleet.original.live)
        && !has_failed
        && fleet.would_schedule(copy, node)
}
