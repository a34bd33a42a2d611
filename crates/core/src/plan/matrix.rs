//! Pure: the images that each kernel target calls for, and the outcome of each.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use serde::Serialize;

use super::{
    Cell, NodeFacts, NodeReason, Outcome, PendingLookups, PlanInputs, PlannedCell, SkipReason,
    decide::decide,
    new_cell::CellRequest,
    node::{NodeGroup, group_nodes},
    outcome::Key,
    skip_reason::explained,
};
use crate::{
    image::{Chains, DriverImage, ImageName, ImageReference, Need},
    kernel::{Architecture, KernelTarget},
    template::Templates,
};

/// Driver images x kernel targets, limited to the pairs that nodes or announcements demand.
#[derive(Default)]
pub(super) struct Matrix {
    /// Cells in dependency order. The cells of one image are adjacent.
    pub(super) cells: Vec<PlannedCell>,
    /// Nodes that the plan skips, because they have no usable kernel target.
    pub(super) left_alone: Vec<SkippedNode>,
    /// Nodes with their own driver, sorted by image, then target.
    pub(super) own_drivers: Vec<OwnDriver>,
    /// Lookups whose results the final matrix needs.
    pub(super) lookups: PendingLookups,
}

/// Node that the plan skips, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SkippedNode {
    /// Name of the node.
    pub node: String,
    /// Reason for skipping the node.
    #[serde(serialize_with = "explained")]
    pub why: NodeReason,
}

/// Nodes that match an image but bring their own driver, as one of their labels says.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, derive_more::Display)]
#[serde(rename_all = "camelCase")]
#[display("has its own driver: label {label}={value}")]
pub struct OwnDriver {
    /// Image that the nodes match.
    pub image: ImageName,
    /// Kernel target of the nodes.
    pub target: KernelTarget,
    /// Label that marks the nodes.
    pub label: String,
    /// Value of the label.
    pub value: String,
    /// Names of the nodes.
    pub nodes: Vec<String>,
}

/// Computes the matrix. Images without demand have no cells.
pub(super) fn matrix(inputs: &PlanInputs<'_>, chains: &Chains) -> Matrix {
    let images = &inputs.definitions().images;
    let labels = images.values().flat_map(|image| image.spec.nodes.keys());
    let groups = group_nodes(&inputs.snapshot.nodes, labels);

    let mut matrix = Matrix { own_drivers: own_drivers(images, &groups), ..Matrix::default() };
    for group in &groups {
        if let Err(why) = &group.target
            && group.sample.ignored_by.is_none()
        {
            let skipped = |node: &&NodeFacts| SkippedNode { node: node.name.clone(), why: why.clone() };
            matrix.left_alone.extend(group.nodes.iter().map(skipped));
        }
    }
    matrix.left_alone.sort_by(|a, b| (&a.node, &a.why).cmp(&(&b.node, &b.why)));

    let demands = demands(inputs, chains, &groups);
    let mut templates = Templates::default();
    let mut indices: HashMap<Key<'_>, usize> = HashMap::new();
    for name in chains.order() {
        let (Some(image), Some((name, demands))) = (images.get(name), demands.get_key_value(name)) else {
            continue;
        };
        let planned = |need: &ImageName, target: &KernelTarget| {
            indices.get(&(need, target)).and_then(|index| matrix.cells.get(*index))
        };
        let cells = plan_cells(inputs, planned, &mut templates, image, demands, &mut matrix.lookups);
        let first = matrix.cells.len();
        indices.extend(demands.keys().zip(first..).map(|(target, index)| ((*name, *target), index)));
        matrix.cells.extend(cells);
    }
    matrix
}

/// Returns the nodes that match an image but bring their own driver.
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

/// Plans one cell of an image for each target in `demands`, in the same order. `planned` looks up a cell that was planned
/// earlier.
fn plan_cells<'a>(
    inputs: &PlanInputs<'_>,
    planned: impl Fn(&ImageName, &KernelTarget) -> Option<&'a PlannedCell>,
    templates: &mut Templates,
    image: &DriverImage,
    demands: &BTreeMap<&KernelTarget, Demand<'_>>,
    lookups: &mut PendingLookups,
) -> Vec<PlannedCell> {
    let name = &image.metadata.name;
    let mut cells: Vec<Result<Cell, Outcome>> = Vec::with_capacity(demands.len());
    for (target, demand) in demands {
        let request = CellRequest { inputs: inputs.cells, image, target };
        let needs = request.needs(|need| planned(need, target));
        let cell = needs.and_then(|needs| Ok(request.cell(templates, needs)?));
        cells.push(cell.map(|cell| {
            let mut nodes: Vec<String> = demand.nodes.iter().map(|node| node.name.clone()).collect();
            nodes.sort_unstable();
            Cell {
                announced_by: inputs.announced.announcers_of(target, name),
                nodes,
                needed_by: demand.needed_by.iter().map(|name| (*name).clone()).collect(),
                ..cell
            }
        }));
    }
    let collisions = collisions(&cells, demands);
    let outcome = |(cell, collision): (Result<Cell, Outcome>, Option<SkipReason>)| match (cell, collision) {
        (Ok(_), Some(why)) => why.into(),
        (Ok(cell), None) => decide(inputs, image, &Arc::new(cell), lookups),
        (Err(outcome), _) => outcome,
    };
    let outcomes: Vec<Outcome> = cells.into_iter().zip(collisions).map(outcome).collect();
    let planned = |((target, demand), outcome): ((&&KernelTarget, &Demand<'_>), Outcome)| PlannedCell {
        image: name.clone(),
        target: (*target).clone(),
        outcome,
        nodes: demand.nodes.len(),
        announced_by: inputs.announced.announcers_of(target, name),
    };
    demands.iter().zip(outcomes).map(planned).collect()
}

/// Nodes and dependents that demand an image on one kernel.
#[derive(Default)]
struct Demand<'a> {
    /// Nodes that run the kernel and match the image.
    nodes: Vec<&'a NodeFacts>,
    /// Images that are compiled against this image and are in demand themselves.
    needed_by: Vec<&'a ImageName>,
    /// Whether a node that runs the kernel demands one of the `needed_by` images.
    needed_live: bool,
}

