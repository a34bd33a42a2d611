//! Decides which build runs next. The queue is a state machine: planned builds, outcomes and the time are arguments.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use farrier_builder::services::BuildLimits;
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

/// Action of the queue after the end of a build.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BuildDisposition {
    /// Remove the build: it was published or failed permanently. The next plan may request the build again.
    Settled,
    /// Retry the build after a backoff: its fault is transient.
    Transient,
    /// Queue the build again: it was stopped without an outcome.
    Stopped,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum BuildState {
    /// Starts as soon as there is capacity.
    Queued,
    Running,
    /// Starts again at this time.
    Waiting(Instant),
}

#[derive(Debug)]
struct QueueEntry {
    cell: Arc<Cell>,
    /// Resources that the build takes.
    cost: BuildSpec,
    /// Position in the plan, whose order puts dependencies first.
    plan_position: usize,
    state: BuildState,
    failed_attempts: u32,
    /// Whether the latest plan requests the build.
    requested: bool,
}

/// Build queue. Runs each cell at most once at a time, within the limits on concurrency and resources.
#[derive(Debug)]
pub(super) struct Queue {
    entries: BTreeMap<CellKey, QueueEntry>,
    limits: BuildLimits,
    /// Cells that were built, whatever the outcome. `Some` only if the queue builds each cell once.
    attempted_once: Option<BTreeSet<CellKey>>,
}

impl Queue {
    /// Creates an empty queue for `limits.at_once` concurrent builds, at least one.
    pub(super) fn new(limits: BuildLimits) -> Self {
        Self { entries: BTreeMap::new(), limits, attempted_once: None }
    }

    /// Creates an empty queue that builds no cell a second time.
    pub(super) fn once(limits: BuildLimits) -> Self {
        Self { attempted_once: Some(BTreeSet::new()), ..Self::new(limits) }
    }

    /// Whether each cell is built only once.
    pub(super) fn is_once(&self) -> bool {
        self.attempted_once.is_some()
    }

    /// Updates the queue with the builds of a plan, and returns the builds whose inputs changed.
    ///
    /// A queued build that the plan does not request is dropped, while a running build is left to finish. A build with changed
    /// inputs starts without backoff.
    pub(super) fn update(
        &mut self,
        builds: impl IntoIterator<Item = (Arc<Cell>, BuildSpec)>,
    ) -> Vec<CellKey> {
        let mut with_changed_inputs = Vec::new();
        for entry in self.entries.values_mut() {
            entry.requested = false;
        }
        for (plan_position, (cell, cost)) in builds.into_iter().enumerate() {
            let key = key_of(&cell);
            if self.attempted_once.as_ref().is_some_and(|attempted_once| attempted_once.contains(&key)) {
                continue;
            }
            match self.entries.get_mut(&key) {
                Some(entry)
                    if entry.state == BuildState::Running || entry.input_hash() == cell.input_hash =>
                {
                    // A running build keeps its inputs. If they changed, the plan after the build's end requests a new build.
                    if entry.state != BuildState::Running {
                        entry.cell = cell;
                        entry.cost = cost;
                    }
                    entry.plan_position = plan_position;
                    entry.requested = true;
                }
                other => {
                    if other.is_some() {
                        with_changed_inputs.push(key.clone());
                    }
                    let entry = QueueEntry {
                        cell,
                        cost,
                        plan_position,
                        state: BuildState::Queued,
                        failed_attempts: 0,
                        requested: true,
                    };
                    self.entries.insert(key, entry);
                }
            }
        }
        self.entries.retain(|_, entry| entry.requested || entry.state == BuildState::Running);
        with_changed_inputs
    }

