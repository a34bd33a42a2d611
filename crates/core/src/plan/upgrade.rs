//! Upgrades the nodes of a DaemonSet to another driver one after the other. Decides which node starts next, the next
//! step of each node in progress, and the reason why each other node waits.
//!
//! The whole state of a node in progress is stored on the node ([`UpgradeNote`]) and written together with its cordon. If
//! farrier is killed between any two steps, it continues where it stopped. The steps of a node do not depend on other
//! nodes; only the choice of the next node depends on all nodes.

mod begin;
mod forecast;
mod note;
mod table;
mod turn;
mod wait;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

pub use self::{
    forecast::UpgradeForecast,
    note::{JobKind, UpgradeNote, UpgradeState, clear_failures, release_uncovered},
    table::upgrade_table,
    wait::UpgradeWait,
};
use super::{
    Change, Holder, NodeFacts, PodFacts, Taint, UPGRADE_CHECKED, WorkloadFacts,
    skip_reason::serialize_optional_reason,
};
use crate::image::UpgradeSpec;

/// Inputs of the plan of one DaemonSet's upgrade.
#[derive(Clone, Debug)]
pub struct Upgrade<'a> {
    /// Name of this farrier instance.
    pub by: &'a str,
    /// Namespace of the DaemonSet.
    pub namespace: &'a str,
    /// Name of the DaemonSet.
    pub daemon_set: &'a str,
    /// Upgrade settings of the definition.
    pub spec: &'a UpgradeSpec,
    /// Time for a new pod to become ready.
    pub deadline: SignedDuration,
    /// Time for which a new pod must stay ready.
    pub stable_for: SignedDuration,
    /// Number of the DaemonSet's desired pods that do not exist. It is unknown which nodes lack them.
    pub missing: usize,
    /// Whether no further node may be started.
    pub paused: bool,
    /// Whether the registry did not answer farrier, or had a fault.
    pub is_registry_down: bool,
    /// Reason why the pods of nodes cannot be listed, if the upgrade drains nodes.
    pub cannot_list_pods: Option<&'a str>,
    /// Current time.
    pub now: Timestamp,
    /// Nodes that the DaemonSet reaches, and nodes with a note that it reaches once their labels are back or a taint is gone.
    pub nodes: Vec<UpgradeNode<'a>>,
}

/// Node with the facts that its upgrade depends on.
#[derive(Clone, Debug)]
pub struct UpgradeNode<'a> {
    /// Facts of the node.
    pub facts: &'a NodeFacts,
    /// Image that the node should have; empty where there is none for it.
    pub target: &'a str,
    /// Whether the DaemonSet will get the target image, but does not have it yet.
    pub is_target_pending: bool,
    /// Handover label to set, where the node does not belong to the DaemonSet with the target image yet.
    pub hand_over: Option<&'a str>,
    /// Driver pod on the node.
    pub driver: Option<DriverPod<'a>>,
    /// Taint that keeps new driver pods off the node.
    pub taint: Option<&'a Taint>,
    /// Whether the target has modules for the node's kernel; `None` where the kernel is unknown.
    pub fits: Option<bool>,
    /// Running pods that must leave the node before its driver is replaced (`drain`).
    pub users: Vec<&'a WorkloadFacts>,
    /// State of the `forecast` Job ([`UpgradeNote::job_name`]).
    pub unload_forecast: Option<JobState>,
    /// Holders of the driver's modules that the last unload forecast reported; empty if the report is not visible.
    pub holders: &'a [Holder],
    /// State of the `waitFor` Job.
    pub check: Option<JobState>,
}

/// Driver pod on a node.
#[derive(Clone, Copy, Debug)]
pub struct DriverPod<'a> {
    /// Facts of the pod.
    pub pod: &'a PodFacts,
    /// Image of the driver container.
    pub image: &'a str,
    /// Whether the pod already has the target's modules for the node's kernel, so that a new pod would change nothing.
    pub is_current: bool,
    /// Whether the pod's image is known to have no modules for the node's kernel.
    pub lacks_modules: bool,
}

impl<'a> DriverPod<'a> {
    /// Examines the named containers of a pod; `is_current` returns whether an image is the target's, and `lacks_modules` whether
    /// it is known to have none for the node's kernel. `image` becomes the image of the first outdated container, or else of the
    /// first container.
    pub(super) fn of<'c>(
        pod: &'a PodFacts,
        containers: impl IntoIterator<Item = &'c str>,
        is_current: impl Fn(&str) -> bool,
        lacks_modules: impl Fn(&str) -> bool,
    ) -> Self {
        let images = containers.into_iter().map(|name| pod.images.get(name).map_or("", String::as_str));
        let images: Vec<&str> = images.collect();
        let outdated = images.iter().find(|image| !is_current(image));
        let image = outdated.or(images.first()).copied().unwrap_or_default();
        let lacks_modules = images.iter().any(|image| lacks_modules(image));
        Self { pod, image, is_current: outdated.is_none(), lacks_modules }
    }
}

