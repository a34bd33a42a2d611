//! Pure: the first phase: which image each kernel target calls for.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::Arc,
};

use serde::Serialize;

use super::{
    AnnouncedBy, Announcements, Cell, CellInputs, ClusterSnapshot, NodeFacts, NodeReason, SkipReason,
    cell::{cell_with, family_for},
    needs::{self, NeedsFound, Outcome, Outcomes},
    node::TARGET_LABELS,
    node_target,
    skip_reason::explained,
};
use crate::{
    image::{Chains, DriverImage, ImageName, ImageReference, Need},
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
    /// What can be built, by image, then target; needs before those that are compiled against them.
    pub cells: Vec<Arc<Cell>>,
    /// What is called for and will be built when others are published.
    pub waiting: Vec<Waiting>,
    /// What is called for and cannot be built.
    pub skipped: Vec<Skipped>,
    /// Nodes whose kernel target is not known.
    pub left_alone: Vec<LeftAlone>,
    /// Nodes with a driver of their own, by image, then target.
    pub own_drivers: Vec<OwnDriver>,
    /// Who announced what.
    pub announced: Announcements,
}

/// An image that is called for and not built for one target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Skipped {
    /// The image.
    pub image: ImageName,
    /// The kernel target.
    pub target: KernelTarget,
    /// Why.
    #[serde(serialize_with = "explained")]
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
    pub image: ImageName,
    /// The kernel target.
    pub target: KernelTarget,
    /// Those that it waits for, themselves to be built or waiting.
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
    #[serde(serialize_with = "explained")]
    pub why: NodeReason,
}

/// Nodes that an image would be for, and that have a driver of their own: a label says so.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OwnDriver {
    /// The image.
    pub image: ImageName,
    /// What they run.
    pub target: KernelTarget,
    /// The label that says so.
    pub label: String,
    /// Its value.
    pub value: String,
    /// The nodes.
    pub nodes: Vec<String>,
}

impl fmt::Display for OwnDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "has its own driver: label {}={}", self.label, self.value)
    }
}

impl Waiting {
    /// `waits for mofed, nvidia-gpu`.
    pub fn why(&self) -> String {
        let needs: Vec<&str> = self.needs.iter().map(ImageName::as_str).collect();
        format!("waits for {}", needs.join(", "))
    }
}

impl Matrix {
    /// Does some node or announced kernel call for the image, whether or not it can be built?
    pub fn calls_for(&self, image: &ImageName) -> bool {
        let skipped = || self.skipped.iter().any(|skipped| skipped.image == *image);
        let waiting = || self.waiting.iter().any(|waiting| waiting.image == *image);
        self.cells.iter().any(|cell| cell.image == *image) || waiting() || skipped()
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
    let labels = images.values().flat_map(|image| image.spec.nodes.keys());
    let groups = group_nodes(&snapshot.nodes, labels);

    let mut matrix = Matrix { announced: (*announced).clone(), ..Matrix::default() };
    for group in &groups {
        if let Err(why) = &group.target {
            let left_alone = |node: &&NodeFacts| LeftAlone { node: node.name.clone(), why: why.clone() };
            matrix.left_alone.extend(group.nodes.iter().map(left_alone));
        }
    }
    matrix.left_alone.sort_by(|a, b| (&a.node, &a.why).cmp(&(&b.node, &b.why)));

    matrix.own_drivers = own_drivers(images, &groups);
    let chains = Chains::of(images);
    let calls = calls(inputs, &chains, &groups);
    let mut templates = Templates::default();
    let mut outcomes = Outcomes::new();
    for name in chains.order() {
        if let (Some(image), Some(calls)) = (images.get(name), calls.get(name)) {
            add_image(inputs, &mut matrix, &mut outcomes, &mut templates, image, calls);
        }
    }
    matrix.skipped.sort_by(|a, b| (&a.image, &a.target).cmp(&(&b.image, &b.target)));
    matrix
}

/// The nodes that images leave alone because they have a driver of their own.
fn own_drivers(images: &BTreeMap<ImageName, DriverImage>, groups: &[NodeGroup<'_>]) -> Vec<OwnDriver> {
    let mut found = Vec::new();
    for image in images.values() {
        let selector = &image.spec.nodes;
        for group in groups {
            let labels = &group.sample.labels;
            let (true, Ok(target)) = (selector.matches(labels), &group.target) else { continue };
            let Some((label, value)) = selector.own_driver(labels) else { continue };
            let mut nodes: Vec<String> = group.nodes.iter().map(|node| node.name.clone()).collect();
            nodes.sort_unstable();
            let (label, value) = (label.to_owned(), value.to_owned());
            let (image, target) = (image.metadata.name.clone(), target.clone());
            found.push(OwnDriver { image, target, label, value, nodes });
        }
    }
    found.sort();
    found
}

/// Adds what becomes of one image for every target that it is called for on.
fn add_image<'a>(
    inputs: &MatrixInputs<'_>,
    matrix: &mut Matrix,
    outcomes: &mut Outcomes<'a>,
    templates: &mut Templates,
    image: &'a DriverImage,
    calls: &BTreeMap<&'a KernelTarget, Call<'_>>,
) {
    let MatrixInputs { cells: cell_inputs, snapshot: _, announced } = inputs;
    let name = &image.metadata.name;
    let mut made = Vec::new();
    for (target, call) in calls {
        let nodes = call.nodes.len();
        let announced_by = announced.by_for(target, name);
        let made_cell = match needs::find(cell_inputs, outcomes, image, target) {
            Ok(NeedsFound::All(needs)) => cell_with(cell_inputs, templates, image, target, needs),
            Ok(NeedsFound::Missing(needs)) => {
                outcomes.insert((name, target), Outcome::Waiting);
                let (image, target) = (name.clone(), (*target).clone());
                matrix.waiting.push(Waiting { image, target, needs, nodes, announced_by });
                continue;
            }
            Err(why) => Err(why),
        };
        match made_cell {
            Ok(mut cell) => {
                cell.announced_by = announced_by;
                cell.nodes = call.nodes.iter().map(|node| node.name.clone()).collect();
                cell.nodes.sort_unstable();
                cell.needed_by = call.needed_by.iter().map(|name| (*name).clone()).collect();
                made.push((cell, call.is_live()));
            }
            Err(why) => {
                outcomes.insert((name, target), Outcome::Skipped(why.clone()));
                let (image, target) = (name.clone(), (*target).clone());
                matrix.skipped.push(Skipped { image, target, why, nodes, announced_by });
            }
        }
    }
    let (kept, collided) = without_collisions(made);
    for skipped in collided {
        if let Some((target, _)) = calls.get_key_value(&skipped.target) {
            outcomes.insert((name, *target), Outcome::Skipped(skipped.why.clone()));
        }
        matrix.skipped.push(skipped);
    }
    for cell in kept.into_iter().map(Arc::new) {
        if let Some((target, _)) = calls.get_key_value(&cell.target) {
            outcomes.insert((name, *target), Outcome::Cell(Arc::clone(&cell)));
        }
        matrix.cells.push(cell);
    }
}

/// Who calls for an image on one kernel.
#[derive(Default)]
struct Call<'a> {
    nodes: Vec<&'a NodeFacts>,
    /// Images that are compiled against it and called for themselves.
    needed_by: Vec<&'a ImageName>,
    /// Does a node run the kernel that calls for one of those?
    needed_live: bool,
}

