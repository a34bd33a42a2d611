//! Pure: keeps the rollouts of a chain together: if one is not made, the later ones of its chain are held.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    image::{Definitions, ImageName, connected, edges},
    plan::PlannedRollout,
};

/// Chains with a rollout that this reconcile did not make. Rollouts are processed in dependency order, and each image
/// was compiled against the new version of its needs. If an earlier rollout is not made, the later image would run
/// beside the old version.
pub(super) struct BrokenChains {
    /// Chain of each image that belongs to one, identified by one of the chain's images.
    chains: BTreeMap<ImageName, ImageName>,
    broken: BTreeMap<ImageName, String>,
    deferred: BTreeSet<ImageName>,
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
        Self { chains, broken: BTreeMap::new(), deferred: BTreeSet::new() }
    }

    /// Records a failed rollout, which holds the rest of its chain.
    pub(super) fn note(&mut self, rollout: &PlannedRollout, error: &str) {
        let Some(chain) = self.chains.get(&rollout.image) else { return };
        let why = format!("{} of {} failed: {error}", rollout.target, rollout.image);
        self.broken.entry(chain.clone()).or_insert(why);
    }

    /// Records a rollout that waits for the next plan, along with its chain. Waiting is not a failure.
    pub(super) fn deferred(&mut self, rollout: &PlannedRollout) {
        self.deferred.extend(self.chains.get(&rollout.image).cloned());
    }

    /// Whether a rollout with changes waits for the next plan.
    pub(super) fn is_deferred(&self, rollout: &PlannedRollout) -> bool {
        let chain = self.chains.get(&rollout.image);
        !rollout.changes.is_empty() && chain.is_some_and(|chain| self.deferred.contains(chain))
    }

    /// Reason why a rollout with changes is held in this reconcile because of its chain.
    pub(super) fn hold(&self, rollout: &PlannedRollout) -> Option<String> {
        if rollout.changes.is_empty() {
            return None;
        }
        let why = self.broken.get(self.chains.get(&rollout.image)?)?;
        Some(format!("not rolled out, because the images of a chain roll out together and {why}"))
    }
}