/// State of a Job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// The Job has had no pod yet, for example because a quota or an admission policy refuses the pod, or Kueue suspends the Job.
    WithoutPod,
    /// The Job is running.
    Running,
    /// The Job succeeded.
    Succeeded,
    /// The Job failed, with the reason.
    Failed(String),
}

/// Stage of a node in an upgrade.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum UpgradeStage {
    /// The node's new driver does not work.
    Failed,
    /// The node is being upgraded.
    UnderWay,
    /// The node's upgrade starts now.
    Begins,
    /// The node has another driver than the target, and will be started later.
    Waits,
    /// The node has another driver than the target, and is skipped in its current state.
    Skipped,
    /// The node has the target's driver.
    Done,
}

/// Node in the plan of an upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedNodeUpgrade {
    /// Name of the node.
    pub node: String,
    /// Image that the node gets; empty where there is none for it.
    pub to: String,
    /// Stage of the node.
    pub stage: UpgradeStage,
    /// Last note that farrier wrote to the node.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<UpgradeNote>,
    /// Condition that the node waits for.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "serialize_optional_reason")]
    pub waits: Option<UpgradeWait>,
    /// Changes to make now, in this order. A refused change does not block changes of other nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
}

/// Plan of an upgrade: the steps to take now, and a forecast of the rest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedUpgrade {
    /// DaemonSet, as `namespace/name`.
    pub rollout: String,
    /// Nodes of the DaemonSet, by stage and name.
    pub nodes: Vec<PlannedNodeUpgrade>,
    /// Forecast of the remaining work.
    pub forecast: UpgradeForecast,
}

impl PlannedUpgrade {
    /// Returns the first failed node, with the reason.
    pub fn failure(&self) -> Option<(&str, &str)> {
        self.nodes.iter().find(|node_upgrade| node_upgrade.stage == UpgradeStage::Failed)?.failure()
    }

    /// Returns the first node that failed because of the new driver. With `onFailure: restore`, such a failure
    /// restores the previous image.
    pub(super) fn fault(&self) -> Option<(&str, &str)> {
        self.nodes.iter().find(|node_upgrade| node_upgrade.is_faulty())?.failure()
    }

    /// Returns the changes to make now.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.nodes.iter().flat_map(|node_upgrade| &node_upgrade.changes)
    }
}

impl PlannedNodeUpgrade {
    /// Whether the new driver does not work on the node.
    pub(super) fn is_faulty(&self) -> bool {
        self.stage == UpgradeStage::Failed && self.note.as_ref().is_some_and(|note| !note.unchecked)
    }

    fn failure(&self) -> Option<(&str, &str)> {
        Some((&self.node, self.note.as_ref()?.why.as_deref().unwrap_or_default()))
    }
}

impl Upgrade<'_> {
    /// Computes the plan.
    pub fn plan(&self) -> PlannedUpgrade {
        let mut nodes: Vec<PlannedNodeUpgrade> = self.nodes.iter().map(|node| self.stage_of(node)).collect();
        self.begin(&mut nodes);
        nodes.sort_by(|a, b| (a.stage, &a.node).cmp(&(b.stage, &b.node)));
        let forecast = UpgradeForecast::of(self, &nodes);
        PlannedUpgrade { rollout: self.rollout(), nodes, forecast }
    }

    /// Returns the DaemonSet as `namespace/name`, the form in notes.
    fn rollout(&self) -> String {
        format!("{}/{}", self.namespace, self.daemon_set)
    }
}

impl<'a> UpgradeNode<'a> {
    /// Creates a node with its driver pod; everything else is unknown yet.
    pub fn of(facts: &'a NodeFacts, driver: Option<DriverPod<'a>>) -> Self {
        Self {
            facts,
            target: "",
            is_target_pending: false,
            hand_over: None,
            driver,
            taint: None,
            fits: None,
            users: Vec::new(),
            unload_forecast: None,
            holders: &[],
            check: None,
        }
    }

    /// Whether the `waitFor` annotation confirms the target image.
    fn is_confirmed(&self) -> bool {
        self.facts.annotations.get(UPGRADE_CHECKED).is_some_and(|image| image == self.target)
    }

    /// Returns the condition of the node that keeps a new driver pod from starting.
    fn blocks_pods(&self) -> Option<UpgradeWait> {
        if self.facts.not_ready {
            return Some(UpgradeWait::NotReady);
        }
        self.taint.map(|taint| UpgradeWait::Tainted { taint: taint.to_string() })
    }

    /// Returns the driver pod, unless it is terminating.
    fn running_pod(&self) -> Option<DriverPod<'a>> {
        self.driver.filter(|driver| !driver.pod.deleting)
    }
}

#[cfg(test)]
mod tests;
