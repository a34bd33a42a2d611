//! Estimates the remaining time of an upgrade.

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::{PlannedNodeUpgrade, Upgrade, UpgradeNote, UpgradeStage, UpgradeState};
use crate::image::{Canary, Window};

/// Progress and expected end of an upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UpgradeForecast {
    /// Number of nodes with the target's driver.
    pub done: usize,
    /// Number of nodes that are being upgraded or start now.
    #[serde(rename = "underWay")]
    pub in_progress: usize,
    /// Number of nodes that start later.
    pub waiting: usize,
    /// Number of nodes that are skipped in their current state.
    pub skipped: usize,
    /// Number of nodes on which the new driver does not work.
    pub failed: usize,
    /// Average seconds per node; `None` before the first node is done.
    pub seconds_per_node: Option<i64>,
    /// Expected end with `maxParallel`, `between` and `window`; `None` where the upgrade cannot continue without
    /// intervention, or nothing is left. Before the first node is done, this is a lower bound, because a node takes at
    /// least `stableFor`.
    pub ends: Option<Timestamp>,
}

impl UpgradeForecast {
    /// Whether the upgrade is complete: all nodes have the new driver or are skipped, and at least one node was upgraded.
    pub(in crate::plan) fn is_over(&self) -> bool {
        self.seconds_per_node.is_some() && self.in_progress + self.waiting + self.failed == 0
    }

    /// Computes the forecast of an upgrade from its nodes.
    pub(super) fn of(upgrade: &Upgrade<'_>, node_upgrades: &[PlannedNodeUpgrade]) -> Self {
        let count = |stage| node_upgrades.iter().filter(|node_upgrade| node_upgrade.stage == stage).count();
        let in_progress = count(UpgradeStage::UnderWay) + count(UpgradeStage::Begins);
        let (waiting, failed) = (count(UpgradeStage::Waits), count(UpgradeStage::Failed));
        let average_per_node = average_per_node(node_upgrades);
        let continues = in_progress + waiting > 0 && failed == 0 && !upgrade.paused;
        let end = || {
            let per_node = average_per_node.unwrap_or(upgrade.stable_for);
            let work = remaining_work(upgrade, per_node, in_progress + waiting, node_upgrades);
            end_of(upgrade.spec.window.as_ref(), upgrade.now, work)
        };
        Self {
            done: count(UpgradeStage::Done),
            in_progress,
            waiting,
            skipped: count(UpgradeStage::Skipped),
            failed,
            seconds_per_node: average_per_node.map(|duration| duration.as_secs()),
            ends: if continues { end() } else { None },
        }
    }
}

/// Returns the average time of the nodes that got their target.
fn average_per_node(node_upgrades: &[PlannedNodeUpgrade]) -> Option<SignedDuration> {
    let is_done = |note: &UpgradeNote, to: &str| note.state == UpgradeState::Uncordoned && note.to == to;
    let notes = node_upgrades
        .iter()
        .filter_map(|node_upgrade| node_upgrade.note.as_ref().filter(|note| is_done(note, &node_upgrade.to)));
    let times: Vec<i64> = notes.map(|note| note.since.duration_since(note.began).as_secs().max(0)).collect();
    let count = i64::try_from(times.len()).ok().filter(|count| *count > 0)?;
    let sum = times.iter().fold(0_i64, |sum, next| sum.saturating_add(*next));
    Some(SignedDuration::from_secs(sum / count))
}

/// Returns the duration of the upgrade of a number of nodes, with `maxParallel` nodes at a time, and the canary nodes before
/// the others.
fn remaining_work(
    upgrade: &Upgrade<'_>,
    average_per_node: SignedDuration,
    nodes: usize,
    node_upgrades: &[PlannedNodeUpgrade],
) -> SignedDuration {
    let parallel = upgrade.spec.max_parallel.limit(upgrade.nodes.len());
    let canaries = match &upgrade.spec.canary {
        Some(Canary::Nodes(count)) => {
            let done =
                node_upgrades.iter().filter(|node_upgrade| node_upgrade.stage == UpgradeStage::Done).count();
            usize::try_from(count.get()).unwrap_or(usize::MAX).saturating_sub(done).min(nodes)
        }
        Some(Canary::Labels(_)) | None => 0,
    };
    let waves = canaries.div_ceil(parallel) + (nodes - canaries).div_ceil(parallel);
    let waves = i32::try_from(waves).unwrap_or(i32::MAX);
    let pauses = upgrade.spec.between.signed_duration().saturating_mul(waves.saturating_sub(1));
    average_per_node.saturating_mul(waves).saturating_add(pauses)
}

/// Returns the end of work that is done only while the window is open.
fn end_of(window: Option<&Window>, now: Timestamp, work: SignedDuration) -> Option<Timestamp> {
    /// Maximum number of openings to examine: five years of nightly windows. A later end is not reported.
    const OPENINGS: usize = 2000;
    let Some(window) = window else { return now.checked_add(work).ok() };
    let (mut from, mut remaining) = (now, work);
    for _ in 0..OPENINGS {
        let (opens, closes) = window.next(from)?;
        let start = opens.max(from);
        let open_for = closes.duration_since(start);
        if remaining <= open_for {
            return start.checked_add(remaining).ok();
        }
        (from, remaining) = (closes, remaining.saturating_sub(open_for));
    }
    None
}
