//! Decides which builds may run at the same time.

use crate::image::{BuildSpec, Cpus, Memory};

/// Resources that all running builds may use together; by default, the machine's resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget {
    /// Processors.
    pub cpus: Cpus,
    /// Memory.
    pub memory: Memory,
}

impl Budget {
    /// Budget without limits: every build may start.
    pub const UNLIMITED: Self =
        Self { cpus: Cpus::from_thousandths(u64::MAX), memory: Memory::from_bytes(u64::MAX) };

    /// Whether a build may start beside the running ones. If none runs, every build may start: otherwise a build that
    /// exceeds the budget would never run.
    pub fn admits<'a>(&self, running: impl IntoIterator<Item = &'a BuildSpec>, next: &BuildSpec) -> bool {
        let mut running = running.into_iter().peekable();
        if running.peek().is_none() {
            return true;
        }
        let (cpus, memory) = running.fold((next.cpus.thousandths(), next.memory.bytes()), |sum, build| {
            (sum.0.saturating_add(build.cpus.thousandths()), sum.1.saturating_add(build.memory.bytes()))
        });
        cpus <= self.cpus.thousandths() && memory <= self.memory.bytes()
    }

    /// Returns how many builds at the head of the queue may start now. Builds never overtake each other, so a large
    /// build is not starved by small ones behind it.
    pub fn starts(&self, running: &[BuildSpec], queue: &[BuildSpec]) -> usize {
        let mut started = running.to_vec();
        for next in queue {
            if !self.admits(&started, next) {
                break;
            }
            started.push(*next);
        }
        started.len() - running.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn build(cpus: u64, memory: u64) -> BuildSpec {
        let (cpus, memory) = (Cpus::from_thousandths(cpus * 1000), Memory::from_bytes(memory << 30));
        BuildSpec { cpus, memory, ..BuildSpec::default() }
    }

    fn budget(cpus: u64, memory: u64) -> Budget {
        let BuildSpec { cpus, memory, deadline: _ } = build(cpus, memory);
        Budget { cpus, memory }
    }

    #[test]
    fn both_cpus_and_memory_count() {
        let budget = budget(2, 4);
        assert_eq!(budget.starts(&[], &[build(1, 1); 3]), 2, "two processors");
        assert_eq!(budget.starts(&[build(1, 1)], &[build(1, 1); 3]), 1);
        assert_eq!(budget.starts(&[build(1, 3)], &[build(1, 2)]), 0, "no memory left");
        assert_eq!(budget.starts(&[build(2, 1)], &[build(1, 1)]), 0, "no processor left");
    }

    #[test]
    fn a_build_alone_always_runs() {
        assert_eq!(budget(1, 1).starts(&[], &[build(64, 512), build(1, 1)]), 1);
    }

    #[test]
    fn nothing_overtakes_the_large_one() {
        let queue = [build(2, 1), build(1, 1)];
        assert_eq!(budget(2, 4).starts(&[build(1, 1)], &queue), 0, "the small build would fit");
        assert_eq!(budget(2, 4).starts(&[], &queue), 1);
    }

    proptest! {
        /// Whatever the order in which builds end, the whole queue eventually starts. More than one build runs at a
        /// time only within the budget.
        #[test]
        fn every_build_gets_its_turn(
            budget in (1..4_u64, 1..8_u64).prop_map(|(cpus, memory)| budget(cpus, memory)),
            queue in prop::collection::vec((1..6_u64, 1..12_u64).prop_map(|(c, m)| build(c, m)), 0..12),
            ends in prop::collection::vec(any::<prop::sample::Index>(), 64),
        ) {
            let (mut running, mut rest) = (Vec::new(), queue.as_slice());
            for end in ends {
                let (starting, later) = rest.split_at(budget.starts(&running, rest));
                running.extend_from_slice(starting);
                rest = later;
                let cpus: u64 = running.iter().map(|build| build.cpus.thousandths()).sum();
                let memory: u64 = running.iter().map(|build| build.memory.bytes()).sum();
                let fits = cpus <= budget.cpus.thousandths() && memory <= budget.memory.bytes();
                prop_assert!(fits || running.len() == 1);
                prop_assert!(rest.is_empty() || !running.is_empty(), "something always runs");
                if !running.is_empty() {
                    running.swap_remove(end.index(running.len()));
                }
            }
            prop_assert!(rest.is_empty());
        }
    }
}
