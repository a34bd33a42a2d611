//! The facts that pages are made from. They keep only what pages show of a reconcile's snapshot, because a
//! fleet has many nodes.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use farrier_core::{
    image::{Definitions, ImageName},
    kernel::KernelTarget,
    plan::{
        Activity, ClusterSnapshot, NEXT_KERNEL_ANNOTATION, NextKernel, Plan, RECORD_ANNOTATION, Record,
        RolloutObject, RolloutTarget, node_target, paused,
    },
};
use jiff::Timestamp;

/// Maximum number of node names that are listed; the rest is only counted.
const NAMED: usize = 5;

/// State of a fleet.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Decisions of the reconcile.
    pub plan: Arc<Plan>,
    /// Activity of builds; empty without a running loop.
    pub activity: Activity,
    /// The nodes, by name.
    pub nodes: BTreeMap<String, NodeFact>,
    /// Nodes that run the same kernel and need the same images.
    pub groups: Vec<NodeGroup>,
    /// Next kernels of nodes.
    pub announced: Vec<Announced>,
    /// Skipped nodes and nodes with an unused announcement, by reason.
    pub aside: BTreeMap<String, Names>,
    /// Records that farrier wrote to the objects that it rewrites, by `DaemonSet kube-system/driver`.
    pub records: BTreeMap<String, Result<Record, String>>,
    /// Whether each object of a live cluster is paused, by the names that `farrier rollback` takes.
    pub live: BTreeMap<String, bool>,
    /// When published images were built, if known.
    pub built: BTreeMap<(ImageName, KernelTarget), Timestamp>,
    /// Errors of failed rewrites.
    pub failed_rewrites: BTreeMap<RolloutTarget, String>,
    /// Mistakes in the definitions on disk, while the last valid ones are in use.
    pub configuration_error: Option<String>,
    /// Time of the reconcile.
    pub now: Timestamp,
    /// Whether a server evaluates addresses and notifies pages of newer reconciles.
    pub served: bool,
}

#[derive(Clone, Debug)]
pub struct NodeFact {
    /// Index in [`Facts::groups`], or why the node's kernel is not known.
    pub group: Result<usize, String>,
    /// Operating system as the node reports it.
    pub os_image: String,
    /// Kernel release that the node announces.
    pub announces: Option<String>,
    /// Whether the node is cordoned.
    pub cordoned: bool,
}

/// Nodes with the same kernel that need the same images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeGroup {
    /// Kernel target of the nodes.
    pub target: KernelTarget,
    /// Images that the nodes need.
    pub calls: Vec<ImageName>,
    /// Sorted names of the nodes.
    pub nodes: Vec<String>,
    /// Number of these nodes that announced a kernel that they may not boot yet.
    pub unready: usize,
}

/// Nodes with the same next kernel that need the same images for it.
#[derive(Clone, Debug)]
pub struct Announced {
    /// The kernel, and the state of its images.
    pub next: Arc<NextKernel>,
    /// Sorted names of the nodes.
    pub nodes: Vec<String>,
}

/// The first names of a list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Names {
    pub first: Vec<String>,
    /// Length of the list.
    pub count: usize,
}

impl Names {
    fn add(&mut self, name: &str) {
        if self.first.len() < NAMED {
            self.first.push(name.to_owned());
        }
        self.count += 1;
    }

    /// Takes the first names of a list.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a String>) -> Self {
        let mut all = Self::default();
        names.into_iter().for_each(|name| all.add(name));
        all
    }
}

/// Compares names with numbers by value: `node-9` is before `node-10`.
pub fn natural(a: &str, b: &str) -> Ordering {
    let digits = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (mut left, mut right) = (a, b);
    while let (Some(first), Some(second)) = (left.chars().next(), right.chars().next()) {
        let order = if first.is_ascii_digit() && second.is_ascii_digit() {
            let (number, other);
            (number, left) = left.split_at(digits(left));
            (other, right) = right.split_at(digits(right));
            let [number, other] = [number, other].map(|number| number.trim_start_matches('0'));
            number.len().cmp(&other.len()).then_with(|| number.cmp(other))
        } else {
            (left, right) = (&left[first.len_utf8()..], &right[second.len_utf8()..]);
            first.cmp(&second)
        };
        if order.is_ne() {
            return order;
        }
    }
    left.len().cmp(&right.len()).then_with(|| a.cmp(b))
}

