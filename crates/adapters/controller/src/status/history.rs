//! Tracks the unused DriverBuild objects, and since when each is unused.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

/// Grace period before an unused object is deleted. Labels that NFD removes and restores must not delete and
/// recreate objects.
const GRACE: SignedDuration = SignedDuration::from_mins(10);

/// Unused objects by name, each with the time since which it has been unused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History(BTreeMap<String, Timestamp>);

impl History {
    /// Updates the unused objects and returns the names of those whose grace period has ended.
    pub fn gone<'a>(
        &mut self,
        existing: impl Iterator<Item = &'a String>,
        wanted: &BTreeSet<&str>,
        now: Timestamp,
    ) -> BTreeSet<String> {
        let uncalled: BTreeSet<&String> = existing.filter(|name| !wanted.contains(name.as_str())).collect();
        self.0.retain(|name, _| uncalled.contains(name));
        for name in uncalled {
            self.0.entry(name.clone()).or_insert(now);
        }
        // A clock that was set back makes the wait longer, never shorter.
        let over = self.0.iter().filter(|(_, since)| now.duration_since(**since) >= GRACE);
        over.map(|(name, _)| name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_called_for_stays_for_a_while() {
        let start = Timestamp::UNIX_EPOCH;
        let at = |minutes| start + SignedDuration::from_mins(minutes);
        let names = ["a".to_owned(), "b".to_owned()];
        let mut history = History::default();
        let mut gone = |wanted: &[&str], minutes| {
            history.gone(names.iter(), &wanted.iter().copied().collect(), at(minutes))
        };
        assert!(gone(&["a", "b"], 0).is_empty());
        assert!(gone(&["a"], 1).is_empty());
        // "b" was wanted again in between, so its grace period starts over.
        assert!(gone(&["a", "b"], 9).is_empty());
        assert!(gone(&["a"], 11).is_empty());
        assert!(gone(&["a"], 20).is_empty());
        assert_eq!(gone(&["a"], 21), ["b".to_owned()].into());
    }
}
