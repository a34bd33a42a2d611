//! Explains the state of a node, or of an image for a kernel: the causal chain from labels to the image field, in
//! sentences.

use std::collections::BTreeSet;

use serde::Serialize;

use super::{
    Activity, BootReadiness, Cell, ClusterSnapshot, KERNEL_LABEL, NodeFacts, NodeReach, Plan, PlannedCell,
    ReachingObject, ResourceFacts, RolloutDecision, RolloutObject, RolloutTarget, RolloutWarning,
    StatusEntry, is_hardware_label, node_target, status_entries,
    table::{missing_images, rollout_action_below_images},
};
use crate::{
    image::{Definitions, DriverImage, ImageName, commit_in},
    kernel::{KernelFamily, KernelRelease, KernelTarget, describe_sources, match_family},
    text::some_of,
};

/// Number of nodes to name; the rest is only counted.
const NAMED: usize = 5;

/// One step of the chain.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ExplanationStep {
    /// Subject of the step: `kernel`, `image mofed`, `DaemonSet kube-system/mofed, container main`.
    pub about: String,
    /// State of the subject, and the reason.
    pub says: String,
    /// Remedy; empty where none is needed.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub hint: String,
}

/// Explanation of one node, or of one image for one kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// Subject, such as `node worker-1` or `mofed for 6.1.0-47-amd64 (debian 12, amd64)`.
    pub subject: String,
    /// Steps from the first cause to its consequences.
    pub chain: Vec<ExplanationStep>,
}

/// Inputs of explanations.
#[derive(Clone, Copy, Debug)]
pub struct Explain<'a> {
    /// Cluster that the plan was made for.
    pub snapshot: &'a ClusterSnapshot,
    /// Definitions that the plan was made from.
    pub definitions: &'a Definitions,
    /// Plan to explain.
    pub plan: &'a Plan,
}

