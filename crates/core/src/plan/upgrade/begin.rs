//! Determines the stage of each node, and which nodes start now.

use std::cmp::Reverse;

use jiff::Timestamp;

use super::{
    DriverPod, PlannedNodeUpgrade, Upgrade, UpgradeNode, UpgradeNote, UpgradeStage, UpgradeState,
    UpgradeWait,
    note::mark,
    turn::{UpgradeStep, seconds},
};
use crate::{
    image::{Canary, Drain},
    plan::{Change, labels::operator_upgrade_in_progress},
};

/// Canary nodes that may still be started.
enum First {
    /// The canary nodes are done: any node may start.
    Done,
    /// Any nodes, up to this number.
    AnyOf(usize),
    /// Only the nodes with the canary labels.
    Labelled,
    /// No node has the canary labels.
    Missing,
}

/// Whether the node's new driver failed. The target may since have become another image with the same modules for the
/// node; the note then still applies to the node's current pod.
fn has_failed(node: &UpgradeNode<'_>, note: &UpgradeNote) -> bool {
    let is_about = |driver: DriverPod<'_>| {
        let was_made_in_turn = |at| (note.began..=note.since).contains(&at);
        driver.is_current && driver.pod.created.is_some_and(was_made_in_turn)
    };
    note.is_failure_of(node.target)
        || (note.state == UpgradeState::Failed && node.running_pod().is_some_and(is_about))
}

