//! Schedules the next reconcile. The timer is a state machine: events and the time are arguments.

use std::time::Duration;

use tokio::time::Instant;

/// Debounce interval: a kernel change arrives as several writes from several agents.
const QUIET: Duration = Duration::from_millis(100);
/// Minimum interval between the starts of two reconciles, so that a long burst causes only a few. A single change is
/// still acted on well within a second.
const APART: Duration = Duration::from_millis(400);

/// Batches changes into reconciles.
///
/// The debounce interval starts at the first change, so a cluster that is never quiet cannot postpone a reconcile
/// forever.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReconcileTimer {
    /// Start of the current or most recent reconcile.
    began: Option<Instant>,
    /// Start of the next reconcile.
    due: Option<Instant>,
    /// Whether a change arrived since the current or most recent reconcile started.
    changed: bool,
    /// Until this time a change triggers no reconcile.
    held_until: Option<Instant>,
}

impl ReconcileTimer {
    /// Creates a timer whose first reconcile starts at once.
    pub(super) fn new(now: Instant) -> Self {
        Self { began: None, due: Some(now), changed: false, held_until: None }
    }

    /// Records a change and schedules a reconcile for it.
    pub(super) fn changed(&mut self, now: Instant) {
        let earliest = self.began.map_or(now, |began| began + APART);
        self.changed = true;
        let earliest = self.held_until.map_or(earliest, |held| earliest.max(held));
        self.by((now + QUIET).max(earliest));
    }

    /// Schedules a reconcile at that time, unless an earlier one is scheduled.
    pub(super) fn by(&mut self, at: Instant) {
        self.due = Some(self.due.map_or(at, |due| due.min(at)));
    }

    /// Records the start of a reconcile. Changes that its snapshot does not include must be reported after this call.
    pub(super) fn begin(&mut self, now: Instant) {
        self.began = Some(now);
        self.due = None;
        self.changed = false;
        self.held_until = None;
    }

    /// Backs off after a failed reconcile: the next one starts at `until`, and changes do not trigger it earlier.
    pub(super) fn hold(&mut self, until: Instant) {
        self.held_until = Some(until);
        self.by(until);
    }

    /// Whether a change is waiting for its reconcile.
    pub(super) fn is_changed(&self) -> bool {
        self.changed
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
    fn passes(changes: &[u64], length: u64) -> Vec<u64> {
        let start = Instant::now();
        let mut timer = ReconcileTimer::new(start);
        timer.begin(start);
        let (mut found, mut free_at) = (Vec::new(), start + ms(length));
        let mut pending = changes.iter().map(|at| start + ms(*at)).peekable();
        loop {
            let next = timer.due().map(|due| due.max(free_at));
            match (pending.peek().copied(), next) {
                (Some(change), Some(pass)) if change <= pass => {
                    timer.changed(change);
                    pending.next();
                }
                (_, Some(pass)) => {
                    timer.begin(pass);
                    free_at = pass + ms(length);
                    found.push(u64::try_from((pass - start).as_millis()).unwrap());
                }
                (Some(change), None) => {
                    timer.changed(change);
                    pending.next();
                }
                (None, None) => return found,
            }
        }
    }

    #[test]
    fn a_change_waits_for_its_companions_and_not_longer() {
        assert_eq!(passes(&[1000], 10), [1100]);
        assert_eq!(passes(&[1000, 1020, 1099], 10), [1100]);
        assert_eq!(passes(&[1000, 1200], 10), [1100, 1500]);
    }

    #[test]
    fn five_thousand_changes_in_two_seconds_are_a_few_passes() {
        let burst: Vec<u64> = (0..5000).map(|n| 1000 + n * 2 / 5).collect();
        let found = passes(&burst, 50);
        assert!(found.len() <= 7, "{found:?}");
        assert_eq!(found[0], 1100);
    }

    #[test]
    fn after_a_pass_that_came_to_nothing_changes_wait() {
        let now = Instant::now();
        let mut timer = ReconcileTimer::new(now);
        timer.begin(now);
        timer.hold(now + ms(8_000));
        timer.changed(now + ms(10));
        assert_eq!(timer.due(), Some(now + ms(8_000)));
        timer.begin(now + ms(8_000));
        timer.changed(now + ms(9_000));
        assert_eq!(timer.due(), Some(now + ms(9_100)));
    }

    #[test]
    fn an_earlier_date_wins() {
        let now = Instant::now();
        let mut timer = ReconcileTimer::new(now);
        timer.begin(now);
        assert_eq!(timer.due(), None);
        timer.by(now + ms(60_000));
        timer.by(now + ms(5_000));
        timer.by(now + ms(9_000));
        assert_eq!(timer.due(), Some(now + ms(5_000)));
    }

    proptest! {
        /// A reconcile follows every change within half a second, and reconciles keep their minimum interval.
        #[test]
        fn no_change_is_late_and_no_pass_too_soon(mut changes in prop::collection::vec(0_u64..20_000, 1..200)) {
            changes.sort_unstable();
            let found = passes(&changes, 0);
            for change in &changes {
                prop_assert!(found.iter().any(|pass| pass >= change && pass - change <= 500), "{change} {found:?}");
            }
            prop_assert!(found.windows(2).all(|pair| pair[1] - pair[0] >= 400), "{found:?}");
        }
    }
}
