//! Plans of small fleets, for the tests of other modules.

use super::{ClusterSnapshot, HeaderState, NEXT_KERNEL_ANNOTATION, NodeFacts, Plan, fixtures::World};
use crate::{image::Definitions, kmod::Verdict};

/// Fleet with one image `mft`, from the planner's fixtures.
#[derive(Clone)]
pub struct Fleet(World);

impl Fleet {
    /// Creates nodes `n0`, `n1`... with these kernels.
    pub fn new(releases: &[&str]) -> Self {
        Self(World::new(releases))
    }

    /// Returns a node's facts for changes.
    pub fn node(&mut self, index: usize) -> &mut NodeFacts {
        &mut self.0.snapshot.nodes[index]
    }

    /// Makes a node announce a kernel.
    pub fn announce(&mut self, index: usize, release: &str) {
        self.node(index).annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), release.to_owned());
    }

    /// Publishes all images that are called for.
    pub fn publish(&mut self, verdict: Verdict) {
        self.0.publish(verdict);
    }

    /// Makes the lookups of all images fail.
    pub fn unresolved(&mut self, why: &str) {
        for found in self.0.resolved.images.values_mut() {
            *found = Err(why.to_owned());
        }
    }

    /// Makes every lookup of headers fail to find any. `looked_for` describes what was looked for.
    pub fn without_headers(&mut self, looked_for: &str) {
        for target in self.0.plan().cells.into_iter().map(|planned| planned.target) {
            self.0.observed.headers.insert(target, HeaderState::Missing(looked_for.to_owned()));
        }
    }

    /// Returns this fleet without DaemonSets, so that no rollout finds its target.
    #[must_use]
    pub fn without_daemon_sets(&self) -> Self {
        let mut fleet = self.clone();
        fleet.0.snapshot.daemon_sets.clear();
        fleet
    }

    /// Empties the registry.
    pub fn lose(&mut self) {
        self.0.observed.published.clear();
    }

    /// Returns the snapshot and the definitions of the fleet.
    pub fn made_from(&self) -> (&ClusterSnapshot, &Definitions) {
        (&self.0.snapshot, &self.0.definitions)
    }

    /// Computes the plan.
    pub fn plan(&self) -> Plan {
        self.0.plan()
    }
}