impl Upgrade<'_> {
    /// Determines the stage of a node by itself, regardless of other nodes.
    pub(super) fn stage_of(&self, node: &UpgradeNode<'_>) -> PlannedNodeUpgrade {
        let (note, rollout) = (UpgradeNote::of(node.facts), self.rollout());
        let node_upgrade = |stage, waits| PlannedNodeUpgrade {
            node: node.facts.name.clone(),
            to: node.target.to_owned(),
            stage,
            note: note.clone().filter(|note| note.rollout == rollout),
            waits,
            changes: Vec::new(),
        };
        let ours = note.as_ref().filter(|note| note.rollout == rollout);
        if let Some(note) = ours.filter(|note| note.state.is_under_way()) {
            let UpgradeStep { changes, waits } = self.next(node, note);
            return PlannedNodeUpgrade { changes, ..node_upgrade(UpgradeStage::UnderWay, waits) };
        }
        if ours.is_some_and(|note| has_failed(node, note)) {
            return node_upgrade(UpgradeStage::Failed, None);
        }
        // The DaemonSet controller creates the next pod from the target anyway.
        if node.hand_over.is_none() && node.running_pod().is_none_or(|driver| driver.is_current) {
            return node_upgrade(UpgradeStage::Done, None);
        }
        let waits = self.own_wait(node, note.as_ref());
        let is_left = waits.as_ref().is_some_and(UpgradeWait::is_skip);
        node_upgrade(if is_left { UpgradeStage::Skipped } else { UpgradeStage::Waits }, waits)
    }

    /// Returns the reason in the node itself for not starting it.
    fn own_wait(&self, node: &UpgradeNode<'_>, note: Option<&UpgradeNote>) -> Option<UpgradeWait> {
        let facts = node.facts;
        // A node can hold only one note. A second upgrade would overwrite the other driver's failure, and that driver's
        // upgrade would continue.
        let is_other = |note: &&UpgradeNote| note.state.is_open() && note.rollout != self.rollout();
        if let Some(other) = note.filter(is_other) {
            return Some(UpgradeWait::Other { rollout: other.rollout.clone() });
        }
        if let Some((label, state)) = operator_upgrade_in_progress(&facts.labels) {
            return Some(UpgradeWait::Operator { label, state: state.to_owned() });
        }
        if facts.unschedulable {
            return Some(UpgradeWait::Cordoned);
        }
        if facts.not_ready {
            return Some(UpgradeWait::NotReady);
        }
        match node.fits {
            None => return Some(UpgradeWait::KernelUnknown),
            Some(false) => return Some(UpgradeWait::NoModules { kernel: facts.kernel_version.clone() }),
            Some(true) => {}
        }
        if node.is_target_pending {
            return Some(if self.paused { UpgradeWait::Paused } else { UpgradeWait::Image });
        }
        let note = note.filter(|note| note.state == UpgradeState::NotDrained && note.to == node.target)?;
        let until = note.since.checked_add(seconds(self.spec.timeout)).ok()?;
        // Ignore a time in the future: it comes from a clock that jumped.
        (note.since <= self.now && self.now < until)
            .then(|| UpgradeWait::Again { until, why: note.why.clone().unwrap_or_default() })
    }

    /// Starts as many nodes as allowed, and sets the reason why the others wait.
    pub(super) fn begin(&self, node_upgrades: &mut [PlannedNodeUpgrade]) {
        let stopped = self.common_wait(node_upgrades);
        let first = self.first(node_upgrades);
        let most = self.spec.max_parallel.limit(self.nodes.len());
        let under_way = |node_upgrade: &PlannedNodeUpgrade| node_upgrade.stage == UpgradeStage::UnderWay;
        let are_down = self.are_down();
        let mut taken = node_upgrades.iter().filter(|node_upgrade| under_way(node_upgrade)).count();
        let mut down = are_down
            .iter()
            .zip(&*node_upgrades)
            .filter(|(down, node_upgrade)| **down || under_way(node_upgrade))
            .count();
        let mut left = match first {
            First::AnyOf(left) => left,
            First::Done | First::Labelled | First::Missing => usize::MAX,
        };

        let is_free = |place: &usize| {
            node_upgrades.get(*place).is_some_and(|node_upgrade| {
                node_upgrade.stage == UpgradeStage::Waits && node_upgrade.waits.is_none()
            })
        };
        let mut order: Vec<usize> = (0..self.nodes.len()).filter(is_free).collect();
        // Nodes whose driver does not work anyway come first. Nodes that could not be drained have had their turn and
        // come last.
        order.sort_by_key(|place| {
            let (node, node_upgrade) = (&self.nodes[*place], &node_upgrades[*place]);
            let was_tried =
                node_upgrade.note.as_ref().is_some_and(|note| note.state == UpgradeState::NotDrained);
            (was_tried, Reverse(are_down[*place]), &node.facts.name)
        });
        for place in order {
            let (node, node_upgrade) = (&self.nodes[place], &mut node_upgrades[place]);
            let is_first = match (&first, &self.spec.canary) {
                (First::Labelled, Some(Canary::Labels(labels))) => labels.matches(&node.facts.labels),
                _ => left > 0,
            };
            let is_down = are_down[place];
            // The node's driver failed and does not work, so another image can only help. The node waits neither for a
            // time nor for the canary.
            let is_mended =
                is_down && node_upgrade.note.as_ref().is_some_and(|note| note.state == UpgradeState::Failed);
            node_upgrade.waits = match stopped.as_ref().filter(|why| !is_mended || !why.is_timed()) {
                Some(stopped) => Some(stopped.clone()),
                None if matches!(first, First::Missing) && !is_mended => Some(UpgradeWait::NoCanary),
                None if !is_first && !is_mended => Some(UpgradeWait::Canary),
                None if taken >= most || (!is_down && down >= most) => Some(UpgradeWait::Room { down, most }),
                None => None,
            };
            if node_upgrade.waits.is_none() {
                node_upgrade.stage = UpgradeStage::Begins;
                node_upgrade.changes.push(self.first_write(node));
                taken += 1;
                down += usize::from(!is_down);
                left = left.saturating_sub(1);
            }
        }
    }

    /// Returns which nodes have no working driver, whatever the cause.
    fn are_down(&self) -> Vec<bool> {
        let mut missing = self.missing;
        let is_down = |node: &UpgradeNode<'_>| {
            let is_missing = node.driver.is_none() && missing > 0;
            missing = missing.saturating_sub(usize::from(node.driver.is_none()));
            let works = node.driver.is_none_or(|driver| driver.pod.ready && !driver.pod.deleting);
            node.facts.not_ready || is_missing || !works
        };
        self.nodes.iter().map(is_down).collect()
    }

    /// Returns the first write to a node.
    fn first_write(&self, node: &UpgradeNode<'_>) -> Change {
        let is_drained = self.spec.drain != Drain::None;
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
        };
        mark(node.facts, Some(&note), is_drained.then_some(true))
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
        let ended = |node_upgrade: &PlannedNodeUpgrade| {
            let note = node_upgrade.note.as_ref().filter(|note| !note.state.is_under_way())?;
            Some(note.since).filter(|since| *since <= self.now)
        };
        let last: Timestamp = node_upgrades.iter().filter_map(ended).max()?;
        let until = last.checked_add(seconds(self.spec.between)).ok()?;
        (self.now < until).then_some(UpgradeWait::Between { until })
    }

    /// Returns which nodes go first.
    fn first(&self, node_upgrades: &[PlannedNodeUpgrade]) -> First {
        match &self.spec.canary {
            None => First::Done,
            Some(Canary::Nodes(count)) => {
                let count = usize::try_from(count.get()).unwrap_or(usize::MAX);
                let was_upgraded = |node_upgrade: &&PlannedNodeUpgrade| {
                    let noted = node_upgrade.note.as_ref().is_some_and(|note| {
                        note.state == UpgradeState::Uncordoned && note.to == node_upgrade.to
                    });
                    node_upgrade.stage == UpgradeStage::Done && noted
                };
                let done = node_upgrades.iter().filter(was_upgraded).count();
                let under_way = node_upgrades
                    .iter()
                    .filter(|node_upgrade| node_upgrade.stage == UpgradeStage::UnderWay)
                    .count();
                if done >= count { First::Done } else { First::AnyOf(count.saturating_sub(done + under_way)) }
            }
            Some(Canary::Labels(labels)) => {
                let is_first = |node: &UpgradeNode<'_>| labels.matches(&node.facts.labels);
                let stages = self.nodes.iter().zip(node_upgrades).filter(|(node, _)| is_first(node));
                let stages: Vec<UpgradeStage> = stages.map(|(_, node_upgrade)| node_upgrade.stage).collect();
                if stages.is_empty() {
                    First::Missing
                } else if stages.iter().all(|stage| *stage == UpgradeStage::Done) {
                    First::Done
                } else {
                    First::Labelled
                }
            }
        }
    }
}
