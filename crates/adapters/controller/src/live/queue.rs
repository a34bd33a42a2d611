//! Decides which build runs next. The queue is a state machine: wanted builds, outcomes and the time are arguments.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use farrier_builder::parts::BuildLimits;
use farrier_core::{
    image::{BuildSpec, ImageName, InputHash},
    kernel::KernelTarget,
    plan::{Cell, retry},
};
use tokio::time::Instant;

/// Key of a cell: a driver image and a kernel target.
pub(super) type CellKey = (ImageName, KernelTarget);

pub(super) fn key_of(cell: &Cell) -> CellKey {
    (cell.image.clone(), cell.target.clone())
}

/// Outcome of a build, as far as the queue needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BuildDisposition {
    /// Published, or failed permanently. The next plan may ask for the build again.
    Settled,
    /// A transient fault: the build is retried after a backoff.
    Transient,
    /// Stopped without an outcome.
    Stopped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Starts as soon as there is capacity.
    Queued,
    Running,
    /// Starts again at that time.
    Waiting(Instant),
}

#[derive(Debug)]
struct Entry {
    cell: Arc<Cell>,
    /// Resources that the build takes.
    cost: BuildSpec,
    /// Position in the plan, whose order puts dependencies first.
    place: usize,
    state: State,
    failed: u32,
    wanted: bool,
}

/// Build queue. Runs each cell at most once at a time, within the limits on concurrency and resources.
#[derive(Debug)]
pub(super) struct Queue {
    entries: BTreeMap<CellKey, Entry>,
    limits: BuildLimits,
    /// Cells already built, if each cell may be built only once, whatever the outcome.
    built: Option<BTreeSet<CellKey>>,
}

impl Queue {
    /// Creates an empty queue for `limits.at_once` concurrent builds, at least one.
    pub(super) fn new(limits: BuildLimits) -> Self {
        Self { entries: BTreeMap::new(), limits, built: None }
    }

    /// Creates an empty queue that builds no cell a second time.
    pub(super) fn once(limits: BuildLimits) -> Self {
        Self { built: Some(BTreeSet::new()), ..Self::new(limits) }
    }

    /// Whether each cell is built only once.
    pub(super) fn is_once(&self) -> bool {
        self.built.is_some()
    }

    /// Updates the queue with the builds of a plan. A queued build that is no longer wanted is dropped; a running build
    /// is left to finish. A build with changed inputs starts again without backoff. Returns the keys of such builds.
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
                    // A running build keeps its inputs. If they changed, the plan after its end asks for the new ones.
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

    /// Delays new builds whose inputs had attempts without an outcome, so that a build that killed farrier does not
    /// kill it again at once. Returns each such build with its number of attempts and its wait.
    pub(super) fn deferred(
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

    /// Returns the next build that may start now, and marks it as running.
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
        // Strict order: if small builds overtook a large one, it could wait forever.
        if !self.limits.budget.admits(&running, &next.cost) {
            return None;
        }
        next.state = State::Running;
        Some(Arc::clone(&next.cell))
    }

    /// Records the end of a build. Returns the wait before the next attempt, if the build is retried.
    pub(super) fn ended(
        &mut self,
        key: &CellKey,
        how: BuildDisposition,
        now: Instant,
        jitter: f64,
    ) -> Option<Duration> {
        if let Some(built) = &mut self.built {
            built.insert(key.clone());
            self.entries.remove(key);
        }
        let entry = self.entries.get_mut(key)?;
        match how {
            BuildDisposition::Settled => {
                self.entries.remove(key);
                None
            }
            BuildDisposition::Stopped => {
                entry.state = State::Queued;
                None
            }
            BuildDisposition::Transient => {
                entry.failed = entry.failed.saturating_add(1);
                let wait = retry::build_delay(entry.failed, jitter);
                entry.state = State::Waiting(now + wait);
                Some(wait)
            }
        }
    }

    /// Time when the next wait is over. Builds that wait for capacity have no such time: the end of a build starts
    /// them.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        let until = |entry: &Entry| match entry.state {
            State::Waiting(until) => Some(until).filter(|until| *until > now),
            State::Queued | State::Running => None,
        };
        self.entries.values().filter_map(until).min()
    }

    /// Number of running builds.
    pub(super) fn running(&self) -> usize {
        self.costs().count()
    }

    /// Resources of the running builds.
    fn costs(&self) -> impl Iterator<Item = &BuildSpec> {
        self.entries.values().filter(|entry| entry.state == State::Running).map(|entry| &entry.cost)
    }

    /// Number of builds that wait for capacity or for their next attempt.
    pub(super) fn waiting(&self) -> usize {
        self.entries.len() - self.running()
    }

    /// Cells that wait only for capacity.
    pub(super) fn queued(&self) -> impl Iterator<Item = &CellKey> {
        self.entries.iter().filter(|(_, entry)| entry.state == State::Queued).map(|(key, _)| key)
    }

    /// Whether the queue holds the cell, in any state.
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
