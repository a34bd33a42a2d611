//! The facts that pages show. They contain only a part of a reconcile's snapshot, because a fleet has many nodes.

use std::{
    borrow::Cow,
    cmp::Ordering,
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use farrier_core::{
    image::{Definitions, ImageName},
    kernel::KernelTarget,
    plan::{
        Activity, ClusterSnapshot, NextKernel, Plan, RECORD_ANNOTATION, RewriteRecord, RolloutObject,
        RolloutTarget, SkippedNode, node_target, paused,
    },
};
use jiff::Timestamp;

use super::log::LoggedBuilds;

/// Maximum number of names in a list. Further names are only counted.
const MAX_LISTED_NAMES: usize = 5;

/// State of a fleet.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    /// Decisions of the reconcile.
    pub plan: Arc<Plan>,
    /// Activity of builds. Empty without a running loop.
    pub activity: Activity,
    /// The nodes, by name.
    pub nodes: BTreeMap<String, NodeFact>,
    /// The nodes, grouped by kernel and needed images.
    pub groups: Vec<NodeGroup>,
    /// The nodes with a next kernel, grouped by that kernel and the images needed for it.
    pub announced: Vec<Announced>,
    /// Skipped nodes and nodes with an unused announcement, by reason and remedy.
    pub excluded: BTreeMap<(String, String), NameList>,
    /// Records in the objects that farrier rewrites, by object: `DaemonSet kube-system/driver`.
    pub records: BTreeMap<String, Result<RewriteRecord, String>>,
    /// Whether objects of a live cluster are paused, by the names that `farrier rollback` takes.
    pub paused_objects: BTreeMap<String, bool>,
    pub builds: LoggedBuilds,
    /// Errors of failed rewrites.
    pub failed_rewrites: BTreeMap<RolloutTarget, String>,
    /// Mistakes in the definitions on disk, if the last valid ones are still in use.
    pub configuration_error: Option<String>,
    /// Reason why the cluster is not known as of `now`, if it cannot be read.
    pub outdated: Option<String>,
    /// Reason why this farrier may not write: another one leads, or it cannot renew its lease.
    pub standby: Option<String>,
    /// Description of the cluster.
    pub cluster: String,
    /// Location of the published images.
    pub registry: String,
    /// Time of the reconcile.
    pub now: Timestamp,
    /// Whether a server evaluates addresses and notifies pages of newer reconciles.
    pub served: bool,
}

#[derive(Clone, Debug)]
pub struct NodeFact {
    /// Index in [`Facts::groups`], or the reason why the node is skipped.
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
    pub images: Vec<ImageName>,
    /// Sorted names of the nodes.
    pub nodes: Vec<String>,
    /// Number of nodes that announced a kernel and may not boot it yet.
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

/// The first names of a list, and the number of all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NameList {
    pub first: Vec<String>,
    /// Length of the list.
    pub count: usize,
}

impl NameList {
    fn add(&mut self, name: &str) {
        if self.first.len() < MAX_LISTED_NAMES {
            self.first.push(name.to_owned());
        }
        self.count += 1;
    }

    /// Keeps the first names of a list, and counts all.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a String>) -> Self {
        let mut all = Self::default();
        names.into_iter().for_each(|name| all.add(name));
        all
    }
}

