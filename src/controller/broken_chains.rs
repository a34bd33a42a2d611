//! Pure: the rollouts of a chain go out together: one that is not made holds those that come after it.

use std::collections::{BTreeMap, BTreeSet};

use crate::{
    image::{Definitions, ImageName, connected, edges},
    plan::PlannedRollout,
};

/// The chains of which a rollout was not made in this pass. Rollouts come in the order in which images need one
/// another, so what a later one would put beside the old image was built against the new one.
pub(super) struct BrokenChains {
    /// The chain of each image that is part of one, by one of its images.
    chains: BTreeMap<ImageName, ImageName>,
    broken: BTreeMap<ImageName, String>,
    put_off: BTreeSet<ImageName>,
}

impl BrokenChains {
    /// None yet.
    pub(super) fn of(definitions: &Definitions) -> Self {
        let images = &definitions.images;
        let chains = connected(images.keys(), edges(images));
        // An image that no other one needs, and that needs none, is no chain.
        let shared: BTreeSet<_> =
            chains.iter().filter(|(image, chain)| image != chain).map(|(_, chain)| *chain).collect();
        let chains = chains.iter().filter(|(_, chain)| shared.contains(**chain));
        let chains = chains.map(|(image, chain)| ((*image).clone(), (*chain).clone())).collect();
        Self { chains, broken: BTreeMap::new(), put_off: BTreeSet::new() }
    }

    /// A rollout failed.
    pub(super) fn note(&mut self, rollout: &PlannedRollout, error: &str) {
        let Some(chain) = self.chains.get(&rollout.image) else { return };
        let why = format!("{} of {} failed: {error}", rollout.target, rollout.image);
        self.broken.entry(chain.clone()).or_insert(why);
    }

    /// A rollout waits for the next plan, which is no failure: so do those of its chain.
    pub(super) fn put_off(&mut self, rollout: &PlannedRollout) {
        self.put_off.extend(self.chains.get(&rollout.image).cloned());
    }

    /// Does a rollout with changes wait for the next plan?
    pub(super) fn is_put_off(&self, rollout: &PlannedRollout) -> bool {
        let chain = self.chains.get(&rollout.image);
        !rollout.changes.is_empty() && chain.is_some_and(|chain| self.put_off.contains(chain))
    }

    /// Why a rollout with changes is not made in this pass.
    pub(super) fn hold(&self, rollout: &PlannedRollout) -> Option<String> {
        if rollout.changes.is_empty() {
            return None;
        }
        let why = self.broken.get(self.chains.get(&rollout.image)?)?;
        Some(format!("not made, because the images of a chain go out together and {why}"))
    }
}
