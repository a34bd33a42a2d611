//! Schedules the next reconcile. The timer is a state machine: events and the time are arguments.

use std::time::Duration;

use tokio::time::Instant;

/// Debounce interval. A kernel change arrives as several writes from several agents.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Minimum interval between the starts of two reconciles. A long burst of changes causes only a few reconciles, and a single
/// change still takes effect well within a second.
const MIN_INTERVAL: Duration = Duration::from_millis(400);

/// Batches changes into reconciles.
///
/// The debounce interval starts at the first change, so that a steady stream of changes cannot postpone a reconcile forever.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReconcileTimer {
    /// Start of the current or most recent reconcile.
    began: Option<Instant>,
    /// Start of the next reconcile.
    due: Option<Instant>,
    /// Whether a change arrived since the current or most recent reconcile started.
    has_change: bool,
    /// End of the backoff: until this time a change triggers no reconcile.
    backoff_until: Option<Instant>,
}

impl ReconcileTimer {
    /// Creates a timer whose first reconcile starts at once.
    pub(super) fn new(now: Instant) -> Self {
        Self { began: None, due: Some(now), has_change: false, backoff_until: None }
    }

    /// Records a change and schedules a reconcile for it.
    pub(super) fn record_change(&mut self, now: Instant) {
        self.has_change = true;
        let earliest = self.began.map_or(now, |began| began + MIN_INTERVAL);
        let earliest = self.backoff_until.map_or(earliest, |until| earliest.max(until));
        self.schedule((now + DEBOUNCE).max(earliest));
    }

    /// Schedules a reconcile at this time, unless an earlier one is scheduled.
    pub(super) fn schedule(&mut self, start: Instant) {
        self.due = Some(self.due.map_or(start, |due| due.min(start)));
    }

    /// Records the start of a reconcile. Call this method before the snapshot is taken: later changes schedule another reconcile.
    pub(super) fn begin(&mut self, now: Instant) {
        self.began = Some(now);
        self.due = None;
        self.has_change = false;
        self.backoff_until = None;
    }

    /// Backs off after a failed reconcile: the next one starts at `until`, and changes do not trigger it earlier.
    pub(super) fn back_off(&mut self, until: Instant) {
        self.backoff_until = Some(until);
        self.schedule(until);
    }

    /// Whether a change is waiting for its reconcile.
    pub(super) fn has_change(&self) -> bool {
        self.has_change
    }

    /// Start of the next reconcile.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const fn ms(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    /// Simulates changes at these times and returns the start of each reconcile, which takes `length`.
    fn reconcile_times(changes: &[u64], length: u64) -> Vec<u64> {
        let start = Instant::now();
        let mut timer = ReconcileTimer::new(start);
        timer.begin(start);
        let (mut starts, mut free_at) = (Vec::new(), start + ms(length));
        let mut pending = changes.iter().map(|at| start + ms(*at)).peekable();
        loop {
            let next = timer.due().map(|due| due.max(free_at));
            match (pending.peek().copied(), next) {
                (Some(change), Some(reconcile)) if change <= reconcile => {
                    timer.record_change(change);
                    pending.next();
                }
                (_, Some(reconcile)) => {
                    timer.begin(reconcile);
                    free_at = reconcile + ms(length);
                    starts.push(u64::try_from((reconcile - start).as_millis()).unwrap());
                }
                (Some(change), None) => {
                    timer.record_change(change);
                    pending.next();
                }
                (None, None) => return starts,
            }
        }
    }

    #[test]
    fn changes_within_the_debounce_interval_cause_one_reconcile() {
        assert_eq!(reconcile_times(&[1000], 10), [1100]);
        assert_eq!(reconcile_times(&[1000, 1020, 1099], 10), [1100]);
        assert_eq!(reconcile_times(&[1000, 1200], 10), [1100, 1500]);
    }

    #[test]
    fn a_burst_of_changes_causes_few_reconciles() {
        let burst: Vec<u64> = (0..5000).map(|n| 1000 + n * 2 / 5).collect();
        let times = reconcile_times(&burst, 50);
        assert!(times.len() <= 7, "{times:?}");
        assert_eq!(times[0], 1100);
    }

    #[test]
    fn changes_do_not_shorten_the_backoff_after_a_failed_reconcile() {
        let now = Instant::now();
        let mut timer = ReconcileTimer::new(now);
        timer.begin(now);
        timer.back_off(now + ms(8_000));
        timer.record_change(now + ms(10));
        assert_eq!(timer.due(), Some(now + ms(8_000)));
        timer.begin(now + ms(8_000));
        timer.record_change(now + ms(9_000));
        assert_eq!(timer.due(), Some(now + ms(9_100)));
    }

    #[test]
    fn the_earliest_scheduled_time_is_due() {
        let now = Instant::now();
        let mut timer = ReconcileTimer::new(now);
        timer.begin(now);
        assert_eq!(timer.due(), None);
        timer.schedule(now + ms(60_000));
        timer.schedule(now + ms(5_000));
        timer.schedule(now + ms(9_000));
        assert_eq!(timer.due(), Some(now + ms(5_000)));
    }

    proptest! {
        /// A reconcile follows every change within half a second, and reconciles keep their minimum interval.
        #[test]
        fn every_change_is_reconciled_in_time_and_intervals_are_kept(mut changes in prop::collection::vec(0_u64..20_000, 1..200)) {
            changes.sort_unstable();
            let times = reconcile_times(&changes, 0);
            for change in &changes {
                prop_assert!(times.iter().any(|reconcile| reconcile >= change && reconcile - change <= 500), "{change} {times:?}");
            }
            prop_assert!(times.windows(2).all(|pair| pair[1] - pair[0] >= 400), "{times:?}");
        }
    }
}