/// Compares names in natural order, with numbers by value: `node-9` is before `node-10`.
pub fn natural_order(a: &str, b: &str) -> Ordering {
    let leading_digits = |text: &str| text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let (mut left, mut right) = (a, b);
    while let (Some(first), Some(second)) = (left.chars().next(), right.chars().next()) {
        let order = if first.is_ascii_digit() && second.is_ascii_digit() {
            let (left_number, right_number);
            (left_number, left) = left.split_at(leading_digits(left));
            (right_number, right) = right.split_at(leading_digits(right));
            let [a, b] = [left_number, right_number].map(|number| number.trim_start_matches('0'));
            a.len().cmp(&b.len()).then_with(|| a.cmp(b))
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
        let mut facts = Self {
            now,
            records: records(snapshot),
            paused_objects: paused(snapshot),
            excluded: excluded(&plan, snapshot.read_only_nodes),
            outdated: snapshot.stale_since.map(|since| {
                format!(
                    "The API server has not answered since {since:.0}: nodes and rollouts are shown as they were."
                )
            }),
            ..Self::default()
        };
        facts.add_nodes(snapshot, definitions);
        facts.add_announced(&plan);
        let groups = facts.groups.iter_mut().map(|group| &mut group.nodes);
        let names = groups.chain(facts.announced.iter_mut().map(|announced| &mut announced.nodes));
        names.for_each(|nodes| nodes.sort_unstable_by(|a, b| natural_order(a, b)));
        Self { plan, ..facts }
    }

    /// Adds the nodes, and groups the nodes with the same kernel that need the same images.
    fn add_nodes(&mut self, snapshot: &ClusterSnapshot, definitions: &Definitions) {
        let mut indexes: HashMap<(KernelTarget, Vec<bool>), usize> = HashMap::new();
        for node in &snapshot.nodes {
            let group = node_target(node).map_err(|why| why.to_string()).map(|target| {
                let needs: Vec<bool> =
                    definitions.images.values().map(|image| node.is_selected_by(image)).collect();
                let groups = &mut self.groups;
                let index = *indexes.entry((target, needs)).or_insert_with_key(|(target, needs)| {
                    let needed = definitions.images.keys().zip(needs).filter(|(_, is_needed)| **is_needed);
                    let images = needed.map(|(name, _)| name.clone()).collect();
                    groups.push(NodeGroup { target: target.clone(), images, nodes: Vec::new(), unready: 0 });
                    groups.len() - 1
                });
                if let Some(group) = groups.get_mut(index) {
                    group.nodes.push(node.name.clone());
                }
                index
            });
            let announces = node.announced_release().map(Cow::into_owned);
            let (os_image, cordoned) = (node.os_image.clone(), node.unschedulable);
            self.nodes.insert(node.name.clone(), NodeFact { group, os_image, announces, cordoned });
        }
    }

    /// Adds the next kernels of nodes, and counts the unready nodes of each group.
    fn add_announced(&mut self, plan: &Plan) {
        let mut indexes: HashMap<*const NextKernel, usize> = HashMap::new();
        for planned in &plan.nodes {
            let Some(next) = &planned.next else { continue };
            let index = *indexes.entry(Arc::as_ptr(next)).or_insert_with(|| {
                self.announced.push(Announced { next: Arc::clone(next), nodes: Vec::new() });
                self.announced.len() - 1
            });
            if let Some(announced) = self.announced.get_mut(index) {
                announced.nodes.push(planned.node.clone());
            }
            let group = self.nodes.get(&planned.node).and_then(|node| node.group.as_ref().ok());
            if !planned.may_boot.is_free()
                && let Some(group) = group.and_then(|index| self.groups.get_mut(*index))
            {
                group.unready += 1;
            }
        }
    }

    /// Returns the record in the object that a rollout rewrites.
    pub fn record_of(&self, target: &RolloutTarget) -> Option<&Result<RewriteRecord, String>> {
        let object = match &target.object {
            RolloutObject::DaemonSet(object) => {
                format!("DaemonSet {}/{}", object.namespace, object.daemon_set)
            }
            RolloutObject::Resource(object) => format!("{} {}", object.resource, object.full_name()),
            RolloutObject::Nothing {} => return None,
        };
        self.records.get(&object).filter(|_| target.location.is_none())
    }
}

/// Returns skipped nodes and nodes with an unused announcement, by reason and remedy.
fn excluded(plan: &Plan, is_manifest: bool) -> BTreeMap<(String, String), NameList> {
    let mut excluded: BTreeMap<(String, String), NameList> = BTreeMap::new();
    let mut remedies: HashMap<String, String> = HashMap::new();
    for SkippedNode { node, why } in &plan.skipped_nodes {
        let reason = format!("skipped: {why}");
        // The remedy names the first of the nodes.
        let remedy = remedies.entry(reason.clone()).or_insert_with(|| why.remedy(node, is_manifest)).clone();
        excluded.entry((reason, remedy)).or_default().add(node);
    }
    for unused in &plan.unused_announcements {
        let reason = format!("ignored announcement: {}", unused.why);
        excluded.entry((reason, String::new())).or_default().add(&unused.node);
    }
    excluded
}

fn records(snapshot: &ClusterSnapshot) -> BTreeMap<String, Result<RewriteRecord, String>> {
    let daemon_sets = snapshot.daemon_sets.iter().filter_map(|facts| {
        let live = facts.live.as_ref()?;
        Some((format!("DaemonSet {}/{}", facts.namespace, facts.name), &live.annotations))
    });
    let resources = snapshot.resources.iter();
    let resources = resources.map(|facts| (format!("{} {}", facts.kind, facts.name), &facts.annotations));
    let mut records = BTreeMap::new();
    for (object, annotations) in daemon_sets.chain(resources) {
        if annotations.contains_key(RECORD_ANNOTATION) {
            records.insert(object, RewriteRecord::of(annotations).map_err(|why| why.to_string()));
        }
    }
    records
}
