//! The images that each kernel target calls for, and the names to look up for them.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use serde::Serialize;

use super::{
    Cell, ComparedMatrix, NodeFacts, NodeReason, Observed, Outcome, PlanInputs, PlannedCell, SkipReason,
    decide::compare,
    new_cell::{CellDraft, CellRequest},
    node::{NodeGroup, group_nodes},
    outcome::Key,
    skip_reason::serialize_reason,
    unused_image::UnusedImage,
};
use crate::{
    image::{Chains, DriverImage, ImageName, ImageReference, Need},
    kernel::{Architecture, KernelTarget},
    template::Templates,
};

/// Driver images x kernel targets, limited to the pairs that nodes or announcements demand. Nothing is known about the
/// registry yet.
pub struct Matrix<'a> {
    fixed: FixedParts<'a>,
    /// Rows in dependency order. A row has the cells of one image, sorted by target.
    rows: Vec<Vec<DraftedCell<'a>>>,
}

/// Parts of a matrix that no lookup changes.
pub(super) struct FixedParts<'a> {
    pub(super) inputs: PlanInputs<'a>,
    pub(super) chains: Chains,
    /// Nodes that the plan skips, because they have no usable kernel target.
    pub(super) skipped_nodes: Vec<SkippedNode>,
    /// Images that no node matches, in dependency order.
    pub(super) unused_images: Vec<UnusedImage>,
    /// Nodes with their own driver, sorted by image, then target.
    pub(super) own_drivers: Vec<OwnDriver>,
}

/// Cell of a [`Matrix`], with the reason if the definitions or the resolved inputs do not allow it.
struct DraftedCell<'a> {
    image: &'a DriverImage,
    target: KernelTarget,
    demand: Demand<'a>,
    draft: Result<CellDraft<'a>, SkipReason>,
}

impl DraftedCell<'_> {
    fn key(&self) -> Key<'_> {
        (&self.image.metadata.name, &self.target)
    }
}

/// Node that the plan skips, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SkippedNode {
    /// Name of the node.
    pub node: String,
    /// Reason for skipping the node.
    #[serde(serialize_with = "serialize_reason")]
    pub why: NodeReason,
}

/// Nodes that match an image and whose labels say that the host provides the driver.
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

impl<'a> Matrix<'a> {
    /// Makes the matrix. Images without demand have no cells.
    pub fn of(inputs: &PlanInputs<'a>) -> Self {
        let images = &inputs.cells.definitions.images;
        let chains = Chains::of(images);
        let labels = images.values().flat_map(|image| image.spec.nodes.keys());
        let groups = group_nodes(&inputs.snapshot.nodes, labels);
        let mut demands = demands(inputs, &chains, &groups);
        let mut templates = Templates::default();
        let mut rows: Vec<Vec<DraftedCell<'_>>> = Vec::new();
        let mut unused_images = Vec::new();
        for name in chains.order() {
            let (Some(image), Some(demands)) = (images.get(name), demands.remove(name)) else { continue };
            if demands.is_empty() {
                unused_images.extend(UnusedImage::of(name, &image.spec.nodes, &groups));
            }
            let drafted = |(target, demand): (&KernelTarget, Demand<'a>)| {
                let request = CellRequest { inputs: inputs.cells, image, target };
                let need_draft =
                    |need: &ImageName| find(&rows, (need, target), DraftedCell::key)?.draft.as_ref().ok();
                let versions = request.need_versions(need_draft);
                let draft = versions.and_then(|versions| request.draft(&mut templates, &versions));
                DraftedCell { image, target: target.clone(), demand, draft }
            };
            let row = demands.into_iter().map(drafted).collect();
            rows.push(row);
        }
        let own_drivers = own_drivers(images, &groups);
        let skipped_nodes = skipped_nodes(&groups);
        Self {
            fixed: FixedParts { inputs: *inputs, chains, skipped_nodes, unused_images, own_drivers },
            rows,
        }
    }

    /// Round 1: lists every name of every cell that the definitions and the resolved inputs allow. The cell's needs may be
    /// unpublished, because a name contains only their versions.
    pub fn images_to_look_up(&self) -> BTreeSet<ImageReference> {
        let drafts = self.rows.iter().flatten().filter_map(|cell| cell.draft.as_ref().ok());
        drafts.flat_map(|draft| &draft.references).cloned().collect()
    }

    /// Compares each cell with the registry.
    pub fn compare(self, observed: &Observed) -> ComparedMatrix<'a> {
        let mut rows = Vec::with_capacity(self.rows.len());
        for row in self.rows {
            let row = compare_row(&self.fixed.inputs, observed, row, &rows);
            rows.push(row);
        }
        ComparedMatrix { fixed: self.fixed, rows }
    }
}

/// Returns the cell of an image for a kernel, by binary search in the image's row.
pub(super) fn find<'c, C>(
    rows: &'c [Vec<C>],
    (image, target): Key<'_>,
    key: fn(&C) -> Key<'_>,
) -> Option<&'c C> {
    let row = rows.iter().find(|row| row.first().is_some_and(|cell| key(cell).0 == image))?;
    row.get(row.binary_search_by(|cell| key(cell).1.cmp(target)).ok()?)
}

