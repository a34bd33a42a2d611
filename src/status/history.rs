//! Pure: which objects nothing calls for any more, and since when.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

/// An object stays for so long after nothing calls for it: labels that NFD takes away and gives back must not make
/// objects come and go.
const GRACE: SignedDuration = SignedDuration::from_mins(10);

/// Since when nothing calls for objects, by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct History(BTreeMap<String, Timestamp>);

impl History {
    /// Notes objects that are not called for; gives the names of those whose time is up.
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
        // A clock that jumped back makes the wait longer, never shorter.
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
        // It came back, so its time starts anew.
        assert!(gone(&["a", "b"], 9).is_empty());
        assert!(gone(&["a"], 11).is_empty());
        assert!(gone(&["a"], 20).is_empty());
        assert_eq!(gone(&["a"], 21), ["b".to_owned()].into());
    }
}
