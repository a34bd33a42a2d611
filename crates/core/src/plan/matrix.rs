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

/// Driver images x kernel targets, for the pairs that nodes or announcements call for.
#[derive(Default)]
pub(super) struct Matrix {
    /// Cells chain by chain: needs before their dependents, all kernels of an image together.
    pub(super) cells: Vec<PlannedCell>,
    /// Nodes without a known kernel target.
    pub(super) left_alone: Vec<LeftAlone>,
    /// Nodes with their own driver, by image, then target.
    pub(super) own_drivers: Vec<OwnDriver>,
    /// Lookups that are needed before the matrix is final.
    pub(super) questions: PendingLookups,
}

/// Node that is skipped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LeftAlone {
    /// Name of the node.
    pub node: String,
    /// Reason for skipping the node.
    #[serde(serialize_with = "explained")]
    pub why: NodeReason,
}

/// Nodes that match an image but bring their own driver, as a label shows.
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

/// Computes the matrix. Images that nothing calls for have no cells.
pub(super) fn matrix(inputs: &PlanInputs<'_>, chains: &Chains) -> Matrix {
    let images = &inputs.definitions().images;
    let labels = images.values().flat_map(|image| image.spec.nodes.keys());
    let groups = group_nodes(&inputs.snapshot.nodes, labels);

    let mut matrix = Matrix { own_drivers: own_drivers(images, &groups), ..Matrix::default() };
    for group in &groups {
        if let Err(why) = &group.target {
            let left_alone = |node: &&NodeFacts| LeftAlone { node: node.name.clone(), why: why.clone() };
            matrix.left_alone.extend(group.nodes.iter().map(left_alone));
        }
    }
    matrix.left_alone.sort_by(|a, b| (&a.node, &a.why).cmp(&(&b.node, &b.why)));

    let calls = calls(inputs, chains, &groups);
    let mut templates = Templates::default();
    let mut places: HashMap<Key<'_>, usize> = HashMap::new();
    for name in chains.order() {
        let (Some(image), Some((name, calls))) = (images.get(name), calls.get_key_value(name)) else {
            continue;
        };
        let planned = |need: &ImageName, target: &KernelTarget| {
            places.get(&(need, target)).and_then(|place| matrix.cells.get(*place))
        };
        let found = cells_of(inputs, planned, &mut templates, image, calls, &mut matrix.questions);
        places.extend(calls.keys().enumerate().map(|(n, target)| ((*name, *target), matrix.cells.len() + n)));
        matrix.cells.extend(found);
    }
    matrix
}

/// Returns the nodes that images skip because they bring their own driver.
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

/// Returns the planned cells of one image for every target that calls for it, in the order of the targets. `planned`
/// returns the cells of images that come earlier in the order.
fn cells_of<'a>(
    inputs: &PlanInputs<'_>,
    planned: impl Fn(&ImageName, &KernelTarget) -> Option<&'a PlannedCell>,
    templates: &mut Templates,
    image: &DriverImage,
    calls: &BTreeMap<&KernelTarget, Call<'_>>,
    questions: &mut PendingLookups,
) -> Vec<PlannedCell> {
    let name = &image.metadata.name;
    let mut made: Vec<Result<Cell, Outcome>> = Vec::with_capacity(calls.len());
    for (target, call) in calls {
        let request = CellRequest { inputs: inputs.cells, image, target };
        let needs = request.needs(|need| planned(need, target));
        let cell = needs.and_then(|needs| Ok(request.cell(templates, needs)?));
        made.push(cell.map(|cell| {
            let mut nodes: Vec<String> = call.nodes.iter().map(|node| node.name.clone()).collect();
            nodes.sort_unstable();
            Cell {
                announced_by: inputs.announced.by_for(target, name),
                nodes,
                needed_by: call.needed_by.iter().map(|name| (*name).clone()).collect(),
                ..cell
            }
        }));
    }
    let collisions = collisions(&made, calls);
    let outcome = |(made, collision): (Result<Cell, Outcome>, Option<SkipReason>)| match (made, collision) {
        (Ok(_), Some(why)) => why.into(),
        (Ok(cell), None) => decide(inputs, image, &Arc::new(cell), questions),
        (Err(outcome), _) => outcome,
    };
    let outcomes: Vec<Outcome> = made.into_iter().zip(collisions).map(outcome).collect();
    let planned = |((target, call), outcome): ((&&KernelTarget, &Call<'_>), Outcome)| PlannedCell {
        image: name.clone(),
        target: (*target).clone(),
        outcome,
        nodes: call.nodes.len(),
        announced_by: inputs.announced.by_for(target, name),
    };
    calls.iter().zip(outcomes).map(planned).collect()
}

/// Origins of the call for an image on one kernel.
#[derive(Default)]
struct Call<'a> {
    nodes: Vec<&'a NodeFacts>,
    /// Images that are compiled against the image and are themselves called for.
    needed_by: Vec<&'a ImageName>,
    /// Whether a node runs the kernel and calls for one of the `needed_by` images.
    needed_live: bool,
}

