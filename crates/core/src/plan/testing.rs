//! Pure: plans of small fleets, for tests elsewhere.

use super::{ClusterSnapshot, HeaderState, NEXT_KERNEL_ANNOTATION, NodeFacts, Plan, fixtures::World};
use crate::{image::Definitions, kmod::Verdict};

/// A fleet with one image `mft`, as the fixtures have it.
#[derive(Clone)]
pub struct Fleet(World);

impl Fleet {
    /// Nodes `n0`, `n1`... with these kernels.
    pub fn new(releases: &[&str]) -> Self {
        Self(World::new(releases))
    }

    /// A node.
    pub fn node(&mut self, index: usize) -> &mut NodeFacts {
        &mut self.0.snapshot.nodes[index]
    }

    /// Lets a node announce a kernel.
    pub fn announce(&mut self, index: usize, release: &str) {
        self.node(index).annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), release.to_owned());
    }

    /// Publishes all that is called for.
    pub fn publish(&mut self, verdict: Verdict) {
        self.0.publish(verdict);
    }

    /// Lets the image's look-ups fail.
    pub fn unresolved(&mut self, why: &str) {
        for found in self.0.resolved.images.values_mut() {
            *found = Err(why.to_owned());
        }
    }

    /// No look for headers of any kernel finds some: what was looked for.
    pub fn without_headers(&mut self, looked_for: &str) {
        for target in self.0.plan().cells.into_iter().map(|planned| planned.target) {
            self.0.observed.headers.insert(target, HeaderState::Missing(looked_for.to_owned()));
        }
    }

    /// Returns the same fleet without the DaemonSets of its rollouts.
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

    /// Inputs of the plan.
    pub fn made_from(&self) -> (&ClusterSnapshot, &Definitions) {
        (&self.0.snapshot, &self.0.definitions)
    }

    /// The plan now.
    pub fn plan(&self) -> Plan {
        self.0.plan()
    }
}
