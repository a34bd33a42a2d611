//! Adapter: who may lead. A state machine: the record as it was found and the local monotonic time come in as
//! arguments; clocks of other machines are never compared with this one's.
//!
//! The rules are those of client-go's `leaderelection` package: a lease that another holds is over when its record has
//! not changed for the lease's length *as seen from here*, and a holder that could not renew gives up well before
//! another candidate may think so.

use std::time::Duration;

use tokio::time::Instant;

/// How leases are held. The defaults are client-go's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// How long a record that does not change keeps others out.
    pub lease: Duration,
    /// How long a holder trusts its last renewal, counted from before the request was sent. The rest of the lease's
    /// length is for writes that are under way when it stops to trust.
    pub renew_deadline: Duration,
    /// How often it is looked at, and renewed.
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

/// What a lease says, as far as it matters here.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Record {
    /// Who holds it; empty when it is free.
    pub(super) holder: String,
    /// The holder's time of its last renewal: compared for equality only.
    pub(super) renewed: Option<jiff::Timestamp>,
    /// How long it keeps others out.
    pub(super) length: Option<Duration>,
    /// How often it changed hands.
    pub(super) transitions: i32,
}

/// What to do about a lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Move {
    /// Make it, there is none.
    Create,
    /// Take it over.
    Take,
    /// Renew it: it is ours.
    Renew,
    /// Leave it: another holds it.
    Wait,
}

/// One candidate's view.
#[derive(Debug)]
pub(super) struct Election {
    identity: String,
    timing: Timing,
    /// Another's record, and since when it has not changed.
    seen: Option<(Record, Instant)>,
    /// Until when the last renewal is trusted.
    trusted_until: Option<Instant>,
}

impl Election {
    pub(super) fn new(identity: String, timing: Timing) -> Self {
        Self { identity, timing, seen: None, trusted_until: None }
    }

    /// What to do about the lease that was found.
    pub(super) fn decide(&mut self, found: Option<&Record>, now: Instant) -> Move {
        let Some(record) = found else { return Move::Create };
        if record.holder == self.identity {
            return Move::Renew;
        }
        // Whoever else holds it: this one does not, whatever it believed.
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
        // The longer of both lengths: the other may have been started with other options.
        let length = record.length.unwrap_or_default().max(self.timing.lease);
        if now - since >= length { Move::Take } else { Move::Wait }
    }

    /// The lease was written with this one as its holder, by a request that was sent at `sent`.
    pub(super) fn won(&mut self, sent: Instant) {
        self.seen = None;
        self.trusted_until = Some(sent + self.timing.renew_deadline);
    }

    /// The lease is another's, or was given back.
    pub(super) fn lost(&mut self) {
        self.trusted_until = None;
    }

    /// Is this one the holder, as far as it knows? It may be cut off, and then leads no more until it could renew.
    pub(super) fn holds(&self) -> bool {
        self.trusted_until.is_some()
    }

    /// Until when this one leads, if nothing else happens.
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
        // Its clock is years behind, or ahead: the record's time means nothing, its change does.
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
        // The other one sees the renewal at the very moment that it was sent, which is the earliest.
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
