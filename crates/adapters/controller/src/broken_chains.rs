//! Tracks the rollouts that a reconcile did not make, and holds the rollouts that depend on a missing one: later rollouts of the
//! same chain, and rollouts whose changes belong to the same write.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    image::{Definitions, ImageName, connected_components, need_edges},
    plan::{HoldReason, PlannedRollout, RolloutDecision},
};

/// Chains with a rollout that this reconcile did not make.
///
/// Rollouts are processed in dependency order, and each image was compiled against the new versions of its needs. Without the
/// earlier rollout, the later image would run beside an old version of its need.
pub(super) struct BrokenChains {
    /// Chain of each image, identified by one of the chain's images. Images without a chain are absent.
    chains: BTreeMap<ImageName, ImageName>,
    /// Chains with a failed rollout, with the reason.
    broken: BTreeMap<ImageName, String>,
    /// Chains with a rollout on hold that a person has to correct, with the hold of the later rollouts.
    held: BTreeMap<ImageName, HoldReason>,
    /// Chains with a rollout that waits for the next plan.
    deferred: BTreeSet<ImageName>,
    /// DaemonSets that were not written, by namespace and name. The first rollout of a DaemonSet makes the changes of all its
    /// rollouts.
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
    /// Finds the chains of the definitions. None of them is broken yet.
    pub(super) fn of(definitions: &Definitions) -> Self {
        let images = &definitions.images;
        let chains = connected_components(images.keys(), need_edges(images));
        // An image without needs and without dependents forms no chain.
        let with_several_images: BTreeSet<_> =
            chains.iter().filter(|(image, chain)| image != chain).map(|(_, chain)| *chain).collect();
        let chains = chains.iter().filter(|(_, chain)| with_several_images.contains(**chain));
        let chains = chains.map(|(image, chain)| ((*image).clone(), (*chain).clone())).collect();
        Self {
            chains,
            broken: BTreeMap::new(),
            held: BTreeMap::new(),
            deferred: BTreeSet::new(),
            unwritten: BTreeMap::new(),
        }
    }

    /// Records why the DaemonSet of a rollout with changes was not written.
    fn record_unwritten(&mut self, rollout: &PlannedRollout, why: Unwritten) {
        let object = rollout.target.live_daemon_set().filter(|_| !rollout.changes.is_empty());
        self.unwritten.extend(object.map(|(namespace, name)| ((namespace.to_owned(), name.to_owned()), why)));
    }

    /// Returns why the write that includes a rollout's changes was not made.
    fn why_not_written(&self, rollout: &PlannedRollout) -> Option<&Unwritten> {
        if !is_change(rollout) {
            return None;
        }
        let (namespace, name) = rollout.target.live_daemon_set()?;
        self.unwritten.get(&(namespace.to_owned(), name.to_owned()))
    }

    /// Records a rollout on hold, which holds the rest of its chain if a person has to correct the rollout.
    pub(super) fn record_hold(&mut self, rollout: &PlannedRollout, why: &HoldReason) {
        self.record_unwritten(rollout, Unwritten::Held(why.clone()));
        if why.is_failure()
            && let Some(chain) = self.chains.get(&rollout.image)
        {
            let hold = HoldReason::Chain { image: rollout.image.clone(), why: why.to_string() };
            self.held.entry(chain.clone()).or_insert(hold);
        }
    }

    /// Returns the hold of the rollout whose write includes this rollout's changes, or of an earlier rollout of the chain.
    pub(super) fn earlier_hold(&self, rollout: &PlannedRollout) -> Option<HoldReason> {
        match self.why_not_written(rollout) {
            Some(Unwritten::Held(why)) => Some(why.clone()),
            None if is_change(rollout) => self.held.get(self.chains.get(&rollout.image)?).cloned(),
            Some(Unwritten::Failed(_) | Unwritten::Deferred) | None => None,
        }
    }

    /// Records a failed rollout, which holds the rest of its chain.
    pub(super) fn record_failure(&mut self, rollout: &PlannedRollout, error: &str) {
        self.record_unwritten(rollout, Unwritten::Failed(error.to_owned()));
        let Some(chain) = self.chains.get(&rollout.image) else { return };
        let why = format!("{} of {} failed: {error}", rollout.target, rollout.image);
        self.broken.entry(chain.clone()).or_insert(why);
    }

    /// Records a rollout that waits for the next plan, along with its chain. Waiting is not a failure.
    pub(super) fn record_deferral(&mut self, rollout: &PlannedRollout) {
        self.record_unwritten(rollout, Unwritten::Deferred);
        self.deferred.extend(self.chains.get(&rollout.image).cloned());
    }

    /// Whether a rollout has changes that wait for the next plan.
    pub(super) fn is_deferred(&self, rollout: &PlannedRollout) -> bool {
        let chain = self.chains.get(&rollout.image);
        matches!(self.why_not_written(rollout), Some(Unwritten::Deferred))
            || (!rollout.changes.is_empty() && chain.is_some_and(|chain| self.deferred.contains(chain)))
    }

    /// Returns the earlier failure that prevents a rollout: in the rollout's chain, or in the write that includes its changes.
    pub(super) fn earlier_failure(&self, rollout: &PlannedRollout) -> Option<String> {
        if let Some(Unwritten::Failed(error)) = self.why_not_written(rollout) {
            return Some(error.clone());
        }
        if rollout.changes.is_empty() {
            return None;
        }
        let why = self.broken.get(self.chains.get(&rollout.image)?)?;
        Some(format!("not rolled out: images of a chain are rolled out together, and {why}"))
    }
}

/// Whether a rollout changes its target now.
fn is_change(rollout: &PlannedRollout) -> bool {
    matches!(rollout.decision, RolloutDecision::Rewrite { .. } | RolloutDecision::Steps { .. })
}
