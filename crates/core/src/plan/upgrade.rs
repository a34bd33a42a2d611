//! Pure: a DaemonSet's nodes get another driver, in order: which node comes next, which step each one gets now, and why the
//! others wait.
//!
//! All that is known of a node under way stands on the node ([`UpgradeNote`]), and is written together with its cordon: a farrier
//! that was killed between any two steps goes on where it was. A node's steps need nothing of other nodes; what looks at all of
//! them is only which one is begun.

mod begin;
mod forecast;
mod note;
mod table;
mod turn;
mod wait;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

pub use self::{
    forecast::Forecast,
    note::{JobKind, UpgradeNote, UpgradeState, abandoned, forgiven},
    table::upgrade_table,
    wait::UpgradeWait,
};
use super::{
    Change, Holder, NodeFacts, PodFacts, UPGRADE_CHECKED, WorkloadFacts, skip_reason::maybe_explained,
};
use crate::image::UpgradeSpec;

/// Everything that the next steps of one DaemonSet's upgrade are decided from.
#[derive(Clone, Debug)]
pub struct Upgrade<'a> {
    /// Which farrier this is.
    pub by: &'a str,
    /// The DaemonSet's namespace.
    pub namespace: &'a str,
    /// Its name.
    pub daemon_set: &'a str,
    /// The order that the definition asks for.
    pub spec: &'a UpgradeSpec,
    /// How long a new pod may take to get ready.
    pub deadline: SignedDuration,
    /// How long it must stay so.
    pub stable_for: SignedDuration,
    /// Pods that the DaemonSet is to have, and that are not there: on which nodes, is not known.
    pub missing: usize,
    /// Is no other node to be begun?
    pub paused: bool,
    /// Why the pods of nodes cannot be seen, where a drain has to see them.
    pub unseen: Option<&'a str>,
    /// The clock.
    pub now: Timestamp,
    /// The nodes that the DaemonSet reaches.
    pub nodes: Vec<UpgradeNode<'a>>,
}

/// A node, as far as its upgrade goes.
#[derive(Clone, Debug)]
pub struct UpgradeNode<'a> {
    /// The node.
    pub facts: &'a NodeFacts,
    /// The image that it is to have; empty where there is none for it.
    pub target: &'a str,
    /// Is that what the DaemonSet gets, and has not yet?
    pub to_come: bool,
    /// The label by which it gets the DaemonSet with that image, where it has that of another.
    pub hand_over: Option<&'a str>,
    /// The driver's pod on it.
    pub driver: Option<DriverPod<'a>>,
    /// Has the target modules for the kernel that the node runs? `None` where its kernel is not known.
    pub fits: Option<bool>,
    /// The pods that leave it before its driver does (`drain`), those that still run.
    pub users: Vec<&'a WorkloadFacts>,
    /// How the Job of `forecast` stands ([`UpgradeNote::job_name`]).
    pub forecast: Option<JobState>,
    /// What that has found last, where it can be seen.
    pub holders: &'a [Holder],
    /// How the Job of `waitFor` stands.
    pub check: Option<JobState>,
}

/// The driver's pod on a node.
#[derive(Clone, Copy, Debug)]
pub struct DriverPod<'a> {
    /// The pod.
    pub pod: &'a PodFacts,
    /// Its image.
    pub image: &'a str,
    /// Has it the target's modules for the node's kernel, so that a new one would change nothing?
    pub is_current: bool,
}

/// How a Job stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum JobState {
    /// It runs.
    Running,
    /// It ended well.
    Succeeded,
    /// It did not, for this reason.
    Failed(String),
}

/// How far a node is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, strum::IntoStaticStr)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
pub enum UpgradeStage {
    /// Its new driver does not work.
    Failed,
    /// farrier is at it.
    UnderWay,
    /// It is begun now.
    Begins,
    /// It has another driver than the target, and is begun later.
    Waits,
    /// The same, and farrier does not touch it as it is.
    LeftAlone,
    /// It has the target's driver.
    Done,
}

/// A node in the plan of an upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UpgradeTurn {
    /// The node.
    pub node: String,
    /// The image that it gets; empty where there is none for it.
    pub to: String,
    /// How far it is.
    pub stage: UpgradeStage,
    /// What farrier has noted of it last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub note: Option<UpgradeNote>,
    /// What it waits for.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "maybe_explained")]
    pub waits: Option<UpgradeWait>,
    /// What is done with it now, in this order. A change that is refused holds no other.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub changes: Vec<Change>,
}

/// The plan of an upgrade: what is done now, and how the rest goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedUpgrade {
    /// The DaemonSet, as `namespace/name`.
    pub rollout: String,
    /// Its nodes, by stage and name.
    pub nodes: Vec<UpgradeTurn>,
    /// How long the rest takes.
    pub forecast: Forecast,
}

impl PlannedUpgrade {
    /// The first node that failed, with the reason.
    pub fn failure(&self) -> Option<(&str, &str)> {
        self.nodes.iter().find(|turn| turn.stage == UpgradeStage::Failed)?.failure()
    }

    /// The same where the new driver is to blame: with `onFailure: put-back` the image before it is put back for this.
    pub(super) fn fault(&self) -> Option<(&str, &str)> {
        self.nodes.iter().find(|turn| turn.is_faulty())?.failure()
    }

    /// What is done now.
    pub fn changes(&self) -> impl Iterator<Item = &Change> {
        self.nodes.iter().flat_map(|turn| &turn.changes)
    }
}

impl UpgradeTurn {
    /// Does the new driver not work on it?
    pub(super) fn is_faulty(&self) -> bool {
        self.stage == UpgradeStage::Failed && self.note.as_ref().is_some_and(|note| !note.unchecked)
    }

    fn failure(&self) -> Option<(&str, &str)> {
        Some((&self.node, self.note.as_ref()?.why.as_deref().unwrap_or_default()))
    }
}

impl Upgrade<'_> {
    /// The plan now.
    pub fn plan(&self) -> PlannedUpgrade {
        let mut nodes: Vec<UpgradeTurn> = self.nodes.iter().map(|node| self.stand(node)).collect();
        self.begin(&mut nodes);
        nodes.sort_by(|a, b| (a.stage, &a.node).cmp(&(b.stage, &b.node)));
        let forecast = Forecast::of(self, &nodes);
        PlannedUpgrade { rollout: self.rollout(), nodes, forecast }
    }

    /// The DaemonSet, as notes name it.
    fn rollout(&self) -> String {
        format!("{}/{}", self.namespace, self.daemon_set)
    }

    /// How long ago that was; nothing for a time that is still to come.
    fn passed(&self, since: Timestamp) -> SignedDuration {
        self.now.duration_since(since).max(SignedDuration::ZERO)
    }
}

impl<'a> UpgradeNode<'a> {
    /// With its driver's pod, of which nothing else is known yet.
    pub fn of(facts: &'a NodeFacts, driver: Option<DriverPod<'a>>) -> Self {
        let (users, holders) = (Vec::new(), &[]);
        Self {
            facts,
            target: "",
            to_come: false,
            hand_over: None,
            driver,
            fits: None,
            users,
            forecast: None,
            holders,
            check: None,
        }
    }

    /// By the annotation of `waitFor`.
    fn is_said_to_be_checked(&self) -> bool {
        self.facts.annotations.get(UPGRADE_CHECKED).is_some_and(|image| image == self.target)
    }

    /// The driver's pod, unless it ends.
    fn living(&self) -> Option<DriverPod<'a>> {
        self.driver.filter(|driver| !driver.pod.deleting)
    }
}

#[cfg(test)]
mod tests;
