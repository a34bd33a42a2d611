//! Determines the stage of each node, and starts the next nodes.

use std::cmp::Reverse;

use jiff::Timestamp;

use super::{
    DriverPod, PlannedNodeUpgrade, Upgrade, UpgradeNode, UpgradeNote, UpgradeStage, UpgradeState,
    UpgradeWait,
    note::set_note,
    turn::{Turn, UpgradeStep},
};
use crate::{
    image::{Canary, Drain},
    plan::{Change, labels::operator_upgrade_in_progress},
};

/// State of the canary nodes, which start before all other nodes.
enum Canaries {
    /// The canary nodes are done: any node may start.
    Done,
    /// Any nodes, up to this number.
    AnyOf(usize),
    /// Only the nodes with the canary labels.
    Labeled,
    /// No node has the canary labels.
    Missing,
}

/// Whether the node's new driver failed. The target may since have become another image with the same modules for the
/// node; the note then still applies to the node's current pod.
fn has_failed(node: &UpgradeNode<'_>, note: &UpgradeNote) -> bool {
    let is_failed_pod = |driver: DriverPod<'_>| {
        let was_created_during_upgrade = |at| (note.began..=note.since).contains(&at);
        driver.is_current && driver.pod.created.is_some_and(was_created_during_upgrade)
    };
    note.is_failure_of(node.target)
        || (note.state == UpgradeState::Failed && node.running_pod().is_some_and(is_failed_pod))
}

