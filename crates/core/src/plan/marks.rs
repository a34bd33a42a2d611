//! Pure: which nodes are told of their next kernel now. Where another writer takes a mark back each time, farrier would
//! else write it for ever.

use std::{collections::BTreeMap, time::Duration};

use super::{Change, PlannedNode};

/// So often the same is written to a node within [`A_WHILE`]: then another writer takes it back, and would again.
const TIMES: u32 = 3;
const A_WHILE: Duration = Duration::from_mins(10);

/// What was written to nodes lately. Times are counted from any one moment, the same for all calls.
#[derive(Debug, Default)]
pub struct Marks(BTreeMap<String, Written>);

#[derive(Debug)]
struct Written {
    change: Change,
    times: u32,
    /// When it was written first.
    since: Duration,
}

/// The nodes whose marks are not right.
#[derive(Debug, Default)]
pub struct DueMarks {
    /// What is written now, each with its node's place among those that were given.
    pub write: Vec<(usize, Change)>,
    /// The nodes that are left for a while, because another writer takes their marks back.
    pub contested: Vec<String>,
}

impl Marks {
    /// Which of the planned changes are made now.
    pub fn due(&mut self, nodes: &[PlannedNode], now: Duration) -> DueMarks {
        self.0.retain(|_, written| now < written.since + A_WHILE);
        let mut due = DueMarks::default();
        for (place, node) in nodes.iter().enumerate() {
            let Some(change) = &node.change else { continue };
            let contested =
                self.0.get(&node.node).is_some_and(|last| last.change == *change && last.times >= TIMES);
            if contested {
                due.contested.push(node.node.clone());
            } else {
                due.write.push((place, change.clone()));
            }
        }
        due
    }

    /// It is written.
    pub fn note(&mut self, node: &str, change: Change, now: Duration) {
        let last = self.0.remove(node).filter(|last| last.change == change);
        let (times, since) = last.map_or((1, now), |last| (last.times + 1, last.since));
        self.0.insert(node.to_owned(), Written { change, times, since });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::testing::Fleet;

    #[test]
    fn a_mark_that_another_writer_takes_back_is_left_for_a_while() {
        let mut fleet = Fleet::new(&["6.1.0-47-amd64"]);
        fleet.node(0).labels.remove("pci");
        fleet.announce(0, "6.1.0-48-amd64");
        let nodes = fleet.plan().nodes;
        let (mut marks, began) = (Marks::default(), Duration::from_secs(7));
        let mut written = 0;
        for second in 0..100 {
            let now = began + Duration::from_secs(second);
            let due = marks.due(&nodes, now);
            assert_eq!(due.contested.len() + due.write.len(), 1, "{due:?}");
            for (place, change) in due.write {
                written += 1;
                marks.note(&nodes[place].node, change, now);
            }
        }
        assert_eq!(written, TIMES);
        assert_eq!(marks.due(&nodes, began + A_WHILE).write.len(), 1);

        // Another mark is another matter.
        fleet.announce(0, "6.1.0-49-amd64");
        assert_eq!(marks.due(&fleet.plan().nodes, began).write.len(), 1);
    }
}
