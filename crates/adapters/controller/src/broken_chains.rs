//! Holds the rollouts that depend on a rollout that was not made: the later ones of its chain, and those whose changes its write
//! includes.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    image::{Definitions, ImageName, connected, edges},
    plan::{HoldReason, PlannedRollout, RolloutDecision},
};

/// Chains with a rollout that this reconcile did not make. Rollouts are processed in dependency order, and each image
/// was compiled against the new version of its needs. If an earlier rollout is not made, the later image would run
/// beside the old version.
pub(super) struct BrokenChains {
    /// Chain of each image that belongs to one, identified by one of the chain's images.
    chains: BTreeMap<ImageName, ImageName>,
    broken: BTreeMap<ImageName, String>,
    deferred: BTreeSet<ImageName>,
    /// DaemonSets that were not written, by namespace and name. The first rollout of a DaemonSet makes the changes of all.
    unwritten: BTreeMap<(String, String), Unwritten>,
}

/// Reason why a DaemonSet was not written.
#[derive(Clone, Debug)]
enum Unwritten {
    Failed(String),
    Held(HoldReason),
    Deferred,
}

impl BrokenChains {
    /// Starts with no broken chain.
    pub(super) fn of(definitions: &Definitions) -> Self {
        let images = &definitions.images;
        let chains = connected(images.keys(), edges(images));
        // An image without needs and without dependents forms no chain.
        let shared: BTreeSet<_> =
            chains.iter().filter(|(image, chain)| image != chain).map(|(_, chain)| *chain).collect();
        let chains = chains.iter().filter(|(_, chain)| shared.contains(**chain));
        let chains = chains.map(|(image, chain)| ((*image).clone(), (*chain).clone())).collect();
        Self { chains, broken: BTreeMap::new(), deferred: BTreeSet::new(), unwritten: BTreeMap::new() }
    }

    fn not_written(&mut self, rollout: &PlannedRollout, why: Unwritten) {
        let object = rollout.target.live_daemon_set().filter(|_| !rollout.changes.is_empty());
        self.unwritten.extend(object.map(|(namespace, name)| ((namespace.to_owned(), name.to_owned()), why)));
    }

    /// Returns the reason why the write that includes a rollout's changes was not made.
    fn why_not_written(&self, rollout: &PlannedRollout) -> Option<&Unwritten> {
        let changes =
            matches!(rollout.decision, RolloutDecision::Rewrite { .. } | RolloutDecision::Steps { .. });
        let (namespace, name) = rollout.target.live_daemon_set().filter(|_| changes)?;
        self.unwritten.get(&(namespace.to_owned(), name.to_owned()))
    }

    /// Records a rollout that is held.
    pub(super) fn held(&mut self, rollout: &PlannedRollout, why: &HoldReason) {
        self.not_written(rollout, Unwritten::Held(why.clone()));
    }

    /// Returns the hold of the rollout whose write includes this rollout's changes.
    pub(super) fn hold_of_write(&self, rollout: &PlannedRollout) -> Option<HoldReason> {
        match self.why_not_written(rollout)? {
            Unwritten::Held(why) => Some(why.clone()),
            Unwritten::Failed(_) | Unwritten::Deferred => None,
        }
    }

    /// Records a failed rollout, which holds the rest of its chain.
    pub(super) fn note(&mut self, rollout: &PlannedRollout, error: &str) {
        self.not_written(rollout, Unwritten::Failed(error.to_owned()));
        let Some(chain) = self.chains.get(&rollout.image) else { return };
        let why = format!("{} of {} failed: {error}", rollout.target, rollout.image);
        self.broken.entry(chain.clone()).or_insert(why);
    }

    /// Records a rollout that waits for the next plan, along with its chain. Waiting is not a failure.
    pub(super) fn deferred(&mut self, rollout: &PlannedRollout) {
        self.not_written(rollout, Unwritten::Deferred);
        self.deferred.extend(self.chains.get(&rollout.image).cloned());
    }

    /// Whether a rollout that changes something waits for the next plan.
    pub(super) fn is_deferred(&self, rollout: &PlannedRollout) -> bool {
        let chain = self.chains.get(&rollout.image);
        matches!(self.why_not_written(rollout), Some(Unwritten::Deferred))
            || (!rollout.changes.is_empty() && chain.is_some_and(|chain| self.deferred.contains(chain)))
    }

    /// Reason why a rollout is not made in this reconcile because of its chain, or because the write that includes its
    /// changes failed.
    pub(super) fn hold(&self, rollout: &PlannedRollout) -> Option<String> {
        if let Some(Unwritten::Failed(error)) = self.why_not_written(rollout) {
            return Some(error.clone());
        }
        if rollout.changes.is_empty() {
            return None;
        }
        let why = self.broken.get(self.chains.get(&rollout.image)?)?;
        Some(format!("not rolled out, because the images of a chain roll out together and {why}"))
    }
}
