//! Pure: may a node boot its next kernel? It may when every image that it will need is published and passed its
//! check. Automation that upgrades kernels waits for the label that says so.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::Arc,
};

use serde::Serialize;

use super::{
    Change, HoldReason, NodeChange, NodeFacts, Plan, PlanInputs, Platform, Published,
    announced::NEXT_KERNEL_ANNOTATION,
    decide::{CellState, CellStates},
    signatures,
    together::Together,
};
use crate::{
    image::{DriverImage, ImageName, ImageReference, UnknownPolicy},
    kernel::{KernelLabel, KernelTarget},
    kmod::Verdict,
};

/// The label and annotation of a node that names the kernel which it may boot: its value is the kernel's label.
pub const READY_FOR: &str = "farrier.dev/ready-for";

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
    /// What it is to boot; `None` where nobody says so any more.
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
pub(super) fn nodes(
    inputs: &PlanInputs<'_>,
    states: &CellStates<'_>,
    plan: &Plan,
    together: &Together<'_>,
) -> Vec<PlannedNode> {
    let images: Vec<&DriverImage> = inputs.definitions.images.values().collect();
    let judge = Judge {
        inputs,
        states,
        unknown: plan
            .unknown
            .iter()
            .map(|found| (&found.cell.image, &found.cell.target))
            .chain(together.unknown.iter().copied())
            .collect(),
        skipped: plan
            .skipped
            .iter()
            .map(|found| ((&found.image, &found.target), found.why.to_string()))
            .chain(
                plan.waiting
                    .iter()
                    .map(|found| ((&found.image, &found.target), format!("it {}", found.why()))),
            )
            .collect(),
    };
    let mut judged: HashMap<(KernelTarget, Vec<bool>), Arc<Next>> = HashMap::new();
    let mut planned = Vec::new();
    for node in &inputs.snapshot.nodes {
        // Labels that are away for a while, as when NFD restarts, say nothing about what was published.
        if node.annotations.contains_key(NEXT_KERNEL_ANNOTATION) && Platform::of(node).is_none() {
            continue;
        }
        let Some(target) = inputs.matrix.announced.next_of(node) else {
            planned.extend(mark(node, None));
            continue;
        };
        let called: Vec<bool> = images.iter().map(|image| node.calls_for(image)).collect();
        let next = judged.entry((target, called)).or_insert_with_key(|(target, called)| {
            let needed = images.iter().zip(called).filter(|(_, called)| **called);
            let needs = needed.map(|(image, _)| judge.needed(image, target)).collect();
            Arc::new(Next { kernel: target.clone(), needs })
        });
        planned.extend(mark(node, Some(Arc::clone(next))));
    }
    if inputs.snapshot.read_only_nodes {
        planned.retain(|node| node.next.is_some());
        for node in &mut planned {
            node.change = None;
        }
    }
    planned
}

struct Judge<'a> {
    inputs: &'a PlanInputs<'a>,
    states: &'a CellStates<'a>,
    unknown: HashSet<(&'a ImageName, &'a KernelTarget)>,
    /// Why there is no cell: skipped, or waiting for others.
    skipped: HashMap<(&'a ImageName, &'a KernelTarget), String>,
}

impl Judge<'_> {
    fn needed(&self, image: &DriverImage, target: &KernelTarget) -> Needed {
        let key = (&image.metadata.name, target);
        let missing = |message: &str| Readiness::Missing { message: message.to_owned() };
        let (reference, state) = if let Some((cell, state)) = self.states.get(&key) {
            let state = match state {
                CellState::Published(_) if !self.inputs.pullable => {
                    missing("images go to a layout directory, from which no node can pull")
                }
                CellState::Published(found) => {
                    match signatures::accepts(self.inputs, &found.pinned(&cell.reference)) {
                        Ok(()) => fitness(found, &cell.reference, target, image.spec.check.unknown),
                        Err(why) => missing(&why.to_string()),
                    }
                }
                CellState::Building => missing("it is still to be built"),
                CellState::Absent(why) if self.unknown.contains(&key) => {
                    Readiness::Unknown { message: why.clone() }
                }
                CellState::Absent(why) => missing(why),
            };
            (Some(cell.reference.clone()), state)
        } else {
            let why = self.skipped.get(&key).map_or("no image is planned for this kernel", String::as_str);
            let is_unknown = self.unknown.contains(&key);
            let unknown = || Readiness::Unknown { message: why.to_owned() };
            (None, if is_unknown { unknown() } else { missing(why) })
        };
        Needed { image: image.metadata.name.clone(), reference, state }
    }
}

/// Would a rollout accept the image?
fn fitness(
    found: &Published,
    reference: &ImageReference,
    target: &KernelTarget,
    unknown: UnknownPolicy,
) -> Readiness {
    let image = found.pinned(reference);
    let hold = if found.kernel_release.as_deref() == Some(target.release.as_str()) {
        match (found.verdict, unknown) {
            (Some(verdict @ Verdict::Loads), _)
            | (Some(verdict @ Verdict::Unknown), UnknownPolicy::Allow) => {
                return Readiness::Ready { verdict };
            }
            (Some(Verdict::Unknown), UnknownPolicy::Deny) => HoldReason::UnknownDenied { image },
            (verdict, _) => HoldReason::NotPassed { image, verdict },
        }
    } else {
        HoldReason::OtherKernel { image, found: found.kernel_release.clone() }
    };
    Readiness::Missing { message: hold.to_string() }
}

/// Compares what a node says with what it should say.
fn mark(node: &NodeFacts, next: Option<Arc<Next>>) -> Option<PlannedNode> {
    let said = [node.annotations.get(READY_FOR), node.labels.get(READY_FOR)];
    let label = next.as_ref().and_then(|next| KernelLabel::of(&next.kernel.release));
    let ready = next.as_ref().is_some_and(|next| next.is_ready());
    // A registry that is away for a while makes nobody ready, and takes nobody's readiness away.
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

/// `image: why` of everything that is missing, for people.
pub(super) fn why_not(next: &Next) -> String {
    let missing = next.needs.iter().filter_map(|needed| match &needed.state {
        Readiness::Ready { .. } => None,
        Readiness::Missing { message } | Readiness::Unknown { message } => {
            Some(format!("{}: {message}", needed.image))
        }
    });
    missing.collect::<Vec<_>>().join("\n")
}

/// One kernel's needs as people read them.
pub fn readiness_table(next: &Next) -> String {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_header(["IMAGE", "VERDICT", "WHY"]);
    for Needed { image, reference, state } in &next.needs {
        let name = reference.as_ref().map(ToString::to_string).unwrap_or_default();
        let (verdict, why) = match state {
            Readiness::Ready { verdict } => (verdict.as_str(), name),
            Readiness::Missing { message } => ("missing", message.clone()),
            Readiness::Unknown { message } => ("unknown", message.clone()),
        };
        table.add_row([image.as_str(), verdict, &why]);
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().flat_map(|line| [line.trim_end().to_owned(), "\n".to_owned()]).collect()
}

#[cfg(test)]
mod tests;
