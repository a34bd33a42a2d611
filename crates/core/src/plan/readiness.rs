//! Pure: may a node boot its next kernel? It may when every image that it will need is published and passed its
//! check. Automation that upgrades kernels waits for the label that says so.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use serde::Serialize;

use super::{
    Change, NEXT_KERNEL_ANNOTATION, NodeChange, NodeFacts, PlanInputs, Platform, READY_FOR,
    guarantee::{MadeFor, passing},
    outcome::{Cells, State},
};
use crate::{
    image::{DriverImage, ImageName, ImageReference},
    kernel::{KernelLabel, KernelTarget},
    kmod::Verdict,
};

/// How one image stands that a node will need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "state")]
pub enum Readiness {
    /// Published, and its modules load as far as its definition wants that known.
    Ready {
        /// What its check said.
        verdict: Verdict,
    },
    /// Not there, or not fit.
    Missing {
        /// Why.
        message: String,
    },
    /// The registry did not say.
    Unknown {
        /// Why not.
        message: String,
    },
}

/// One image that nodes will need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Needed {
    /// The image.
    pub image: ImageName,
    /// Its name, where it has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reference: Option<ImageReference>,
    /// How it stands.
    #[serde(flatten)]
    pub state: Readiness,
}

/// A kernel that nodes are to boot, with what they will need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Next {
    /// The kernel.
    pub kernel: KernelTarget,
    /// The images, in name order.
    pub needs: Vec<Needed>,
}

impl Next {
    /// Is everything there?
    pub fn is_ready(&self) -> bool {
        self.needs.iter().all(|needed| matches!(needed.state, Readiness::Ready { .. }))
    }

    /// Is nothing known to be missing, and something not known?
    fn is_unknown(&self) -> bool {
        let mut states = self.needs.iter().map(|needed| &needed.state);
        !self.is_ready() && !states.any(|state| matches!(state, Readiness::Missing { .. }))
    }
}

/// A node with a next kernel, or with a mark that it has no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedNode {
    /// The node.
    pub node: String,
    /// What it is to boot; `None` where it is not announced any more.
    #[serde(serialize_with = "shared", skip_serializing_if = "Option::is_none")]
    pub next: Option<Arc<Next>>,
    /// May it?
    pub ready: bool,
    /// What is written to it; `None` where it says the right thing already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
}

#[expect(clippy::ref_option, reason = "serde hands over the field as it is")]
fn shared<S: serde::Serializer>(next: &Option<Arc<Next>>, serializer: S) -> Result<S::Ok, S::Error> {
    next.as_deref().serialize(serializer)
}

/// What every node's mark should be.
pub(super) fn nodes(inputs: &PlanInputs<'_>, cells: Cells<'_>) -> Vec<PlannedNode> {
    let images: Vec<&DriverImage> = inputs.definitions().images.values().collect();
    let mut judged: HashMap<(KernelTarget, Vec<bool>), Arc<Next>> = HashMap::new();
    let mut planned = Vec::new();
    for node in &inputs.snapshot.nodes {
        // Labels that are away for a while, as when NFD restarts, say nothing about what was published.
        if node.annotations.contains_key(NEXT_KERNEL_ANNOTATION) && Platform::of(node).is_none() {
            continue;
        }
        let Some(target) = inputs.announced.next_of(node) else {
            planned.extend(planned_node(node, None));
            continue;
        };
        let called: Vec<bool> = images.iter().map(|image| node.calls_for(image)).collect();
        let next = judged.entry((target, called)).or_insert_with_key(|(target, called)| {
            let called_for = images.iter().zip(called).filter(|(_, called)| **called);
            let needs = called_for.map(|(image, _)| needed(inputs, &cells, image, target)).collect();
            Arc::new(Next { kernel: target.clone(), needs })
        });
        planned.extend(planned_node(node, Some(Arc::clone(next))));
    }
    if inputs.snapshot.read_only_nodes {
        planned.retain(|node| node.next.is_some());
        for node in &mut planned {
            node.change = None;
        }
    }
    planned
}

/// How an image stands that a node will need for a kernel.
fn needed(inputs: &PlanInputs<'_>, cells: &Cells<'_>, image: &DriverImage, target: &KernelTarget) -> Needed {
    let name = &image.metadata.name;
    let missing = |message: &str| Readiness::Missing { message: message.to_owned() };
    let (cell, state) = match cells.state(name, target) {
        State::Published(cell, _) if !inputs.cells.location.pullable => {
            (Some(cell), missing("images go to a layout directory, from which no node can pull"))
        }
        State::Published(cell, found) => {
            let kernel = MadeFor::Kernel(target);
            let state = match (passing(inputs, name, found, &cell.reference, kernel), found.verdict) {
                (Ok(_), Some(verdict)) => Readiness::Ready { verdict },
                (Ok(_), None) => missing("it has no check report"),
                (Err(why), _) => missing(&why.to_string()),
            };
            (Some(cell), state)
        }
        State::Building(cell) => (Some(cell), missing("it is still to be built")),
        State::Absent(_) if cells.get(name, target).is_none() => {
            (None, missing("no image is planned for this kernel"))
        }
        State::Absent(absence) if absence.unknown => {
            (absence.cell, Readiness::Unknown { message: absence.why })
        }
        State::Absent(absence) => (absence.cell, missing(&absence.why)),
    };
    Needed { image: name.clone(), reference: cell.map(|cell| cell.reference.clone()), state }
}

/// Compares what a node says with what it should say.
fn planned_node(node: &NodeFacts, next: Option<Arc<Next>>) -> Option<PlannedNode> {
    let said = [node.annotations.get(READY_FOR), node.labels.get(READY_FOR)];
    let label = next.as_ref().and_then(|next| KernelLabel::of(&next.kernel.release));
    let ready = next.as_ref().is_some_and(|next| next.is_ready());
    // A registry that is away for a while makes no node ready, and takes no node's readiness away.
    let stays = next.as_ref().is_some_and(|next| next.is_unknown())
        && label.as_ref().is_some_and(|label| said == [Some(&label.to_string()); 2]);
    let right = label.filter(|_| ready || stays).map(|label| label.to_string());
    if next.is_none() && said == [None; 2] {
        return None;
    }
    let change = (said != [right.as_ref(); 2]).then(|| {
        let value: BTreeMap<String, Option<String>> = [(READY_FOR.to_owned(), right)].into();
        Change::Node(NodeChange { name: node.name.clone(), labels: value.clone(), annotations: value })
    });
    Some(PlannedNode { node: node.name.clone(), next, ready, change })
}

#[cfg(test)]
mod tests;
