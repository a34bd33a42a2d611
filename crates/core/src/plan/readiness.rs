//! Pure: may a node boot its next kernel? It may when every image that it will need is published and passed its
//! check. Automation that upgrades kernels waits for the label that says so. A node that needs no image has a label of
//! its own: nothing was checked for it.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use serde::Serialize;

use super::{
    Change, NEXT_KERNEL_ANNOTATION, NO_DRIVER_FOR, NodeChange, NodeFacts, PlanInputs, Platform, READY_FOR,
    guarantee::{MadeFor, passing},
    outcome::{Cells, State},
    skip_reason::maybe_explained,
};
use crate::{
    image::{DriverImage, ImageName, ImageReference},
    kernel::{KernelLabel, KernelTarget, match_family},
    kmod::Verdict,
};

/// May a node boot a kernel, as far as its driver images say?
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum MayBoot {
    /// No driver image is called for: nothing is in the way, and nothing was checked.
    NoDriver,
    /// Every image that it will need is there.
    Ready,
    /// It is not known.
    Unknown,
    /// Something is missing.
    Wait,
}

impl MayBoot {
    /// The answer in lower case.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Is nothing in the way?
    pub fn is_free(self) -> bool {
        matches!(self, Self::Ready | Self::NoDriver)
    }
}

/// Why it is not said that no driver image is called for, although no definition's `nodes` match.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", tag = "reason")]
pub enum Doubt {
    /// No kernel family matches the target.
    #[error(
        "no kernel family matches: it is not known whether there is such a kernel; correct its release, or add a family"
    )]
    NoFamily,
    /// The node has no label that tells its hardware.
    #[error(
        "the node has no label of its hardware (feature.node.kubernetes.io/pci-...) yet, so it is not known which images it will need; see that Node Feature Discovery runs on it"
    )]
    HardwareNotLabelled,
}

/// How one image stands that a node will need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "state")]
#[expect(missing_docs, reason = "the variants say what their fields are")]
pub enum Readiness {
    /// Published, and its modules load as far as its definition wants that known: what its check said.
    Ready { verdict: Verdict },
    /// Not there, or not fit: why.
    Missing { message: String },
    /// The registry did not say: why not.
    Unknown { message: String },
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
    /// Why there may be more of them than none.
    #[serde(serialize_with = "maybe_explained", skip_serializing_if = "Option::is_none")]
    pub doubt: Option<Doubt>,
}

impl Next {
    /// May nodes boot it?
    pub fn may_boot(&self) -> MayBoot {
        let state = |needed: &Needed| match needed.state {
            Readiness::Ready { .. } => MayBoot::Ready,
            Readiness::Missing { .. } => MayBoot::Wait,
            Readiness::Unknown { .. } => MayBoot::Unknown,
        };
        match (&self.doubt, self.needs.iter().map(state).max()) {
            (_, Some(worst)) => worst,
            (None, None) => MayBoot::NoDriver,
            (Some(Doubt::NoFamily), None) => MayBoot::Wait,
            (Some(Doubt::HardwareNotLabelled), None) => MayBoot::Unknown,
        }
    }
}

/// A node with a next kernel, or with a mark that it has no more.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedNode {
    /// The node.
    pub node: String,
    /// What it is to boot; `None` where it is not announced any more.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next: Option<Arc<Next>>,
    /// May it, and were images checked for that?
    pub ready: bool,
    /// The same, with what `ready` does not tell apart.
    pub may_boot: MayBoot,
    /// What is written to it; `None` where it says the right thing already.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub change: Option<Change>,
}

/// What every node's mark should be.
pub(super) fn nodes(inputs: &PlanInputs<'_>, cells: Cells<'_>) -> Vec<PlannedNode> {
    let images: Vec<&DriverImage> = inputs.definitions().images.values().collect();
    let marks = [READY_FOR, NO_DRIVER_FOR].map(|mark| inputs.instance.mark(mark));
    let mut judged: HashMap<(KernelTarget, Vec<bool>, bool), Arc<Next>> = HashMap::new();
    let mut planned = Vec::new();
    for node in &inputs.snapshot.nodes {
        // Labels that are away for a while, as when NFD restarts, say nothing about what was published.
        if node.annotations.contains_key(NEXT_KERNEL_ANNOTATION) && Platform::of(node).is_none() {
            continue;
        }
        let Some(target) = inputs.announced.next_of(node) else {
            planned.extend(planned_node(&marks, node, None));
            continue;
        };
        let called: Vec<bool> = images.iter().map(|image| node.calls_for(image)).collect();
        let key = (target, called, node.hardware_labelled);
        let next = judged.entry(key).or_insert_with_key(|(target, called, hardware_labelled)| {
            let called_for = images.iter().zip(called).filter(|(_, called)| **called);
            let needs: Vec<Needed> =
                called_for.map(|(image, _)| needed(inputs, &cells, image, target)).collect();
            let doubt = match match_family(&inputs.definitions().families, target) {
                _ if !needs.is_empty() => None,
                None => Some(Doubt::NoFamily),
                Some(_) => (!hardware_labelled).then_some(Doubt::HardwareNotLabelled),
            };
            Arc::new(Next { kernel: target.clone(), needs, doubt })
        });
        planned.extend(planned_node(&marks, node, Some(Arc::clone(next))));
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

/// Compares what a node says with what it should say. `marks` say that it is ready, and that it needs no image.
fn planned_node(marks: &[String; 2], node: &NodeFacts, next: Option<Arc<Next>>) -> Option<PlannedNode> {
    let label = next.as_ref().and_then(|next| KernelLabel::of(&next.kernel.release));
    let label = label.map(|label| label.to_string());
    let may_boot = next.as_ref().map_or(MayBoot::Wait, |next| next.may_boot());
    let mut values: BTreeMap<String, Option<String>> = BTreeMap::new();
    let mut is_marked = false;
    for (mark, means) in marks.iter().zip([MayBoot::Ready, MayBoot::NoDriver]) {
        let said = [node.annotations.get(mark), node.labels.get(mark)];
        is_marked |= said != [None; 2];
        // A registry or labels that are away for a while make no node ready, and take no node's readiness away.
        let stays = means == MayBoot::Ready
            && may_boot == MayBoot::Unknown
            && label.as_ref().is_some_and(|label| said == [Some(label); 2]);
        let right = label.clone().filter(|_| may_boot == means || stays);
        if said != [right.as_ref(); 2] {
            values.insert(mark.clone(), right);
        }
    }
    if next.is_none() && !is_marked {
        return None;
    }
    let change = (!values.is_empty()).then(|| {
        Change::Node(NodeChange {
            name: node.name.clone(),
            labels: values.clone(),
            annotations: values,
            ..NodeChange::default()
        })
    });
    let ready = may_boot == MayBoot::Ready;
    Some(PlannedNode { node: node.name.clone(), next, ready, may_boot, change })
}

#[cfg(test)]
mod tests;
