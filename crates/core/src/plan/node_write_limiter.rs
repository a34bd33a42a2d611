//! Limits repeated writes to nodes. Decides which planned marks, handover labels and changes of node tasks are written now. When
//! another writer keeps reverting a change, farrier would otherwise write it forever.

use std::{collections::BTreeMap, time::Duration};

use super::{Change, NodeChange, PlannedNode};

/// Number of identical writes to a node within [`REPEAT_WINDOW`] after which another writer is assumed to revert them.
const MAX_REPEATED_WRITES: u32 = 3;
const REPEAT_WINDOW: Duration = Duration::from_mins(10);

/// Recent writes to nodes. Times are durations since a fixed, arbitrary start.
#[derive(Debug, Default)]
pub struct NodeWriteLimiter(BTreeMap<String, RecentWrite>);

#[derive(Debug)]
struct RecentWrite {
    change: Change,
    times: u32,
    /// Time of the first write.
    since: Duration,
    /// Whether the conflict with the other writer was reported.
    reported: bool,
}

impl RecentWrite {
    fn is_contested(&self, change: &Change) -> bool {
        self.change == *change && self.times >= MAX_REPEATED_WRITES
    }
}

impl NodeWriteLimiter {
    /// Returns the marks to write now, each with the index of its node in the given list, and the nodes that are skipped
    /// for a while because another writer reverts their marks.
    pub fn due(&mut self, nodes: &[PlannedNode], now: Duration) -> (Vec<(usize, Change)>, Vec<String>) {
        self.forget_old(now);
        let (mut due, mut contested) = (Vec::new(), Vec::new());
        for (index, node) in nodes.iter().enumerate() {
            let Some(change) = &node.change else { continue };
            if self.0.get(&node.node).is_some_and(|last| last.is_contested(change)) {
                contested.push(node.node.clone());
            } else {
                due.push((index, change.clone()));
            }
        }
        (due, contested)
    }

    /// Records a write to a node.
    pub fn note(&mut self, node: &str, change: Change, now: Duration) {
        let last = self.0.remove(node).filter(|last| last.change == change);
        let (times, since) = last.map_or((1, now), |last| (last.times + 1, last.since));
        self.0.insert(node.to_owned(), RecentWrite { change, times, since, reported: false });
    }

    /// Removes node changes if another writer keeps reverting them. Returns the nodes whose conflict was not reported before.
    pub fn drop_contested(&mut self, changes: &mut Vec<Change>, now: Duration) -> Vec<String> {
        self.forget_old(now);
        let mut contested = Vec::new();
        changes.retain(|change| {
            let Change::Node(node) = change else { return true };
            let last = self.0.get_mut(&key(node)).filter(|last| last.is_contested(change));
            let Some(last) = last else { return true };
            if !std::mem::replace(&mut last.reported, true) {
                contested.push(node.name.clone());
            }
            false
        });
        contested
    }

    /// Records that changes were made.
    pub fn record_writes(&mut self, changes: &[Change], now: Duration) {
        for change in changes {
            if let Change::Node(node) = change {
                self.note(&key(node), change.clone(), now);
            }
        }
    }

    fn forget_old(&mut self, now: Duration) {
        self.0.retain(|_, written| now < written.since + REPEAT_WINDOW);
    }
}

/// Returns the key of a node and its labels: several rollouts can each set their own label on one node.
fn key(NodeChange { name, labels, .. }: &NodeChange) -> String {
    let labels: Vec<&str> = labels.keys().map(String::as_str).collect();
    format!("{name} {}", labels.join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{PodRestart, testing::Fleet};

    #[test]
    fn a_mark_that_another_writer_takes_back_is_left_for_a_while() {
        let mut fleet = Fleet::new(&["6.1.0-47-amd64"]);
        fleet.node(0).labels.remove("pci");
        fleet.announce(0, "6.1.0-48-amd64");
        let nodes = fleet.plan().nodes;
        let (mut limiter, began) = (NodeWriteLimiter::default(), Duration::from_secs(7));
        let mut written = 0;
        for second in 0..100 {
            let now = began + Duration::from_secs(second);
            let (due, contested) = limiter.due(&nodes, now);
            assert_eq!(contested.len() + due.len(), 1, "{due:?}");
            for (index, change) in due {
                written += 1;
                limiter.note(&nodes[index].node, change, now);
            }
        }
        assert_eq!(written, MAX_REPEATED_WRITES);
        assert_eq!(limiter.due(&nodes, began + REPEAT_WINDOW).0.len(), 1);

        // The same limit applies to the changes of a rollout; its other changes are still made.
        let (mut limiter, mark) = (NodeWriteLimiter::default(), nodes[0].change.clone().unwrap());
        let other = Change::Node(NodeChange { name: "other".to_owned(), ..NodeChange::default() });
        let (mut written, mut reported) = (0, Vec::new());
        for second in 0..100 {
            let now = began + Duration::from_secs(second);
            let mut changes = vec![mark.clone(), Change::Restart(PodRestart::default())];
            reported.extend(limiter.drop_contested(&mut changes, now));
            written += changes.len() - 1;
            limiter.record_writes(&changes, now);
        }
        assert_eq!((written, reported), (3, vec![nodes[0].node.clone()]));
        let mut changes = vec![mark, other];
        limiter.drop_contested(&mut changes, began + Duration::from_secs(100));
        assert_eq!(changes.len(), 1);

        // A different mark is not contested.
        fleet.announce(0, "6.1.0-49-amd64");
        assert_eq!(limiter.due(&fleet.plan().nodes, began).0.len(), 1);
    }
}