    /// Delays builds whose earlier attempts ended because farrier was killed: such a build may exhaust farrier's memory.
    /// `attempts` counts these attempts by input hash. Returns each delayed build with its attempts and its delay.
    pub(super) fn delay_killed(
        &mut self,
        attempts: &BTreeMap<InputHash, u32>,
        now: Instant,
        jitter: f64,
    ) -> Vec<(CellKey, u32, Duration)> {
        let mut waits = Vec::new();
        for (key, entry) in &mut self.entries {
            if entry.state == BuildState::Queued
                && entry.failed_attempts == 0
                && let Some(&failed_attempts) = attempts.get(&entry.input_hash())
            {
                let wait = retry::build_delay(failed_attempts, jitter);
                entry.failed_attempts = failed_attempts;
                entry.state = BuildState::Waiting(now + wait);
                waits.push((key.clone(), failed_attempts, wait));
            }
        }
        waits
    }

    /// Returns the next build that may start now, and marks it as running.
    pub(super) fn start(&mut self, now: Instant) -> Option<Arc<Cell>> {
        let running: Vec<BuildSpec> = self.running_costs().copied().collect();
        if running.len() >= self.limits.at_once.max(1) {
            return None;
        }
        let ready = |entry: &&mut QueueEntry| match entry.state {
            BuildState::Queued => true,
            BuildState::Waiting(until) => until <= now,
            BuildState::Running => false,
        };
        let next = self.entries.values_mut().filter(ready).min_by_key(|entry| entry.plan_position)?;
        // Strict order: if small builds overtook a large one, it could wait forever.
        if !self.limits.budget.admits(&running, &next.cost) {
            return None;
        }
        next.state = BuildState::Running;
        Some(Arc::clone(&next.cell))
    }

    /// Records the end of a build. Returns the wait before the next attempt, if the build is retried.
    pub(super) fn record_end(
        &mut self,
        key: &CellKey,
        disposition: BuildDisposition,
        now: Instant,
        jitter: f64,
    ) -> Option<Duration> {
        if let Some(attempted_once) = &mut self.attempted_once {
            attempted_once.insert(key.clone());
            self.entries.remove(key);
        }
        let entry = self.entries.get_mut(key)?;
        match disposition {
            BuildDisposition::Settled => {
                self.entries.remove(key);
                None
            }
            BuildDisposition::Stopped => {
                entry.state = BuildState::Queued;
                None
            }
            BuildDisposition::Transient => {
                entry.failed_attempts = entry.failed_attempts.saturating_add(1);
                let wait = retry::build_delay(entry.failed_attempts, jitter);
                entry.state = BuildState::Waiting(now + wait);
                Some(wait)
            }
        }
    }

    /// Returns when the next backoff ends. Builds that wait for capacity have no such time, because they start when another build
    /// ends.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        let until = |entry: &QueueEntry| match entry.state {
            BuildState::Waiting(until) => Some(until).filter(|until| *until > now),
            BuildState::Queued | BuildState::Running => None,
        };
        self.entries.values().filter_map(until).min()
    }

    /// Number of running builds.
    pub(super) fn running(&self) -> usize {
        self.running_costs().count()
    }

    /// Resources of the running builds.
    fn running_costs(&self) -> impl Iterator<Item = &BuildSpec> {
        self.entries.values().filter(|entry| entry.state == BuildState::Running).map(|entry| &entry.cost)
    }

    /// Number of builds that wait for capacity or for their next attempt.
    pub(super) fn waiting(&self) -> usize {
        self.entries.len() - self.running()
    }

    /// Cells that wait only for capacity.
    pub(super) fn queued(&self) -> impl Iterator<Item = &CellKey> {
        self.entries.iter().filter(|(_, entry)| entry.state == BuildState::Queued).map(|(key, _)| key)
    }

    /// Whether the queue contains the cell, in any state.
    pub(super) fn contains(&self, key: &CellKey) -> bool {
        self.entries.contains_key(key)
    }
}

impl QueueEntry {
    fn input_hash(&self) -> InputHash {
        self.cell.input_hash
    }
}

#[cfg(test)]
#[path = "queue_tests.rs"]
mod tests;