impl Explain<'_> {
    /// Explains the kernel of a node and the images for it; `None` where there is no such node.
    pub fn node(&self, name: &str) -> Option<Explanation> {
        let node = self.snapshot.nodes.iter().find(|node| node.name == name)?;
        let target = node_target(node);
        let mut chain = vec![match &target {
            Ok(target) => step(
                "kernel",
                format!("it runs {target}: status.nodeInfo says so, and the label {KERNEL_LABEL} agrees"),
            ),
            Err(why) => ExplanationStep {
                hint: why.remedy(name, self.snapshot.read_only_nodes),
                ..step("kernel", format!("the node is skipped: {why}"))
            },
        }];
        for image in self.definitions.images.values() {
            let about = format!("image {}", image.metadata.name);
            match (called_for(node, image), &target) {
                (Err(why), _) => chain.push(ExplanationStep { about, ..why }),
                (Ok(why), Ok(target)) => {
                    chain.push(step(about, why));
                    let not_reached = self.not_reached(node, &image.metadata.name);
                    chain.extend(self.outcome(&image.metadata.name, target, not_reached));
                }
                (Ok(why), Err(_)) => chain.push(step(about, format!("{why}; for an unknown kernel"))),
            }
        }
        chain.extend(self.upgrades(name));
        let on_host =
            self.plan.host_drivers.iter().filter(|group| group.nodes.iter().any(|node| node == name));
        chain.extend(on_host.map(|drivers| step("host drivers", format!("farrier-host {drivers}"))));
        chain.extend(self.next_kernel(name));
        Some(Explanation { subject: format!("node {name}"), chain })
    }

    /// Explains the state of an image for the kernels of a release, once per platform that has the release.
    pub fn image(&self, image: &DriverImage, release: &KernelRelease) -> Vec<Explanation> {
        let name = &image.metadata.name;
        let is_requested = |cell: &&PlannedCell| cell.image == *name && cell.target.release == *release;
        let cells: Vec<&PlannedCell> = self.plan.cells.iter().filter(is_requested).collect();
        if cells.is_empty() {
            let subject = format!("{name} for {release}");
            return vec![Explanation { subject, chain: self.not_called_for(image, release) }];
        }
        let explain = |cell: &PlannedCell| {
            let mut chain = self.requesters(image, cell);
            let chosen = cell.outcome.cell().map(|cell| &cell.family);
            let is_chosen = |family: &&KernelFamily| Some(&family.metadata.name) == chosen;
            let families = &self.definitions.families;
            let family = families.iter().find(is_chosen).or_else(|| match_family(families, &cell.target));
            chain.extend(family.map(|family| step("family", describe_sources(family, &cell.target))));
            chain.extend(cell.outcome.cell().map(|cell| inputs(cell)));
            chain.extend(self.outcome(name, &cell.target, Vec::new()));
            Explanation { subject: format!("{name} for {}", cell.target), chain }
        };
        cells.into_iter().map(explain).collect()
    }

    /// Returns the nodes and announcements that call for the image.
    fn requesters(&self, image: &DriverImage, cell: &PlannedCell) -> Vec<ExplanationStep> {
        let running = self.running(|target| *target == cell.target);
        let (calling, others): (Vec<_>, Vec<_>) =
            running.into_iter().map(|node| (node, called_for(node, image))).partition(|(_, why)| why.is_ok());
        let mut steps = Vec::new();
        if let Some((_, Ok(why))) = calling.first() {
            let names: Vec<&str> = calling.iter().map(|(node, _)| node.name.as_str()).collect();
            let names = some_of(&names, NAMED);
            steps.push(step("nodes", format!("{names}: {why}")));
        }
        if let Some((_, Err(why))) = others.first() {
            let names: Vec<&str> = others.iter().map(|(node, _)| node.name.as_str()).collect();
            let names = some_of(&names, NAMED);
            steps.push(ExplanationStep {
                about: "other nodes".to_owned(),
                says: format!("{names}: {}", why.says),
                ..why.clone()
            });
        }
        let announced = cell.announced_by.iter();
        steps.extend(announced.map(|by| step("announcement", format!("{by} announces the kernel"))));
        steps
    }

    /// Returns the reasons why nothing calls for the image.
    fn not_called_for(&self, image: &DriverImage, release: &KernelRelease) -> Vec<ExplanationStep> {
        let running = self.running(|target| target.release == *release);
        if running.is_empty() {
            let cells = self.plan.cells.iter().filter(|cell| cell.image == image.metadata.name);
            let planned: BTreeSet<&str> = cells.map(|cell| cell.target.release.as_str()).collect();
            let planned = some_of(&Vec::from_iter(planned), NAMED);
            let others = match planned.as_str() {
                "" => String::new(),
                planned => format!("; {} is planned for {planned}", image.metadata.name),
            };
            return vec![ExplanationStep {
                hint: format!(
                    "`farrier prebuild --kernel {release}` builds for a kernel before a node has it{others}"
                ),
                ..step("kernel", format!("no node runs {release}, and none announces it"))
            }];
        }
        let unmatched = running.into_iter().filter_map(|node| Some((node, called_for(node, image).err()?)));
        let steps =
            unmatched.map(|(node, why)| ExplanationStep { about: format!("node {}", node.name), ..why });
        steps.take(NAMED).collect()
    }

    fn running(&self, matches: impl Fn(&KernelTarget) -> bool) -> Vec<&NodeFacts> {
        let runs = |node: &&NodeFacts| node_target(node).is_ok_and(|target| matches(&target));
        self.snapshot.nodes.iter().map(|node| &**node).filter(runs).collect()
    }

    /// Returns the state of the image for a kernel, and its rollouts; for rollouts that do not reach the node, only the
    /// reasons in `not_reached`.
    fn outcome(
        &self,
        image: &ImageName,
        target: &KernelTarget,
        not_reached: Vec<ExplanationStep>,
    ) -> Vec<ExplanationStep> {
        let no_activity = Activity::new();
        let entries = status_entries(self.plan, &no_activity);
        let Some(entry) = entries.iter().find(|entry| entry.image == image && entry.target == target) else {
            return not_reached;
        };
        let mut steps = vec![state(entry)];
        for rollout in self.plan.rollouts.iter().filter(|rollout| rollout.image == *image) {
            let about = rollout.target.to_string();
            if not_reached.iter().any(|step| step.about == about) {
                continue;
            }
            let (action, why) = rollout_action_below_images(self.plan, rollout);
            let hint = match &rollout.decision {
                RolloutDecision::Hold(why) => why.hint().unwrap_or_default().to_owned(),
                _ => String::new(),
            };
            steps.push(ExplanationStep { hint, ..step(&about, format!("{action}: {why}")) });
            steps.extend(rollout.warnings.iter().map(|RolloutWarning { code, message, hint }| {
                ExplanationStep { hint: hint.clone(), ..step(&about, format!("warning[{code}]: {message}")) }
            }));
        }
        steps.extend(not_reached);
        if steps.len() == 1 {
            steps.push(step(
                "rollout",
                "the definition names none: the image is published, and no field is rewritten",
            ));
        }
        steps
    }

    /// Returns the rollouts of an image whose objects do not reach the node, with the reasons.
    fn not_reached(&self, node: &NodeFacts, image: &ImageName) -> Vec<ExplanationStep> {
        let snapshot = self.snapshot;
        let exclusion = |target: &RolloutTarget| {
            let placement;
            let object = match &target.object {
                RolloutObject::DaemonSet(name) => {
                    let mut daemon_sets = snapshot.daemon_sets.iter();
                    ReachingObject::daemon_set(daemon_sets.find(|other| other.is_named(name))?, snapshot)
                }
                RolloutObject::Resource(name) => {
                    let is_named = |resource: &&ResourceFacts| resource.is_named(name);
                    placement = snapshot.resources.iter().find(is_named)?.placement_in(snapshot);
                    ReachingObject::new(&placement, snapshot, [])
                }
                RolloutObject::Nothing {} => return None,
            };
            match object.reach(node) {
                NodeReach::Reached => None,
                NodeReach::Undetermined => Some("reaches the node once its labels are back".to_owned()),
                NodeReach::Excluded(why) => Some(format!("does not reach the node: {why}")),
            }
        };
        let rollouts = self.plan.rollouts.iter().filter(|rollout| rollout.image == *image);
        rollouts
            .filter_map(|rollout| Some(step(rollout.target.to_string(), exclusion(&rollout.target)?)))
            .collect()
    }

    /// Returns the state of the node's upgrades.
    fn upgrades(&self, name: &str) -> Vec<ExplanationStep> {
        let upgrades = self.plan.rollouts.iter().filter_map(|rollout| rollout.upgrade.as_ref());
        let steps = upgrades.flat_map(|upgrade| {
            let node_upgrades = upgrade.nodes.iter().filter(|node_upgrade| node_upgrade.node == name);
            node_upgrades
                .map(|node_upgrade| step(format!("upgrade of {}", upgrade.rollout), node_upgrade.to_string()))
        });
        steps.collect()
    }

    fn next_kernel(&self, name: &str) -> Vec<ExplanationStep> {
        let planned = self.plan.nodes.iter().filter(|planned| planned.node == name);
        let next = planned.filter_map(|planned| {
            let next = planned.next.as_deref()?;
            let reason = match planned.may_boot {
                BootReadiness::Ready => "every image that it will need is published".to_owned(),
                BootReadiness::NoDriver => "no driver image selects the node".to_owned(),
                BootReadiness::Wait | BootReadiness::Unknown => missing_images(next),
            };
            let answer = if planned.may_boot.is_free() { "may boot" } else { "should not boot yet" };
            Some(step("next kernel", format!("the node {answer} {}: {reason}", next.kernel)))
        });
        let unused = self.plan.unused_announcements.iter().filter(|unused| unused.node == name);
        let unused =
            unused.map(|unused| step("next kernel", format!("its announcement is not used: {}", unused.why)));
        next.chain(unused).collect()
    }
}

