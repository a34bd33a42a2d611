//! Pure: how long the rest of an upgrade takes.

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::{Upgrade, UpgradeNote, UpgradeStage, UpgradeState, UpgradeTurn, turn::seconds};
use crate::image::{Canary, Window};

/// How an upgrade goes on.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Forecast {
    /// Nodes with the target's driver.
    pub done: usize,
    /// Nodes that farrier is at, or begins now.
    pub under_way: usize,
    /// Nodes that are begun later.
    pub waiting: usize,
    /// Nodes that farrier does not touch as they are.
    pub left_alone: usize,
    /// Nodes on which the new driver does not work.
    pub failed: usize,
    /// How long a node took, in seconds, on average; `None` where none has been done yet.
    pub seconds_per_node: Option<i64>,
    /// When the last node is done, with `maxParallel`, `between` and `window`; `None` where it does not go on by itself, or nothing is
    /// left. Where no node has been done yet, it is not earlier than this: a node takes `stableFor` at least.
    pub ends: Option<Timestamp>,
}

impl Forecast {
    /// Has every node the target's driver that is to get it, and at least one got it?
    pub(in crate::plan) fn is_over(&self) -> bool {
        self.seconds_per_node.is_some() && self.under_way + self.waiting + self.failed == 0
    }

    /// Of an upgrade with its nodes.
    pub(super) fn of(upgrade: &Upgrade<'_>, turns: &[UpgradeTurn]) -> Self {
        let count = |stage| turns.iter().filter(|turn| turn.stage == stage).count();
        let under_way = count(UpgradeStage::UnderWay) + count(UpgradeStage::Begins);
        let (waiting, failed) = (count(UpgradeStage::Waits), count(UpgradeStage::Failed));
        let per_node = per_node(turns);
        let goes_on = under_way + waiting > 0 && failed == 0 && !upgrade.paused;
        let work = || work(upgrade, per_node.unwrap_or(upgrade.stable_for), under_way + waiting, turns);
        Self {
            done: count(UpgradeStage::Done),
            under_way,
            waiting,
            left_alone: count(UpgradeStage::LeftAlone),
            failed,
            seconds_per_node: per_node.map(|took| took.as_secs()),
            ends: if goes_on { ends(upgrade.spec.window.as_ref(), upgrade.now, work()) } else { None },
        }
    }
}

/// How long the nodes took that got this target.
fn per_node(turns: &[UpgradeTurn]) -> Option<SignedDuration> {
    let is_done = |note: &UpgradeNote, to: &str| note.state == UpgradeState::Uncordoned && note.to == to;
    let notes = turns.iter().filter_map(|turn| turn.note.as_ref().filter(|note| is_done(note, &turn.to)));
    let took: Vec<i64> = notes.map(|note| note.since.duration_since(note.began).as_secs().max(0)).collect();
    let count = i64::try_from(took.len()).ok().filter(|count| *count > 0)?;
    let sum = took.iter().fold(0_i64, |sum, next| sum.saturating_add(*next));
    Some(SignedDuration::from_secs(sum / count))
}

/// How long so many nodes take: so many at once as may be, those that go first before the others.
fn work(
    upgrade: &Upgrade<'_>,
    per_node: SignedDuration,
    nodes: usize,
    turns: &[UpgradeTurn],
) -> SignedDuration {
    let at_once = upgrade.spec.max_parallel.of(upgrade.nodes.len());
    let first = match &upgrade.spec.canary {
        Some(Canary::Nodes(count)) => {
            let done = turns.iter().filter(|turn| turn.stage == UpgradeStage::Done).count();
            usize::try_from(count.get()).unwrap_or(usize::MAX).saturating_sub(done).min(nodes)
        }
        Some(Canary::Labels(_)) | None => 0,
    };
    let waves = first.div_ceil(at_once) + (nodes - first).div_ceil(at_once);
    let waves = i32::try_from(waves).unwrap_or(i32::MAX);
    let pauses = seconds(upgrade.spec.between).saturating_mul(waves.saturating_sub(1));
    per_node.saturating_mul(waves).saturating_add(pauses)
}

/// When so much work is done that is only done while the window is open.
fn ends(window: Option<&Window>, now: Timestamp, work: SignedDuration) -> Option<Timestamp> {
    /// Of a window: five years of nights. What takes longer has no end that anybody waits for.
    const OPENINGS: usize = 2000;
    let Some(window) = window else { return now.checked_add(work).ok() };
    let (mut at, mut left) = (now, work);
    for _ in 0..OPENINGS {
        let (opens, closes) = window.next(at)?;
        let begins = opens.max(at);
        let room = closes.duration_since(begins);
        if left <= room {
            return begins.checked_add(left).ok();
        }
        (at, left) = (closes, left.saturating_sub(room));
    }
    None
}
