//! Leader election as a state machine. Its inputs are the record in the lease and the local monotonic time. Clocks of other
//! machines are never compared with this machine's clock.
//!
//! The rules are those of client-go's `leaderelection` package. Another holder's lease has expired when its record has not
//! changed for the lease duration *as observed locally*. A holder that cannot renew its lease gives up well before another
//! candidate may take over.

use std::time::Duration;

use tokio::time::Instant;

/// Timing of the lease. The defaults are client-go's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseTiming {
    /// Lease duration: how long an unchanged record keeps other candidates from taking over.
    pub lease: Duration,
    /// How long a renewal is valid for its holder, counted from before the request was sent. The remaining lease duration is a
    /// margin for writes that are in flight when the renewal expires.
    pub renew_deadline: Duration,
    /// Interval at which a candidate reads the lease and the holder renews it.
    pub retry: Duration,
}

impl Default for LeaseTiming {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(15),
            renew_deadline: Duration::from_secs(10),
            retry: Duration::from_secs(2),
        }
    }
}

/// The fields of a lease that the election uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct LeaseRecord {
    /// Identity of the holder; empty when the lease is free.
    pub(super) holder: String,
    /// The holder's time of its last renewal, compared for equality only.
    pub(super) renewed: Option<jiff::Timestamp>,
    /// Lease duration that the holder announced.
    pub(super) duration: Option<Duration>,
    /// Number of leadership changes.
    pub(super) transitions: i32,
}

/// Next step of a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ElectionStep {
    /// Create the lease: it does not exist.
    Create,
    /// Take over the lease.
    Take,
    /// Renew the lease: this candidate holds it.
    Renew,
    /// Wait, because another candidate holds the lease.
    Wait,
}

/// State of one candidate in the election.
#[derive(Debug)]
pub(super) struct Election {
    identity: String,
    timing: LeaseTiming,
    /// Another holder's record, and since when the record has not changed.
    seen: Option<(LeaseRecord, Instant)>,
    /// End of the validity of the last renewal. The time may have passed; `None` after another holder was seen.
    valid_until: Option<Instant>,
}

impl Election {
    pub(super) fn new(identity: String, timing: LeaseTiming) -> Self {
        Self { identity, timing, seen: None, valid_until: None }
    }

    /// Decides the next step. `record` is the record in the lease, or `None` if the lease does not exist.
    pub(super) fn decide(&mut self, record: Option<&LeaseRecord>, now: Instant) -> ElectionStep {
        let Some(record) = record else { return ElectionStep::Create };
        if record.holder == self.identity {
            return ElectionStep::Renew;
        }
        // The lease belongs to another candidate, even if this candidate's last renewal is still valid.
        self.record_loss();
        if record.holder.is_empty() {
            return ElectionStep::Take;
        }
        let since = match &self.seen {
            Some((seen, since)) if seen == record => *since,
            _ => {
                self.seen = Some((record.clone(), now));
                now
            }
        };
        // The other candidate may run with another lease duration. Use the longer one.
        let duration = record.duration.unwrap_or_default().max(self.timing.lease);
        if now - since >= duration { ElectionStep::Take } else { ElectionStep::Wait }
    }

    /// Records that a request sent at `sent` acquired or renewed the lease.
    pub(super) fn record_renewal(&mut self, sent: Instant) {
        self.seen = None;
        self.valid_until = Some(sent + self.timing.renew_deadline);
    }

    /// Records that this candidate does not hold the lease.
    pub(super) fn record_loss(&mut self) {
        self.valid_until = None;
    }

    /// Whether this candidate considers itself the holder of the lease. This stays true for a candidate that is cut off from the
    /// API server, although it may not write until it has renewed the lease.
    pub(super) fn holds(&self) -> bool {
        self.valid_until.is_some()
    }

    /// Returns until when this candidate may write without another renewal, or `None` if it may not write now.
    pub(super) fn leads_until(&self, now: Instant) -> Option<Instant> {
        self.valid_until.filter(|until| now < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held_by(holder: &str, renewed: i64) -> LeaseRecord {
        LeaseRecord {
            holder: holder.to_owned(),
            renewed: Some(jiff::Timestamp::from_second(renewed).unwrap()),
            duration: Some(Duration::from_secs(15)),
            transitions: 0,
        }
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_free_lease_is_acquired_and_renewed() {
        let mut election = Election::new("a".to_owned(), LeaseTiming::default());
        let now = Instant::now();
        assert_eq!(election.decide(None, now), ElectionStep::Create);
        assert_eq!(election.decide(Some(&held_by("", 5)), now), ElectionStep::Take);
        election.record_renewal(now);
        assert_eq!(election.decide(Some(&held_by("a", 5)), now), ElectionStep::Renew);
        assert_eq!(election.leads_until(now), Some(now + s(10)));
    }

    #[test]
    fn a_lease_expires_by_local_time_alone() {
        let mut election = Election::new("b".to_owned(), LeaseTiming::default());
        let now = Instant::now();
        // The other clock may be years behind or ahead: only a change of the record counts, not its time.
        for renewed in [0, 4_000_000_000] {
            assert_eq!(election.decide(Some(&held_by("a", renewed)), now), ElectionStep::Wait);
        }
        assert_eq!(election.decide(Some(&held_by("a", 4_000_000_000)), now + s(14)), ElectionStep::Wait);
        assert_eq!(election.decide(Some(&held_by("a", 4_000_000_002)), now + s(15)), ElectionStep::Wait);
        assert_eq!(election.decide(Some(&held_by("a", 4_000_000_002)), now + s(29)), ElectionStep::Wait);
        assert_eq!(election.decide(Some(&held_by("a", 4_000_000_002)), now + s(30)), ElectionStep::Take);
    }

    #[test]
    fn a_holder_that_cannot_renew_stops_before_another_takes_over() {
        let (mut holder, mut other) = (
            Election::new("a".to_owned(), LeaseTiming::default()),
            Election::new("b".to_owned(), LeaseTiming::default()),
        );
        let sent = Instant::now();
        holder.record_renewal(sent);
        // The other candidate sees the renewal at the earliest possible moment: when it was sent.
        assert_eq!(other.decide(Some(&held_by("a", 7)), sent), ElectionStep::Wait);
        let mut first_take = sent;
        while other.decide(Some(&held_by("a", 7)), first_take) == ElectionStep::Wait {
            first_take += Duration::from_millis(100);
        }
        assert_eq!((holder.leads_until(sent + s(10)), holder.holds()), (None, true));
        assert!(first_take >= sent + s(15));
    }

    #[test]
    fn another_holder_in_the_record_ends_the_leadership() {
        let mut election = Election::new("a".to_owned(), LeaseTiming::default());
        let now = Instant::now();
        election.record_renewal(now);
        assert_eq!(election.decide(Some(&held_by("b", 1)), now + s(1)), ElectionStep::Wait);
        assert_eq!((election.leads_until(now + s(1)), election.holds()), (None, false));
    }
}