impl Call<'_> {
    fn is_live(&self) -> bool {
        self.needed_live || !self.nodes.is_empty()
    }
}

/// Who calls for which image, on which kernel: nodes, announcements, and the images that are compiled against it.
fn calls<'a>(
    inputs: &MatrixInputs<'a>,
    chains: &Chains,
    groups: &'a [NodeGroup<'a>],
) -> HashMap<&'a ImageName, BTreeMap<&'a KernelTarget, Call<'a>>> {
    let MatrixInputs { cells: CellInputs { definitions, .. }, snapshot: _, announced } = *inputs;
    let mut calls: HashMap<&ImageName, BTreeMap<&KernelTarget, Call<'_>>> = HashMap::new();
    // Dependents first: they call for what they need.
    for name in chains.order().iter().rev() {
        let Some((name, image)) = definitions.images.get_key_value(name) else { continue };
        let own = calls.entry(name).or_default();
        for target in announced.targets_for(name) {
            own.entry(target).or_default();
        }
        let selector = &image.spec.nodes;
        for group in groups {
            let labels = &group.sample.labels;
            let (true, Ok(target)) = (selector.matches(labels), &group.target) else { continue };
            if selector.own_driver(labels).is_none() {
                own.entry(target).or_default().nodes.extend(&group.nodes);
            }
        }
        // An image that is not meant for a kernel asks nothing of others there.
        let meant = |(target, call): (&&'a KernelTarget, &Call<'_>)| {
            family_for(definitions, image, target).is_ok().then_some((*target, call.is_live()))
        };
        let needs: Vec<&ImageName> = image.spec.needs.iter().filter_map(Need::image).collect();
        let targets: Vec<_> =
            if needs.is_empty() { Vec::new() } else { own.iter().filter_map(meant).collect() };
        for need in needs {
            let Some((need, _)) = definitions.images.get_key_value(need).filter(|(need, _)| *need != name)
            else {
                continue;
            };
            let needed = calls.entry(need).or_default();
            for (target, live) in &targets {
                let call = needed.entry(target).or_default();
                call.needed_live |= live;
                call.needed_by.push(name);
            }
        }
    }
    for call in calls.values_mut().flat_map(BTreeMap::values_mut) {
        call.needed_by.sort_unstable();
    }
    calls
}

/// Labels are lossy: two releases can have one tag. Neither may then be published under it, because
/// whichever came second would be taken for, or replace, the first. A kernel that is only announced gives way
/// to one that a node runs: an announcement must not take a running node's image away.
fn without_collisions(cells: Vec<(Cell, bool)>) -> (Vec<Cell>, Vec<Skipped>) {
    let mut owners: HashMap<&ImageReference, Vec<&(Cell, bool)>> = HashMap::new();
    for owner in &cells {
        for reference in owner.0.references() {
            owners.entry(reference).or_default().push(owner);
        }
    }
    let gives_way = |(cell, live): &(Cell, bool), (other, other_live): &(Cell, bool)| {
        other.target != cell.target && (!live || *other_live)
    };
    let collisions: Vec<Option<SkipReason>> = cells
        .iter()
        .map(|cell| {
            let (reference, found) = cell
                .0
                .references()
                .filter_map(|reference| owners.get_key_value(reference))
                .find(|(_, found)| found.iter().any(|other| gives_way(cell, other)))?;
            let others = found.iter().filter(|other| gives_way(cell, other));
            let others = others.map(|(other, _)| other.target.to_string()).collect();
            Some(SkipReason::TagCollision { reference: (*reference).clone(), others })
        })
        .collect();
    let mut kept = Vec::new();
    let mut collided = Vec::new();
    for ((cell, _), collision) in cells.into_iter().zip(collisions) {
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
