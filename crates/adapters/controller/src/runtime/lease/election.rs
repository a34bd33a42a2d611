//! Leader election as a state machine, whose arguments are the record in the lease and the local monotonic
//! time. Clocks of other machines are never compared with this machine's clock.
//!
//! The rules are the same as in client-go's `leaderelection` package. A lease of another holder has expired
//! when its record has not changed for the lease duration *as observed locally*. A holder that cannot renew
//! gives up well before another candidate may take over.

use std::time::Duration;

use tokio::time::Instant;

/// Timing of the lease. The defaults are client-go's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Lease duration: how long an unchanged record keeps other candidates out.
    pub lease: Duration,
    /// How long a holder trusts its last renewal, counted from before the request was sent. The rest of the
    /// lease duration is for writes that are in flight when that trust ends.
    pub renew_deadline: Duration,
    /// Interval at which a candidate reads the lease and the holder renews it.
    pub retry: Duration,
}

impl Default for Timing {
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
pub(super) struct Record {
    /// Identity of the holder; empty when the lease is free.
    pub(super) holder: String,
    /// The holder's time of its last renewal, compared for equality only.
    pub(super) renewed: Option<jiff::Timestamp>,
    /// Lease duration that the holder announced.
    pub(super) length: Option<Duration>,
    /// Number of leadership changes.
    pub(super) transitions: i32,
}

/// Next step for a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// Create the lease: it does not exist.
    Create,
    /// Take over the lease.
    Take,
    /// Renew the lease: this candidate holds it.
    Renew,
    /// Wait, because another candidate holds the lease.
    Wait,
}

/// State of one candidate.
#[derive(Debug)]
pub(super) struct Election {
    identity: String,
    timing: Timing,
    /// Another holder's record, and since when it has not changed.
    seen: Option<(Record, Instant)>,
    /// End of the trust in the last renewal.
    trusted_until: Option<Instant>,
}

impl Election {
    pub(super) fn new(identity: String, timing: Timing) -> Self {
        Self { identity, timing, seen: None, trusted_until: None }
    }

    /// Decides the next step for the lease as found.
    pub(super) fn decide(&mut self, found: Option<&Record>, now: Instant) -> Move {
        let Some(record) = found else { return Move::Create };
        if record.holder == self.identity {
            return Move::Renew;
        }
        // Another identity is in the record, so this candidate does not hold the lease, even if its local
        // state says so.
        self.lost();
        if record.holder.is_empty() {
            return Move::Take;
        }
        let since = match &self.seen {
            Some((seen, since)) if seen == record => *since,
            _ => {
                self.seen = Some((record.clone(), now));
                now
            }
        };
        // Use the longer of both durations: the other candidate may run with different options.
        let length = record.length.unwrap_or_default().max(self.timing.lease);
        if now - since >= length { Move::Take } else { Move::Wait }
    }

    /// Records that a request sent at `sent` made this candidate the holder.
    pub(super) fn won(&mut self, sent: Instant) {
        self.seen = None;
        self.trusted_until = Some(sent + self.timing.renew_deadline);
    }

    /// Records that the lease belongs to another candidate or was released.
    pub(super) fn lost(&mut self) {
        self.trusted_until = None;
    }

    /// Whether this candidate is the holder, as far as it knows. While cut off from the API server it stays
    /// the holder, but may not write until it has renewed.
    pub(super) fn holds(&self) -> bool {
        self.trusted_until.is_some()
    }

    /// Returns until when this candidate may write without another renewal.
    pub(super) fn leads_until(&self, now: Instant) -> Option<Instant> {
        self.trusted_until.filter(|until| now < *until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn held_by(holder: &str, renewed: i64) -> Record {
        Record {
            holder: holder.to_owned(),
            renewed: Some(jiff::Timestamp::from_second(renewed).unwrap()),
            length: Some(Duration::from_secs(15)),
            transitions: 0,
        }
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_free_lease_is_taken_and_renewed() {
        let mut election = Election::new("a".to_owned(), Timing::default());
        let now = Instant::now();
        assert_eq!(election.decide(None, now), Move::Create);
        assert_eq!(election.decide(Some(&held_by("", 5)), now), Move::Take);
        election.won(now);
        assert_eq!(election.decide(Some(&held_by("a", 5)), now), Move::Renew);
        assert_eq!(election.leads_until(now), Some(now + s(10)));
    }

    #[test]
    fn another_holder_is_waited_for_by_local_time_alone() {
        let mut election = Election::new("b".to_owned(), Timing::default());
        let now = Instant::now();
        // The other clock may be years behind or ahead: only a change of the record counts, not its time.
        for renewed in [0, 4_000_000_000] {
            assert_eq!(election.decide(Some(&held_by("a", renewed)), now), Move::Wait);
        }
        assert_eq!(election.decide(Some(&held_by("a", 4_000_000_000)), now + s(14)), Move::Wait);
        assert_eq!(election.decide(Some(&held_by("a", 4_000_000_002)), now + s(15)), Move::Wait);
        assert_eq!(election.decide(Some(&held_by("a", 4_000_000_002)), now + s(29)), Move::Wait);
        assert_eq!(election.decide(Some(&held_by("a", 4_000_000_002)), now + s(30)), Move::Take);
    }

    #[test]
    fn a_holder_that_cannot_renew_gives_up_before_another_may_take_over() {
        let (mut holder, mut other) = (
            Election::new("a".to_owned(), Timing::default()),
            Election::new("b".to_owned(), Timing::default()),
        );
        let sent = Instant::now();
        holder.won(sent);
        // The other candidate sees the renewal at the earliest possible moment: when it was sent.
        assert_eq!(other.decide(Some(&held_by("a", 7)), sent), Move::Wait);
        let mut first_take = sent;
        while other.decide(Some(&held_by("a", 7)), first_take) == Move::Wait {
            first_take += Duration::from_millis(100);
        }
        assert_eq!((holder.leads_until(sent + s(10)), holder.holds()), (None, true));
        assert!(first_take >= sent + s(15));
    }

    #[test]
    fn a_lease_with_another_holder_ends_the_leadership_at_once() {
        let mut election = Election::new("a".to_owned(), Timing::default());
        let now = Instant::now();
        election.won(now);
        assert_eq!(election.decide(Some(&held_by("b", 1)), now + s(1)), Move::Wait);
        assert_eq!((election.leads_until(now + s(1)), election.holds()), (None, false));
    }
}
