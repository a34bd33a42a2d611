//! The nodes that a rollout reaches, and their kernels.

use std::collections::{BTreeMap, BTreeSet};

use super::{HoldReason, NodeGroup};
use crate::{
    kernel::{KernelTarget, OsVersion},
    plan::{
        NodeAffinity, NodeFacts, NodeReason, NotReadyNode, Placement, ReachingObject,
        reach::{MissingLabel, Reach},
    },
};

/// Returns the names of the nodes that an object reaches, or reaches once their labels are back.
pub(super) fn reached_nodes<'a>(
    object: &ReachingObject<'_>,
    groups: &'a [NodeGroup<'a>],
) -> BTreeSet<&'a str> {
    let reach = groups.iter().map(|group| object.reach_of_equal_nodes(&group.nodes));
    let nodes = reach.flat_map(|reach| reach.reached.into_iter().chain(reach.undetermined));
    nodes.map(|node| node.name.as_str()).collect()
}

/// Nodes by kernel.
pub(super) type NodesByKernel<'a> = BTreeMap<&'a KernelTarget, Vec<&'a NodeFacts>>;

/// Nodes that a rollout reaches.
#[derive(Default)]
pub(super) struct Reached<'a> {
    /// Nodes with a known kernel.
    pub(super) kernels: NodesByKernel<'a>,
    /// Nodes whose kernel is unknown.
    pub(super) unknown: Vec<(&'a NodeFacts, &'a NodeReason)>,
    /// Nodes that are reached once their labels are back.
    pub(super) undetermined: Vec<&'a NodeFacts>,
}

impl<'a> Reached<'a> {
    /// Returns the nodes that an object reaches, without those that no rollout waits for.
    pub(super) fn by(
        object: &ReachingObject<'_>,
        groups: impl IntoIterator<Item = &'a NodeGroup<'a>>,
    ) -> Self {
        let mut this = Self::default();
        for group in groups.into_iter().filter(|group| !group.blocks_no_rollout()) {
            let Reach { reached, undetermined } = object.reach_of_equal_nodes(&group.nodes);
            this.undetermined.extend(undetermined);
            match &group.target {
                _ if reached.is_empty() => {}
                Ok(kernel) => this.kernels.entry(kernel).or_default().extend(reached),
                Err(why) => this.unknown.extend(reached.into_iter().map(|node| (node, why))),
            }
        }
        this
    }

    /// Returns the reached nodes by kernel, for at least one kernel. Fails if a reached node's kernel is unknown, or if an
    /// undetermined node may run none of the returned kernels.
    pub(super) fn known(self) -> Result<NodesByKernel<'a>, HoldReason> {
        if let Some(why) = unknown_node(self.unknown.into_iter()) {
            return Err(why);
        }
        let runs_known_kernel = |node: &&NodeFacts| runs_one_of(&self.kernels, node);
        match unlabeled_node(self.undetermined.into_iter().filter(|node| !runs_known_kernel(node))) {
            Some(why) => Err(why),
            None if self.kernels.is_empty() => Err(HoldReason::NoNodes),
            None => Ok(self.kernels),
        }
    }
}

/// Whether a node without a known kernel target runs one of these kernels, by its nodeInfo. Systems can have kernels of one
/// release, so a node of the kernel must report the same system.
pub(super) fn runs_one_of(kernels: &NodesByKernel<'_>, node: &NodeFacts) -> bool {
    kernels.iter().any(|(kernel, nodes)| {
        let version = &kernel.os_version;
        kernel.release.as_str() == node.kernel_version
            && kernel.arch.as_str() == node.architecture
            && !node.os_image.is_empty()
            && nodes.iter().any(|known| system_of(known, version) == system_of(node, version))
    })
}

/// Returns a node's `osImage` up to this version: `Ubuntu 22.04` of `Ubuntu 22.04.4 LTS`, because point releases share their
/// kernels. Returns the whole text if the version is not in it.
fn system_of<'n>(node: &'n NodeFacts, version: &OsVersion) -> &'n str {
    let os_image = node.os_image.as_str();
    let end = os_image.find(version.as_str()).map(|start| start + version.as_str().len());
    let end = end.filter(|end| !os_image[*end..].starts_with(char::is_alphanumeric));
    end.map_or(os_image, |end| &os_image[..end])
}

/// Fails with a hold if the placement has an affinity that farrier does not support.
pub(super) fn check_supported(placement: &Placement) -> Result<(), HoldReason> {
    match &placement.affinity {
        NodeAffinity::Unsupported(detail) => Err(HoldReason::Affinity { detail: detail.clone() }),
        NodeAffinity::Any | NodeAffinity::Terms(_) => Ok(()),
    }
}

/// Returns the hold that names the first of these nodes and their number.
pub(super) fn unknown_node<'a>(
    nodes: impl Iterator<Item = (&'a NodeFacts, &'a NodeReason)> + Clone,
) -> Option<HoldReason> {
    let count = nodes.clone().count();
    let not_ready = NotReadyNode::first(nodes.clone().map(|(node, _)| node));
    let (node, why) = nodes.min_by_key(|(node, why)| (&node.name, *why))?;
    Some(HoldReason::UnknownNode {
        node: node.name.clone(),
        count,
        why: why.clone(),
        ready_since: node.ready_since(),
        not_ready,
    })
}

/// Returns the hold that names the first of these unlabeled nodes and their number.
pub(super) fn unlabeled_node<'a>(nodes: impl Iterator<Item = &'a NodeFacts>) -> Option<HoldReason> {
    let nodes: Vec<&NodeFacts> = nodes.collect();
    let first = nodes.iter().min_by_key(|node| &node.name)?;
    Some(HoldReason::Unlabeled {
        node: first.name.clone(),
        label: first.missing_label().unwrap_or(MissingLabel::Kernel),
        count: nodes.len(),
        kernel: first.kernel_version.chars().take(80).collect(),
        os_image: first.os_image.chars().take(80).collect(),
        ready_since: first.ready_since(),
        not_ready: NotReadyNode::first(nodes.iter().copied()),
    })
}