/// Returns the nodes without a usable kernel target, except for ignored nodes and nodes that cannot have a driver.
fn skipped_nodes(groups: &[NodeGroup<'_>]) -> Vec<SkippedNode> {
    let mut skipped_nodes = Vec::new();
    for group in groups {
        if let Err(why) = &group.target
            && !matches!(why, NodeReason::Ignored { .. } | NodeReason::NotLinux { .. })
        {
            let skipped = |node: &&NodeFacts| SkippedNode { node: node.name.clone(), why: why.clone() };
            skipped_nodes.extend(group.nodes.iter().map(skipped));
        }
    }
    skipped_nodes.sort_by(|a, b| (&a.node, &a.why).cmp(&(&b.node, &b.why)));
    skipped_nodes
}

/// Returns the nodes that match an image but bring their own driver.
fn own_drivers(images: &BTreeMap<ImageName, DriverImage>, groups: &[NodeGroup<'_>]) -> Vec<OwnDriver> {
    let mut own_drivers = Vec::new();
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
            own_drivers.push(OwnDriver { image, target, label, value, nodes });
        }
    }
    own_drivers.sort();
    own_drivers
}

/// Compares the cells of one image with the registry. `earlier` has the cells of the images that come earlier in the order.
fn compare_row(
    inputs: &PlanInputs<'_>,
    observed: &Observed,
    row: Vec<DraftedCell<'_>>,
    earlier: &[Vec<PlannedCell>],
) -> Vec<PlannedCell> {
    let live: Vec<bool> = row.iter().map(|cell| cell.demand.is_live()).collect();
    let (mut cells, mut planned) = (Vec::with_capacity(row.len()), Vec::with_capacity(row.len()));
    for DraftedCell { image, target, demand, draft } in row {
        let request = CellRequest { inputs: inputs.cells, image, target: &target };
        let need = |need: &ImageName| find(earlier, (need, &target), PlannedCell::key);
        let needs = request.needs(&observed.published, need);
        let cell = needs.and_then(|needs| Ok(request.cell(draft?, needs)?));
        let announced_by = inputs.announced.announcers_of(&target, &image.metadata.name);
        cells.push(cell.map(|cell| {
            let mut nodes: Vec<String> = demand.nodes.iter().map(|node| node.name.clone()).collect();
            nodes.sort_unstable();
            let needed_by = demand.needed_by.into_iter().cloned().collect();
            Cell { announced_by: announced_by.clone(), nodes, needed_by, ..cell }
        }));
        planned.push((image, target, demand.nodes.len(), announced_by));
    }
    let collisions = collisions(&cells, &live);
    let mut compared = Vec::with_capacity(cells.len());
    for ((planned, cell), collision) in planned.into_iter().zip(cells).zip(collisions) {
        let (image, target, nodes, announced_by) = planned;
        let outcome = match (cell, collision) {
            (Ok(_), Some(why)) => why.into(),
            (Ok(cell), None) => compare(observed, image, &Arc::new(cell)),
            (Err(outcome), _) => outcome,
        };
        let image = image.metadata.name.clone();
        compared.push(PlannedCell { image, target, outcome, nodes, announced_by });
    }
    compared
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
    /// Whether a node that runs the kernel demands the image, directly or through a dependent.
    fn is_live(&self) -> bool {
        self.needed_live || !self.nodes.is_empty()
    }
}

/// Returns the demand for each image on each kernel. Demand comes from nodes, from announcements, and from images that are
/// compiled against the image.
fn demands<'g, 'a: 'g>(
    inputs: &PlanInputs<'a>,
    chains: &Chains,
    groups: &'g [NodeGroup<'a>],
) -> HashMap<&'a ImageName, BTreeMap<&'g KernelTarget, Demand<'a>>> {
    let (definitions, announced) = (inputs.cells.definitions, inputs.announced);
    let mut demands: HashMap<&ImageName, BTreeMap<&KernelTarget, Demand<'a>>> = HashMap::new();
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
        let buildable = |(target, demand): (&&'g KernelTarget, &Demand<'_>)| {
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
/// replace the other or be mistaken for it. `live` says which cells are in demand on a running kernel. There are two
/// exceptions:
///
/// - A kernel that is only announced yields to a kernel that a node runs: an announcement must not take a running node's
///   image away.
/// - Images for different architectures may share a tag, which then points to an index.
fn collisions(cells: &[Result<Cell, Outcome>], live: &[bool]) -> Vec<Option<SkipReason>> {
    let mut cells_by_tag: HashMap<(&ImageReference, Architecture), Vec<usize>> = HashMap::new();
    for (index, cell) in cells.iter().enumerate() {
        let Ok(cell) = cell else { continue };
        for reference in cell.references() {
            cells_by_tag.entry((reference, cell.target.arch)).or_default().push(index);
        }
    }
    let collision = |(index, cell): (usize, &Result<Cell, Outcome>)| {
        let yields_to = |other: &&usize| **other != index && (!live[index] || live[**other]);
        let cell = cell.as_ref().ok()?;
        for reference in cell.references() {
            let sharing = cells_by_tag.get(&(reference, cell.target.arch)).into_iter().flatten();
            let others = sharing.filter(yields_to).filter_map(|other| cells[*other].as_ref().ok());
            let others: Vec<String> = others.map(|other| other.target.to_string()).collect();
            if !others.is_empty() {
                return Some(SkipReason::TagCollision { reference: reference.clone(), others });
            }
        }
        None
    };
    cells.iter().enumerate().map(collision).collect()
}

#[cfg(test)]
mod tests;
