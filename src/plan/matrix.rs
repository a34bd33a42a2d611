//! Pure: the first phase: which image each kernel target calls for.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use serde::Serialize;

use super::{
    AnnouncedBy, Announcements, Cell, CellInputs, ClusterSnapshot, NodeFacts, NodeReason, SkipReason,
    cell_for, node_target,
};
use super::{node::TARGET_LABELS, text};
use crate::{
    image::{ImageName, ImageReference},
    kernel::KernelTarget,
    template::Templates,
};

/// What the matrix is made from.
#[derive(Clone, Copy, Debug)]
pub struct MatrixInputs<'a> {
    /// Definitions and what was found out about them.
    pub cells: CellInputs<'a>,
    /// The cluster.
    pub snapshot: &'a ClusterSnapshot,
    /// Announced kernels, made from the same snapshot.
    pub announced: &'a Announcements,
}

/// Driver images x kernel targets, as far as nodes or announcements call for them.
#[derive(Clone, Debug, Default)]
pub struct Matrix {
    /// What can be built, by image, then target.
    pub cells: Vec<Arc<Cell>>,
    /// What is called for and will be built when others are published.
    pub waiting: Vec<Waiting>,
    /// What is called for and cannot be built.
    pub skipped: Vec<Skipped>,
    /// Nodes whose kernel target is not known.
    pub left_alone: Vec<LeftAlone>,
    /// Who announced what.
    pub announced: Announcements,
}

/// An image that is called for and not built for one target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Skipped {
    /// The image.
    #[serde(serialize_with = "text::one")]
    pub image: ImageName,
    /// The kernel target.
    #[serde(serialize_with = "text::target")]
    pub target: KernelTarget,
    /// Why.
    #[serde(serialize_with = "text::explained")]
    pub why: SkipReason,
    /// How many nodes call for it.
    pub nodes: usize,
    /// Who announces the kernel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub announced_by: Vec<AnnouncedBy>,
}

/// An image that is compiled against others which are not published yet.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Waiting {
    /// The image.
    #[serde(serialize_with = "text::one")]
    pub image: ImageName,
    /// The kernel target.
    #[serde(serialize_with = "text::target")]
    pub target: KernelTarget,
    /// Those that it waits for.
    #[serde(serialize_with = "text::many")]
    pub needs: Vec<ImageName>,
    /// How many nodes call for it.
    pub nodes: usize,
    /// Who announces the kernel.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub announced_by: Vec<AnnouncedBy>,
}

/// A node that is left alone.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LeftAlone {
    /// The node.
    pub node: String,
    /// Why.
    #[serde(serialize_with = "text::explained")]
    pub why: NodeReason,
}

impl Matrix {
    /// Does some node or announced kernel call for the image, whether or not it can be built?
    pub fn calls_for(&self, image: &ImageName) -> bool {
        let skipped = || self.skipped.iter().any(|skipped| skipped.image == *image);
        self.cells.iter().any(|cell| cell.image == *image) || skipped()
    }
}

/// Nodes that are alike in every label that anybody asks for.
pub(super) struct NodeGroup<'a> {
    /// One of them: what holds for it holds for all, names apart.
    pub(super) sample: &'a NodeFacts,
    /// All of them.
    pub(super) nodes: Vec<&'a NodeFacts>,
    /// What they run.
    pub(super) target: Result<KernelTarget, NodeReason>,
}

/// Groups nodes by the labels of interest, so that what follows costs as much as there are different
/// nodes rather than as there are nodes.
pub(super) fn group_nodes<'a>(
    nodes: &'a [NodeFacts],
    labels: impl IntoIterator<Item = &'a str>,
) -> Vec<NodeGroup<'a>> {
    let labels: BTreeSet<&str> = TARGET_LABELS.into_iter().chain(labels).collect();
    let mut names: HashMap<&str, usize> = HashMap::with_capacity(nodes.len());
    for node in nodes {
        *names.entry(&node.name).or_default() += 1;
    }
    let mut places: HashMap<Vec<Option<&str>>, usize> = HashMap::new();
    let mut groups: Vec<NodeGroup<'a>> = Vec::new();
    let mut key = Vec::with_capacity(labels.len() + 3);
    for node in nodes {
        let twice = names.get(node.name.as_str()).is_some_and(|count| *count > 1);
        key.clear();
        key.push(Some(node.kernel_version.as_str()));
        key.push(Some(node.architecture.as_str()));
        key.push(twice.then_some("twice"));
        key.extend(labels.iter().map(|label| node.labels.get(*label).map(String::as_str)));
        let place = places.get(&key).copied().unwrap_or_else(|| {
            places.insert(key.clone(), groups.len());
            let target = if twice { Err(NodeReason::DefinedTwice) } else { node_target(node) };
            groups.push(NodeGroup { sample: node, nodes: Vec::new(), target });
            groups.len() - 1
        });
        groups[place].nodes.push(node);
    }
    groups
}

