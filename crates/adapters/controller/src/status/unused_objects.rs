//! Tracks since when DriverBuild objects are unused.

use std::collections::{BTreeMap, BTreeSet};

use jiff::{SignedDuration, Timestamp};

/// Grace period before an unused object is deleted. Without it, farrier would delete and recreate objects when NFD removes and
/// restores a label.
const GRACE_PERIOD: SignedDuration = SignedDuration::from_mins(10);

/// Unused objects by name, each with the time since which it has been unused.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnusedObjects(BTreeMap<String, Timestamp>);

impl UnusedObjects {
    /// Updates the unused objects and returns the names of those whose grace period has ended.
    pub fn expired<'a>(
        &mut self,
        existing: impl Iterator<Item = &'a String>,
        desired: &BTreeSet<&str>,
        now: Timestamp,
    ) -> BTreeSet<String> {
        let unused: BTreeSet<&String> = existing.filter(|name| !desired.contains(name.as_str())).collect();
        self.0.retain(|name, _| unused.contains(name));
        for name in unused {
            self.0.entry(name.clone()).or_insert(now);
        }
        // A clock that is set back makes the grace period longer, never shorter.
        let expired = self.0.iter().filter(|(_, since)| now.duration_since(**since) >= GRACE_PERIOD);
        expired.map(|(name, _)| name.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unused_objects_expire_after_the_grace_period() {
        let start = Timestamp::UNIX_EPOCH;
        let at = |minutes| start + SignedDuration::from_mins(minutes);
        let names = ["a".to_owned(), "b".to_owned()];
        let mut history = UnusedObjects::default();
        let mut expired = |wanted: &[&str], minutes| {
            history.expired(names.iter(), &wanted.iter().copied().collect(), at(minutes))
        };
        assert!(expired(&["a", "b"], 0).is_empty());
        assert!(expired(&["a"], 1).is_empty());
        // "b" was wanted again in between, so its grace period starts over.
        assert!(expired(&["a", "b"], 9).is_empty());
        assert!(expired(&["a"], 11).is_empty());
        assert!(expired(&["a"], 20).is_empty());
        assert_eq!(expired(&["a"], 21), ["b".to_owned()].into());
    }
}