impl Facts {
    /// Extracts the facts from a plan, its snapshot and the definitions.
    pub fn of(
        plan: Arc<Plan>,
        snapshot: &ClusterSnapshot,
        definitions: &Definitions,
        now: Timestamp,
    ) -> Self {
        let mut facts = Self { now, records: records(snapshot), live: paused(snapshot), ..Self::default() };
        let mut places: HashMap<(KernelTarget, Vec<bool>), usize> = HashMap::new();
        for node in &snapshot.nodes {
            let group = node_target(node).map_err(|why| why.to_string()).map(|target| {
                let calls: Vec<bool> =
                    definitions.images.values().map(|image| node.is_selected_by(image)).collect();
                let groups = &mut facts.groups;
                let place = *places.entry((target, calls)).or_insert_with_key(|(target, calls)| {
                    let called = definitions.images.keys().zip(calls).filter(|(_, calls)| **calls);
                    let calls = called.map(|(name, _)| name.clone()).collect();
                    groups.push(NodeGroup { target: target.clone(), calls, nodes: Vec::new(), unready: 0 });
                    groups.len() - 1
                });
                if let Some(group) = groups.get_mut(place) {
                    group.nodes.push(node.name.clone());
                }
                place
            });
            let announces = node.annotations.get(NEXT_KERNEL_ANNOTATION).cloned();
            let (os_image, cordoned) = (node.os_image.clone(), node.unschedulable);
            facts.nodes.insert(node.name.clone(), NodeFact { group, os_image, announces, cordoned });
        }
        let mut places: HashMap<*const NextKernel, usize> = HashMap::new();
        for planned in &plan.nodes {
            let Some(next) = &planned.next else { continue };
            let place = *places.entry(Arc::as_ptr(next)).or_insert_with(|| {
                facts.announced.push(Announced { next: Arc::clone(next), nodes: Vec::new() });
                facts.announced.len() - 1
            });
            if let Some(announced) = facts.announced.get_mut(place) {
                announced.nodes.push(planned.node.clone());
            }
            let group = facts.nodes.get(&planned.node).and_then(|node| node.group.as_ref().ok());
            if !planned.may_boot.is_free()
                && let Some(group) = group.and_then(|place| facts.groups.get_mut(*place))
            {
                group.unready += 1;
            }
        }
        let names = facts.groups.iter_mut().map(|group| &mut group.nodes);
        let names = names.chain(facts.announced.iter_mut().map(|announced| &mut announced.nodes));
        names.for_each(|nodes| nodes.sort_unstable_by(|a, b| natural(a, b)));
        let left = plan.skipped_nodes.iter().map(|left| (format!("skipped: {}", left.why), &left.node));
        let unused = plan.unused_announcements.iter();
        let unused = unused.map(|unused| (format!("ignored announcement: {}", unused.why), &unused.node));
        for (why, node) in left.chain(unused) {
            facts.aside.entry(why).or_default().add(node);
        }
        Self { plan, ..facts }
    }

    /// Returns the record in the object that a rollout writes.
    pub fn record_of(&self, target: &RolloutTarget) -> Option<&Result<Record, String>> {
        let object = match &target.object {
            RolloutObject::DaemonSet(found) => format!("DaemonSet {}/{}", found.namespace, found.daemon_set),
            RolloutObject::Resource { resource, name } => format!("{resource} {name}"),
            RolloutObject::Nothing {} => return None,
        };
        self.records.get(&object).filter(|_| target.place.is_none())
    }
}

fn records(snapshot: &ClusterSnapshot) -> BTreeMap<String, Result<Record, String>> {
    let daemon_sets = snapshot.daemon_sets.iter().filter_map(|found| {
        let live = found.live.as_ref()?;
        Some((format!("DaemonSet {}/{}", found.namespace, found.name), &live.annotations))
    });
    let resources = snapshot.resources.iter();
    let resources = resources.map(|found| (format!("{} {}", found.kind, found.name), &found.annotations));
    let recorded =
        daemon_sets.chain(resources).filter(|(_, annotations)| annotations.contains_key(RECORD_ANNOTATION));
    recorded
        .map(|(object, annotations)| (object, Record::of(annotations).map_err(|why| why.to_string())))
        .collect()
}