impl Upgrade<'_> {
    /// Determines the stage of a node by itself, regardless of other nodes.
    pub(super) fn stage_of(&self, node: &UpgradeNode<'_>) -> PlannedNodeUpgrade {
        let rollout = self.rollout();
        let note = UpgradeNote::of(node.facts);
        let is_own = |note: &UpgradeNote| note.rollout == rollout;
        let ended = || UpgradeNote::all(node.facts).into_iter().find(is_own);
        let own_note = note.clone().filter(is_own).or_else(ended);
        let node_upgrade = |stage, waits| PlannedNodeUpgrade {
            node: node.facts.name.clone(),
            to: node.target.to_owned(),
            stage,
            note: own_note.clone(),
            waits,
            changes: Vec::new(),
        };
        if let Some(note) = own_note.as_ref().filter(|note| note.state.is_in_progress()) {
            let UpgradeStep { changes, waits } = Turn { upgrade: self, node, note }.next();
            return PlannedNodeUpgrade { changes, ..node_upgrade(UpgradeStage::UnderWay, waits) };
        }
        if own_note.as_ref().is_some_and(|note| has_failed(node, note)) {
            return node_upgrade(UpgradeStage::Failed, None);
        }
        let has_target = match node.running_pod() {
            Some(driver) => driver.is_current,
            // The DaemonSet controller itself creates the next pod from the target, unless the node has lost its labels or a
            // taint keeps the pod off.
            None => node.fits.is_some() && node.taint.is_none(),
        };
        if node.hand_over.is_none() && has_target {
            return node_upgrade(UpgradeStage::Done, None);
        }
        let waits = self.own_wait(node, note.as_ref(), own_note.as_ref());
        let is_skipped = waits.as_ref().is_some_and(UpgradeWait::is_skip);
        node_upgrade(if is_skipped { UpgradeStage::Skipped } else { UpgradeStage::Waits }, waits)
    }

    /// Returns the reason why the node cannot start, regardless of the other nodes of the upgrade. `note` is the node's current
    /// note, and `own_note` the last one of this upgrade.
    fn own_wait(
        &self,
        node: &UpgradeNode<'_>,
        note: Option<&UpgradeNote>,
        own_note: Option<&UpgradeNote>,
    ) -> Option<UpgradeWait> {
        let facts = node.facts;
        // A node can hold only one note that has not ended, or has failed. A second upgrade would hide the other driver's
        // failure, and the upgrade of the other driver would continue.
        let is_other =
            |note: &&UpgradeNote| note.state.blocks_other_upgrades() && note.rollout != self.rollout();
        if let Some(other) = note.filter(is_other) {
            return Some(UpgradeWait::Other { rollout: other.rollout.clone() });
        }
        if let Some((label, state)) = operator_upgrade_in_progress(&facts.labels) {
            return Some(UpgradeWait::Operator { label, state: state.to_owned() });
        }
        if facts.unschedulable {
            return Some(UpgradeWait::Cordoned);
        }
        if let Some(why) = node.blocks_pods() {
            return Some(why);
        }
        match node.fits {
            None => return Some(UpgradeWait::KernelUnknown),
            Some(false) => return Some(UpgradeWait::NoModules { kernel: facts.kernel_version.clone() }),
            Some(true) => {}
        }
        if node.is_target_pending {
            return Some(if self.paused { UpgradeWait::Paused } else { UpgradeWait::Image });
        }
        let note =
            own_note.filter(|note| note.state == UpgradeState::NotDrained && note.to == node.target)?;
        let until = note.since.checked_add(self.spec.timeout.signed_duration()).ok()?;
        // Ignore a time in the future: it comes from a clock that jumped.
        (note.since <= self.now && self.now < until)
            .then(|| UpgradeWait::Again { until, why: note.why.clone().unwrap_or_default() })
    }

    /// Starts as many nodes as allowed, and sets the reason why the others wait.
    pub(super) fn begin(&self, node_upgrades: &mut [PlannedNodeUpgrade]) {
        let common_wait = self.common_wait(node_upgrades);
        let canary = self.canary_state(node_upgrades);
        let most = self.spec.max_parallel.limit(self.nodes.len());
        let is_in_progress = |node_upgrade: &PlannedNodeUpgrade| node_upgrade.stage == UpgradeStage::UnderWay;
        let are_down = self.are_down();
        let mut busy = node_upgrades.iter().filter(|node_upgrade| is_in_progress(node_upgrade)).count();
        let mut down = are_down
            .iter()
            .zip(&*node_upgrades)
            .filter(|(down, node_upgrade)| **down || is_in_progress(node_upgrade))
            .count();
        let mut canaries_left = match canary {
            Canaries::AnyOf(count) => count,
            Canaries::Done | Canaries::Labeled | Canaries::Missing => usize::MAX,
        };

        let is_free = |index: &usize| {
            let node_upgrade = &node_upgrades[*index];
            node_upgrade.stage == UpgradeStage::Waits && node_upgrade.waits.is_none()
        };
        let mut order: Vec<usize> = (0..self.nodes.len()).filter(is_free).collect();
        // Nodes without a working driver come first. Nodes that could not be drained come last.
        order.sort_by_key(|index| {
            let (node, node_upgrade) = (&self.nodes[*index], &node_upgrades[*index]);
            let was_tried =
                node_upgrade.note.as_ref().is_some_and(|note| note.state == UpgradeState::NotDrained);
            (was_tried, Reverse(are_down[*index]), &node.facts.name)
        });
        for index in order {
            let (node, node_upgrade) = (&self.nodes[index], &mut node_upgrades[index]);
            let may_go_first = match (&canary, &self.spec.canary) {
                (Canaries::Labeled, Some(Canary::Labels(labels))) => labels.matches(&node.facts.labels),
                _ => canaries_left > 0,
            };
            let is_down = are_down[index];
            // The node's driver does not work, because it failed or has no modules for the node's kernel. Another image can
            // only help, so the node does not wait for the window, the pause between nodes or the canary.
            let has_failed =
                node_upgrade.note.as_ref().is_some_and(|note| note.state == UpgradeState::Failed);
            let was_broken =
                is_down && (has_failed || node.driver.is_some_and(|driver| driver.lacks_modules));
            node_upgrade.waits = match common_wait.as_ref().filter(|why| !was_broken || !why.is_timed()) {
                Some(common_wait) => Some(common_wait.clone()),
                None if matches!(canary, Canaries::Missing) && !was_broken => Some(UpgradeWait::NoCanary),
                None if !may_go_first && !was_broken => Some(UpgradeWait::Canary),
                None if busy >= most || (!is_down && down >= most) => Some(UpgradeWait::Room { down, most }),
                None => None,
            };
            if node_upgrade.waits.is_none() {
                node_upgrade.stage = UpgradeStage::Begins;
                node_upgrade.changes.push(self.first_write(node));
                busy += 1;
                down += usize::from(!is_down);
                canaries_left = canaries_left.saturating_sub(1);
            }
        }
    }

    /// Returns for each node whether it has no working driver, whatever the cause.
    fn are_down(&self) -> Vec<bool> {
        let mut missing = self.missing;
        let is_down = |node: &UpgradeNode<'_>| {
            let is_missing = node.driver.is_none() && (missing > 0 || node.taint.is_some());
            missing = missing.saturating_sub(usize::from(node.driver.is_none()));
            let works = node.driver.is_none_or(|driver| driver.pod.ready && !driver.pod.deleting);
            node.facts.not_ready || is_missing || !works
        };
        self.nodes.iter().map(is_down).collect()
    }

    /// Returns the first write to a node.
    fn first_write(&self, node: &UpgradeNode<'_>) -> Change {
        let is_drained = self.spec.drain != Drain::None;
        let mut others = UpgradeNote::all(node.facts);
        others.retain(|note| note.rollout != self.rollout());
        let note = UpgradeNote {
            by: self.by.to_owned(),
            rollout: self.rollout(),
            state: if is_drained { UpgradeState::Cordoned } else { UpgradeState::Drained },
            since: self.now,
            began: self.now,
            to: node.target.to_owned(),
            cordoned: is_drained,
            unchecked: false,
            why: None,
            others,
        };
        set_note(node.facts, Some(&note), is_drained.then_some(true))
    }

    /// Returns the reason for starting no node at all.
    fn common_wait(&self, node_upgrades: &[PlannedNodeUpgrade]) -> Option<UpgradeWait> {
        if let Some(failed) =
            node_upgrades.iter().find(|node_upgrade| node_upgrade.stage == UpgradeStage::Failed)
        {
            return Some(UpgradeWait::Stopped { node: failed.node.clone() });
        }
        if self.paused {
            return Some(UpgradeWait::Paused);
        }
        if let Some(window) = &self.spec.window {
            let opens = window.next(self.now).map(|(opens, _)| opens);
            if opens.is_none_or(|opens| opens > self.now) {
                return Some(UpgradeWait::Window { opens });
            }
        }
        let end_of = |node_upgrade: &PlannedNodeUpgrade| {
            let note = node_upgrade.note.as_ref().filter(|note| !note.state.is_in_progress())?;
            Some(note.since).filter(|since| *since <= self.now)
        };
        let last: Timestamp = node_upgrades.iter().filter_map(end_of).max()?;
        let until = last.checked_add(self.spec.between.signed_duration()).ok()?;
        (self.now < until).then_some(UpgradeWait::Between { until })
    }

    /// Returns the state of the canary nodes.
    fn canary_state(&self, node_upgrades: &[PlannedNodeUpgrade]) -> Canaries {
        match &self.spec.canary {
            None => Canaries::Done,
            Some(Canary::Nodes(count)) => {
                let count = usize::try_from(count.get()).unwrap_or(usize::MAX);
                let was_upgraded = |node_upgrade: &&PlannedNodeUpgrade| {
                    let is_noted = node_upgrade.note.as_ref().is_some_and(|note| {
                        note.state == UpgradeState::Uncordoned && note.to == node_upgrade.to
                    });
                    node_upgrade.stage == UpgradeStage::Done && is_noted
                };
                let done = node_upgrades.iter().filter(was_upgraded).count();
                let busy = node_upgrades
                    .iter()
                    .filter(|node_upgrade| node_upgrade.stage == UpgradeStage::UnderWay)
                    .count();
                if done >= count {
                    Canaries::Done
                } else {
                    Canaries::AnyOf(count.saturating_sub(done + busy))
                }
            }
            Some(Canary::Labels(labels)) => {
                let is_first = |node: &UpgradeNode<'_>| labels.matches(&node.facts.labels);
                let stages = self.nodes.iter().zip(node_upgrades).filter(|(node, _)| is_first(node));
                let stages: Vec<UpgradeStage> = stages.map(|(_, node_upgrade)| node_upgrade.stage).collect();
                if stages.is_empty() {
                    Canaries::Missing
                } else if stages.iter().all(|stage| *stage == UpgradeStage::Done) {
                    Canaries::Done
                } else {
                    Canaries::Labeled
                }
            }
        }
    }
}