impl Call<'_> {
    fn is_live(&self) -> bool {
        self.needed_live || !self.nodes.is_empty()
    }
}

/// Returns which images are called for on which kernels, by nodes, by announcements, and by the images that are
/// compiled against them.
fn calls<'a>(
    inputs: &PlanInputs<'a>,
    chains: &Chains,
    groups: &'a [NodeGroup<'a>],
) -> HashMap<&'a ImageName, BTreeMap<&'a KernelTarget, Call<'a>>> {
    let (definitions, announced) = (inputs.cells.definitions, inputs.announced);
    let mut calls: HashMap<&ImageName, BTreeMap<&KernelTarget, Call<'_>>> = HashMap::new();
    // Dependents first, because they call for their needs.
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
        // An image that is not meant for a kernel calls for no needs there.
        let meant = |(target, call): (&&'a KernelTarget, &Call<'_>)| {
            let request = CellRequest { inputs: inputs.cells, image, target };
            request.family().is_ok().then_some((*target, call.is_live()))
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

/// Returns a skip reason for each cell whose tag collides with another cell's. Kernel labels are lossy, so two releases
/// can share a tag. Neither may then be published, because one image would replace the other or be mistaken for it. A
/// kernel that is only announced yields to a kernel that a node runs: an announcement must not take a running node's
/// image away. Images for different architectures may share a tag, which then points to an index.
fn collisions(
    made: &[Result<Cell, Outcome>],
    calls: &BTreeMap<&KernelTarget, Call<'_>>,
) -> Vec<Option<SkipReason>> {
    let live: Vec<bool> = calls.values().map(Call::is_live).collect();
    let mut owners: HashMap<(&ImageReference, Architecture), Vec<usize>> = HashMap::new();
    for (place, cell) in
        made.iter().enumerate().filter_map(|(place, cell)| Some((place, cell.as_ref().ok()?)))
    {
        for reference in cell.references() {
            owners.entry((reference, cell.target.arch)).or_default().push(place);
        }
    }
    let collision = |(place, cell): (usize, &Result<Cell, Outcome>)| {
        let gives_way = |other: &&usize| **other != place && (!live[place] || live[**other]);
        let cell = cell.as_ref().ok()?;
        let ((reference, _), found) = cell
            .references()
            .filter_map(|reference| owners.get_key_value(&(reference, cell.target.arch)))
            .find(|(_, found)| found.iter().any(|other| gives_way(&other)))?;
        let others = found.iter().filter(gives_way).filter_map(|other| made[*other].as_ref().ok());
        let others = others.map(|other| other.target.to_string()).collect();
        Some(SkipReason::TagCollision { reference: (*reference).clone(), others })
    };
    made.iter().enumerate().map(collision).collect()
}

#[cfg(test)]
mod tests;