/// Which image each kernel target calls for. Images that no node calls for have no cells.
pub fn matrix(inputs: &MatrixInputs<'_>) -> Matrix {
    let MatrixInputs { cells: cell_inputs, snapshot, announced } = inputs;
    let images = &cell_inputs.definitions.images;
    let labels = images.values().flat_map(|i| i.spec.nodes.match_labels.keys().map(String::as_str));
    let groups = group_nodes(&snapshot.nodes, labels);

    let mut matrix = Matrix { announced: (*announced).clone(), ..Matrix::default() };
    for group in &groups {
        if let Err(why) = &group.target {
            let left_alone = |node: &&NodeFacts| LeftAlone { node: node.name.clone(), why: why.clone() };
            matrix.left_alone.extend(group.nodes.iter().map(left_alone));
        }
    }
    matrix.left_alone.sort_by(|a, b| (&a.node, &a.why).cmp(&(&b.node, &b.why)));

    let mut cells = Vec::new();
    let mut templates = Templates::default();
    for image in images.values() {
        let selector = &image.spec.nodes.match_labels;
        let mut wanted: BTreeMap<&KernelTarget, Vec<&NodeFacts>> =
            announced.targets_for(&image.metadata.name).map(|target| (target, Vec::new())).collect();
        for group in &groups {
            let selected = selector.iter().all(|(key, value)| group.sample.labels.get(key) == Some(value));
            if let (true, Ok(target)) = (selected, &group.target) {
                wanted.entry(target).or_default().extend(&group.nodes);
            }
        }
        for (target, nodes) in wanted {
            let announced_by = announced.by_for(target, &image.metadata.name);
            match cell_for(cell_inputs, &mut templates, image, target) {
                Ok(mut cell) => {
                    cell.announced_by = announced_by;
                    cell.nodes = nodes.iter().map(|node| node.name.clone()).collect();
                    cell.nodes.sort_unstable();
                    cells.push(cell);
                }
                Err(why) => matrix.skipped.push(Skipped {
                    image: image.metadata.name.clone(),
                    target: target.clone(),
                    why,
                    nodes: nodes.len(),
                    announced_by,
                }),
            }
        }
    }
    let (cells, collided) = without_collisions(cells);
    matrix.cells = cells.into_iter().map(Arc::new).collect();
    matrix.skipped.extend(collided);
    matrix.skipped.sort_by(|a, b| (&a.image, &a.target).cmp(&(&b.image, &b.target)));
    matrix
}

/// Labels are lossy: two releases can have one tag. Neither may then be published under it, because
/// whichever came second would be taken for, or replace, the first. A kernel that is only announced gives way
/// to one that a node runs: an announcement must not take a running node's image away.
fn without_collisions(cells: Vec<Cell>) -> (Vec<Cell>, Vec<Skipped>) {
    let mut owners: HashMap<&ImageReference, Vec<&Cell>> = HashMap::new();
    for cell in &cells {
        for reference in cell.references() {
            owners.entry(reference).or_default().push(cell);
        }
    }
    let gives_way = |cell: &Cell, other: &Cell| {
        other.target != cell.target && (cell.nodes.is_empty() || !other.nodes.is_empty())
    };
    let collisions: Vec<Option<SkipReason>> = cells
        .iter()
        .map(|cell| {
            let (reference, found) = cell
                .references()
                .filter_map(|reference| owners.get_key_value(reference))
                .find(|(_, found)| found.iter().any(|other| gives_way(cell, other)))?;
            let others = found.iter().filter(|other| gives_way(cell, other));
            let others = others.map(|other| other.target.to_string()).collect();
            Some(SkipReason::TagCollision { reference: (*reference).clone(), others })
        })
        .collect();
    let mut kept = Vec::new();
    let mut collided = Vec::new();
    for (cell, collision) in cells.into_iter().zip(collisions) {
        match collision {
            None => kept.push(cell),
            Some(why) => {
                let Cell { image, target, nodes, announced_by, .. } = cell;
                collided.push(Skipped { image, target, why, nodes: nodes.len(), announced_by });
            }
        }
    }
    (kept, collided)
}

#[cfg(test)]
mod tests;