fn step(about: impl Into<String>, says: impl Into<String>) -> ExplanationStep {
    ExplanationStep { about: about.into(), says: says.into(), hint: String::new() }
}

/// Returns whether the node's labels call for the image, with the reason in either case.
fn called_for(node: &NodeFacts, image: &DriverImage) -> Result<String, ExplanationStep> {
    let nodes = &image.spec.nodes;
    let missing = nodes
        .match_labels
        .iter()
        .find(|(key, value)| node.labels.get(key.as_str()).is_none_or(|actual| **value != actual.as_str()));
    if let Some((key, value)) = missing {
        let actual = node.labels.get(key.as_str());
        let actual =
            actual.map_or("there is no such label".to_owned(), |actual| format!("its value is {actual:?}"));
        let says = format!("not called for: the definition requires the label {key}={value}, and {actual}");
        let hint = if is_hardware_label(key.as_str()) && !node.has_hardware_labels {
            "no label describes the node's hardware: check that Node Feature Discovery runs on it"
        } else {
            ""
        };
        return Err(ExplanationStep { hint: hint.to_owned(), ..step("", says) });
    }
    if let Some((key, value)) = nodes.own_driver(&node.labels) {
        let says = format!("not called for: the label {key}={value} marks a node with its own driver");
        return Err(step("", says));
    }
    let labels: Vec<String> =
        nodes.match_labels.iter().map(|(key, value)| format!("{key}={value}")).collect();
    Ok(if labels.is_empty() {
        "called for: the definition is for every node".to_owned()
    } else {
        format!("called for by {}", labels.join(", "))
    })
}

/// Returns the inputs that an image is built from.
fn inputs(cell: &Cell) -> ExplanationStep {
    let mut says = vec![
        format!("version {}, family {}, toolchain {}", cell.version, cell.family, cell.toolchain),
        format!("input hash {}, tag {}", cell.input_hash.short(), cell.reference),
    ];
    says.extend(cell.fetched.headers.iter().map(|digest| format!("imported headers: {digest}")));
    let commits = cell.fetched.sources.iter();
    says.extend(
        commits
            .filter_map(|(name, identity)| Some(format!("source {name}: commit {}", commit_in(identity)?))),
    );
    says.extend(cell.patches.iter().map(|patch| format!("patched with {}", patch.name)));
    says.extend(cell.needs.iter().map(|need| format!("compiled against {need}")));
    step("inputs", says.join("\n"))
}

/// Returns the state of a cell.
fn state(entry: &StatusEntry<'_>) -> ExplanationStep {
    let row = &entry.row;
    let (mut reason, hint) = entry.reason_and_hint();
    if let (true, Some(digest)) = (reason.is_empty(), &row.digest) {
        let verdict = row.verdict.map(|verdict| format!(", check verdict: {verdict}"));
        reason = format!("{}@{digest}{}", row.reference, verdict.unwrap_or_default());
    }
    ExplanationStep { hint, ..step("state", format!("{}: {reason}", row.phase.as_str())) }
}

#[cfg(test)]
#[path = "why_tests.rs"]
mod tests;