impl Demand<'_> {
    fn is_live(&self) -> bool {
        self.needed_live || !self.nodes.is_empty()
    }
}

/// Returns the demand for each image on each kernel. Demand comes from nodes, from announcements, and from images that are
/// compiled against the image.
fn demands<'a>(
    inputs: &PlanInputs<'a>,
    chains: &Chains,
    groups: &'a [NodeGroup<'a>],
) -> HashMap<&'a ImageName, BTreeMap<&'a KernelTarget, Demand<'a>>> {
    let (definitions, announced) = (inputs.cells.definitions, inputs.announced);
    let mut demands: HashMap<&ImageName, BTreeMap<&KernelTarget, Demand<'_>>> = HashMap::new();
    // Dependents first, because they add demand for the images they need.
    for name in chains.order().iter().rev() {
        let Some((name, image)) = definitions.images.get_key_value(name) else { continue };
        let own_demands = demands.entry(name).or_default();
        for target in announced.targets_for(name) {
            own_demands.entry(target).or_default();
        }
        let selector = &image.spec.nodes;
        for group in groups {
            let labels = &group.sample.labels;
            let (true, Ok(target)) = (selector.matches(labels), &group.target) else { continue };
            if selector.own_driver(labels).is_none() {
                own_demands.entry(target).or_default().nodes.extend(&group.nodes);
            }
        }
        // An image that is not built for a kernel needs no other images there.
        let buildable = |(target, demand): (&&'a KernelTarget, &Demand<'_>)| {
            let request = CellRequest { inputs: inputs.cells, image, target };
            request.family().is_ok().then_some((*target, demand.is_live()))
        };
        let needs: Vec<&ImageName> = image.spec.needs.iter().filter_map(Need::image).collect();
        let targets: Vec<_> =
            if needs.is_empty() { Vec::new() } else { own_demands.iter().filter_map(buildable).collect() };
        for need in needs {
            let Some((need, _)) = definitions.images.get_key_value(need).filter(|(need, _)| *need != name)
            else {
                continue;
            };
            let need_demands = demands.entry(need).or_default();
            for (target, is_live) in &targets {
                let demand = need_demands.entry(target).or_default();
                demand.needed_live |= is_live;
                demand.needed_by.push(name);
            }
        }
    }
    for demand in demands.values_mut().flat_map(BTreeMap::values_mut) {
        demand.needed_by.sort_unstable();
    }
    demands
}

/// Returns a skip reason for each cell whose tag collides with the tag of another cell.
///
/// Kernel labels are lossy, so two releases can share a tag. Neither cell may then be published, because one image would
/// replace the other or be mistaken for it. There are two exceptions:
///
/// - A kernel that is only announced yields to a kernel that a node runs: an announcement must not take a running node's
///   image away.
/// - Images for different architectures may share a tag, which then points to an index.
fn collisions(
    cells: &[Result<Cell, Outcome>],
    demands: &BTreeMap<&KernelTarget, Demand<'_>>,
) -> Vec<Option<SkipReason>> {
    let live: Vec<bool> = demands.values().map(Demand::is_live).collect();
    let mut cells_by_tag: HashMap<(&ImageReference, Architecture), Vec<usize>> = HashMap::new();
    for (index, cell) in
        cells.iter().enumerate().filter_map(|(index, cell)| Some((index, cell.as_ref().ok()?)))
    {
        for reference in cell.references() {
            cells_by_tag.entry((reference, cell.target.arch)).or_default().push(index);
        }
    }
    let collision = |(index, cell): (usize, &Result<Cell, Outcome>)| {
        let yields_to = |other: &&usize| **other != index && (!live[index] || live[**other]);
        let cell = cell.as_ref().ok()?;
        let ((reference, _), sharing) = cell
            .references()
            .filter_map(|reference| cells_by_tag.get_key_value(&(reference, cell.target.arch)))
            .find(|(_, sharing)| sharing.iter().any(|other| yields_to(&other)))?;
        let others = sharing.iter().filter(yields_to).filter_map(|other| cells[*other].as_ref().ok());
        let others = others.map(|other| other.target.to_string()).collect();
        Some(SkipReason::TagCollision { reference: (*reference).clone(), others })
    };
    cells.iter().enumerate().map(collision).collect()
}

#[cfg(test)]
mod tests;
