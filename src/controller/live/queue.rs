//! Adapter: which build runs next. A state machine: what is wanted, the time and outcomes come in as arguments.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::Instant;

use crate::{
    image::{BuildSpec, ImageName, InputHash},
    kernel::KernelTarget,
    parts::BuildLimits,
    plan::{Cell, retry},
};

/// Which image for which kernel target.
pub(super) type CellKey = (ImageName, KernelTarget);

/// The key of a cell.
pub(super) fn key_of(cell: &Cell) -> CellKey {
    (cell.image.clone(), cell.target.clone())
}

/// How a build ended, as far as the queue is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ended {
    /// It is published, or failed for good: the next plan asks for it again, or does not.
    Settled,
    /// A fault that may pass.
    Passing,
    /// It was stopped before it came to anything.
    Stopped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// To be started as soon as there is room.
    Queued,
    /// Started.
    Running,
    /// To be started again then.
    Waiting(Instant),
}

#[derive(Debug)]
struct Entry {
    cell: Arc<Cell>,
    /// What it takes of the machine.
    cost: BuildSpec,
    /// Its place in the plan, whose order puts what others need first.
    place: usize,
    state: State,
    failed: u32,
    wanted: bool,
}

/// The builds that the plan asks for: each at most once at a time, and no more at once than allowed.
#[derive(Debug)]
pub(super) struct Queue {
    entries: BTreeMap<CellKey, Entry>,
    limits: BuildLimits,
    /// What was built, where each cell is built once, whatever comes of it.
    built: Option<BTreeSet<CellKey>>,
}

impl Queue {
    /// An empty queue for so many builds at once, at least one.
    pub(super) fn new(limits: BuildLimits) -> Self {
        Self { entries: BTreeMap::new(), limits, built: None }
    }

    /// The same, in which no cell is built a second time.
    pub(super) fn once(limits: BuildLimits) -> Self {
        Self { built: Some(BTreeSet::new()), ..Self::new(limits) }
    }

    /// Is each cell built once?
    pub(super) fn is_once(&self) -> bool {
        self.built.is_some()
    }

    /// Takes over what a plan asks for. What only waits and is not asked for any more is dropped; what runs ends by
    /// itself. Inputs that changed start anew, without the waits that the old ones had earned; these are told.
    pub(super) fn update(
        &mut self,
        wanted: impl IntoIterator<Item = (Arc<Cell>, BuildSpec)>,
    ) -> Vec<CellKey> {
        let mut renewed = Vec::new();
        for entry in self.entries.values_mut() {
            entry.wanted = false;
        }
        for (place, (cell, cost)) in wanted.into_iter().enumerate() {
            let key = key_of(&cell);
            if self.built.as_ref().is_some_and(|built| built.contains(&key)) {
                continue;
            }
            match self.entries.get_mut(&key) {
                Some(entry) if entry.state == State::Running || entry.input_hash() == cell.input_hash => {
                    // A build that runs keeps its inputs; when they changed, the plan after its end says so.
                    if entry.state != State::Running {
                        entry.cell = cell;
                        entry.cost = cost;
                    }
                    entry.place = place;
                    entry.wanted = true;
                }
                other => {
                    if other.is_some() {
                        renewed.push(key.clone());
                    }
                    let entry = Entry { cell, cost, place, state: State::Queued, failed: 0, wanted: true };
                    self.entries.insert(key, entry);
                }
            }
        }
        self.entries.retain(|_, entry| entry.wanted || entry.state == State::Running);
        renewed
    }

    /// Puts off new builds whose inputs have ended so many attempts without an outcome, so that what killed farrier does not
    /// kill it again at once. Gives each of them with its attempts, and the wait.
    pub(super) fn put_off(
        &mut self,
        attempts: &BTreeMap<InputHash, u32>,
        now: Instant,
        jitter: f64,
    ) -> Vec<(CellKey, u32, Duration)> {
        let mut waits = Vec::new();
        for (key, entry) in &mut self.entries {
            if entry.state == State::Queued
                && entry.failed == 0
                && let Some(&failed) = attempts.get(&entry.input_hash())
            {
                let wait = retry::build_delay(failed, jitter);
                entry.failed = failed;
                entry.state = State::Waiting(now + wait);
                waits.push((key.clone(), failed, wait));
            }
        }
        waits
    }

    /// The next build to start now, which then counts as running.
    pub(super) fn start(&mut self, now: Instant) -> Option<Arc<Cell>> {
        let running: Vec<BuildSpec> = self.costs().copied().collect();
        if running.len() >= self.limits.at_once.max(1) {
            return None;
        }
        let ready = |entry: &&mut Entry| match entry.state {
            State::Queued => true,
            State::Waiting(until) => until <= now,
            State::Running => false,
        };
        let next = self.entries.values_mut().filter(ready).min_by_key(|entry| entry.place)?;
        // None overtakes another: a large one would wait for ever behind small ones.
        if !self.limits.budget.admits(&running, &next.cost) {
            return None;
        }
        next.state = State::Running;
        Some(Arc::clone(&next.cell))
    }

    /// Notes an end. Gives the wait before the next attempt, where there will be one by itself.
    pub(super) fn ended(&mut self, key: &CellKey, how: Ended, now: Instant, jitter: f64) -> Option<Duration> {
        if let Some(built) = &mut self.built {
            built.insert(key.clone());
            self.entries.remove(key);
        }
        let entry = self.entries.get_mut(key)?;
        match how {
            Ended::Settled => {
                self.entries.remove(key);
                None
            }
            Ended::Stopped => {
                entry.state = State::Queued;
                None
            }
            Ended::Passing => {
                entry.failed = entry.failed.saturating_add(1);
                let wait = retry::build_delay(entry.failed, jitter);
                entry.state = State::Waiting(now + wait);
                Some(wait)
            }
        }
    }

    /// When the next wait is over. What waits for room has no time: it is looked at when a build ends.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        let until = |entry: &Entry| match entry.state {
            State::Waiting(until) => Some(until).filter(|until| *until > now),
            State::Queued | State::Running => None,
        };
        self.entries.values().filter_map(until).min()
    }

    /// Builds that run.
    pub(super) fn running(&self) -> usize {
        self.costs().count()
    }

    /// What they take.
    fn costs(&self) -> impl Iterator<Item = &BuildSpec> {
        self.entries.values().filter(|entry| entry.state == State::Running).map(|entry| &entry.cost)
    }

    /// Builds that wait for room, or for the time of their next attempt.
    pub(super) fn waiting(&self) -> usize {
        self.entries.len() - self.running()
    }

    /// Cells that wait for room only.
    pub(super) fn queued(&self) -> impl Iterator<Item = &CellKey> {
        self.entries.iter().filter(|(_, entry)| entry.state == State::Queued).map(|(key, _)| key)
    }

    /// Does the queue hold it, in whatever state?
    pub(super) fn holds(&self, key: &CellKey) -> bool {
        self.entries.contains_key(key)
    }
}

impl Entry {
    fn input_hash(&self) -> InputHash {
        self.cell.input_hash
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
