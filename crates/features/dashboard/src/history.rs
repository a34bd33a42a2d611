//! Recent changes of state: changes that the loop saw between reconciles, and changes whose time is in a record or a failure.

use std::collections::BTreeMap;

use farrier_controller::RolloutReport;
use farrier_core::{
    image::ImageName,
    kernel::KernelTarget,
    plan::{Outcome, Phase, RecordState, RolloutTarget, StatusEntry, rollout_action},
};
use jiff::Timestamp;
use serde::Serialize;

use super::fleet::{Change, Fleet, StateClass, ago, cell_link, class_of, subject};

/// Maximum number of changes that are shown.
const MAX_SHOWN_CHANGES: usize = 10;
/// Maximum number of changes that are kept. Many of them may be shown in one line, for example when an image is published for
/// many kernels.
const MAX_CHANGES: usize = 1000;

/// Maximum number of rewrites that are kept.
const MAX_REWRITES: usize = 50;

/// A rewrite that the loop made for a rollout.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Rewrite {
    #[serde(skip)]
    pub target: RolloutTarget,
    pub at: String,
    pub what: String,
    pub failed: Option<String>,
}

/// Observations of a loop since its start.
#[derive(Clone, Debug, Default)]
pub struct History {
    phases: BTreeMap<(ImageName, KernelTarget), Phase>,
    /// Since when a cell has been in its state, if the loop saw the change.
    pub since: BTreeMap<(ImageName, KernelTarget), Timestamp>,
    /// Changes, newest first.
    pub changes: Vec<Change>,
    /// Rewrites, newest first.
    pub rewrites: Vec<Rewrite>,
}

impl History {
    /// Records the current phases of the cells. The first call records no changes, because the earlier phases are unknown.
    pub fn record_phases(&mut self, fleet: &Fleet<'_>) {
        let (now, mut phases) = (fleet.facts.now, BTreeMap::new());
        let mut changes = Vec::new();
        for entry in &fleet.entries {
            let key = (entry.image.clone(), entry.target.clone());
            let (phase, before) = (entry.row.phase, self.phases.get(&key));
            if before != Some(&phase) && !self.phases.is_empty() {
                self.since.insert(key.clone(), now);
                changes.push(change_of(entry, now, (phase, class_of(entry))));
            }
            phases.insert(key, phase);
        }
        self.since.retain(|key, _| phases.contains_key(key));
        self.phases = phases;
        changes.append(&mut self.changes);
        changes.truncate(MAX_CHANGES);
        self.changes = changes;
    }

    /// Records the writes of a reconcile.
    pub fn record_rewrites(&mut self, reports: &[RolloutReport], time: Timestamp) {
        for RolloutReport { planned, error } in
            reports.iter().filter(|report| !report.planned.changes.is_empty())
        {
            let (action, why) = rollout_action(planned);
            let (target, at, failed) = (planned.target.clone(), format!("{time:.0}"), error.clone());
            let made = Rewrite { target, at, what: format!("{action}: {why}"), failed };
            // A rewrite that fails at each reconcile is listed once, so that it does not displace the others.
            self.rewrites.retain(|rewrite| {
                made.failed.is_none() || *rewrite != Rewrite { at: rewrite.at.clone(), ..made.clone() }
            });
            self.rewrites.insert(0, made);
        }
        self.rewrites.truncate(MAX_REWRITES);
    }
}

fn change_of(entry: &StatusEntry<'_>, time: Timestamp, (phase, class): (Phase, StateClass)) -> Change {
    let (subject, link) = (subject(entry), cell_link(entry.image, entry.target));
    let (state, changed) = (phase.as_str(), entry.image.to_string());
    Change { time, subject, link, state, class, ago: String::new(), changed, more: 0 }
}

/// Returns the changes that the loop observed, and the failures and rewrites with a known time, newest first.
pub fn changes(fleet: &Fleet<'_>, observed: &[Change]) -> Vec<Change> {
    let failed = fleet.entries.iter().filter_map(|entry| match entry.outcome {
        Outcome::Failed { at, .. } => Some(change_of(entry, *at, (Phase::Failed, StateClass::Bad))),
        _ => None,
    });
    let records =
        fleet.facts.records.iter().filter_map(|(object, record)| Some((object, record.as_ref().ok()?)));
    let rewritten = records.flat_map(|(object, record)| {
        record.0.iter().map(move |(field, record)| {
            let (state, class) = record_state(record.state);
            let (subject, link) = (format!("{object}, {field}"), "rollouts.html".to_owned());
            let (time, changed) = (record.at, object.clone());
            Change { time, subject, link, state, class, ago: String::new(), changed, more: 0 }
        })
    });
    let mut all: Vec<Change> = failed.chain(rewritten).chain(observed.iter().cloned()).collect();
    all.sort_by(|a, b| b.time.cmp(&a.time).then_with(|| a.cmp(b)));
    // A failure that the loop saw is in the list twice.
    let mut keys = std::collections::BTreeSet::new();
    all.retain(|change| keys.insert((change.subject.clone(), change.state)));
    // Merge the same change of one image for many kernels into one line.
    let mut lines: Vec<Change> = Vec::new();
    for mut change in all {
        change.ago = ago(change.time, fleet.now);
        let is_same = |line: &&mut Change| {
            line.changed == change.changed && line.state == change.state && line.ago == change.ago
        };
        match lines.iter_mut().find(is_same) {
            Some(line) => line.more += 1,
            None => lines.push(change),
        }
    }
    lines.truncate(MAX_SHOWN_CHANGES);
    lines
}

/// Returns the state of a rewrite in words, with its class.
pub fn record_state(state: RecordState) -> (&'static str, StateClass) {
    match state {
        RecordState::Set => ("set", StateClass::Run),
        RecordState::Good => ("good", StateClass::Ok),
        RecordState::Failed => ("restored", StateClass::Bad),
        RecordState::RolledBack => ("rolled back", StateClass::Warn),
        RecordState::Conflict => ("changed by another writer", StateClass::Bad),
    }
}
