//! Limits on the kernels that nodes name. A node reports its running kernel and announces the next one itself. Without
//! limits, an attacker with one node could have every packaged kernel built, or fill the fleet's union images with layers.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, HashMap},
    time::Duration,
};

use super::{ClusterSnapshot, ExceededLimit, RejectedClaims, announced::announcement, node_target};
use crate::{image::Definitions, kernel::KernelTarget, site::KernelLimits};

/// Kernels that nodes named recently. Times are durations since a fixed, arbitrary start.
#[derive(Debug, Default)]
pub struct NodeKernelLimiter {
    /// Kernels by node, each with the time at which the node last named it.
    nodes: HashMap<String, Vec<(KernelTarget, Duration)>>,
    /// Kernels that trusted nodes run, with the times at which they were first and last seen.
    kernels: BTreeMap<KernelTarget, (Duration, Duration)>,
}

impl NodeKernelLimiter {
    /// Records the kernels that the nodes of a new snapshot name, and rejects those over the limits. Nodes that match no
    /// image are ignored: they call for nothing.
    pub fn limit(&mut self, snapshot: &mut ClusterSnapshot, definitions: &Definitions, now: Duration) {
        let KernelLimits { per_node, within, distinct } = definitions.site.kernel_limits;
        let most = per_node.get();
        self.drop_old(now, within.duration());
        // Kernel that each node runs, and whether the node named too many.
        let mut running: Vec<Option<(KernelTarget, bool)>> = Vec::with_capacity(snapshot.nodes.len());
        for node in &mut snapshot.nodes {
            // Writing copies the node's shared facts, so reset only the few untrusted nodes.
            if node.rejected_claims != RejectedClaims::default() {
                node.rejected_claims = RejectedClaims::default();
            }
            if !definitions.images.values().any(|image| node.is_selected_by(image)) {
                running.push(None);
                continue;
            }
            let running_kernel = node_target(node).ok();
            let announced_kernel = announcement(node).and_then(Result::ok);
            let is_over_limit =
                self.note(&node.name, running_kernel.iter().chain(&announced_kernel), most, now);
            if is_over_limit {
                node.rejected_claims.announcement = Some(ExceededLimit::PerNode { most, within });
            }
            running.push(running_kernel.map(|running_kernel| (running_kernel, is_over_limit)));
        }
        let mut counts: BTreeMap<&KernelTarget, usize> = BTreeMap::new();
        for (kernel, is_over_limit) in running.iter().flatten() {
            if !is_over_limit {
                *counts.entry(kernel).or_default() += 1;
            }
        }
        let admitted = self.admitted(&counts, distinct.get(), now);
        for (node, running) in snapshot.nodes.iter_mut().zip(&running) {
            let Some((kernel, _)) = running.as_ref().filter(|(kernel, _)| !admitted.contains(kernel)) else {
                continue;
            };
            // A kernel without a count runs only on nodes that named too many.
            node.rejected_claims.kernel = Some(if counts.contains_key(kernel) {
                ExceededLimit::Distinct(distinct.get())
            } else {
                ExceededLimit::PerNode { most, within }
            });
        }
    }

    fn drop_old(&mut self, now: Duration, window: Duration) {
        let is_recent = |last: Duration| now < last + window;
        self.nodes.retain(|_, kernels| {
            kernels.retain(|(_, last)| is_recent(*last));
            !kernels.is_empty()
        });
        self.kernels.retain(|_, (_, last)| is_recent(*last));
    }

    /// Records the kernels that a node names. Returns whether the node recently named more than `most`.
    fn note<'a>(
        &mut self,
        node: &str,
        kernels: impl Iterator<Item = &'a KernelTarget>,
        most: u32,
        now: Duration,
    ) -> bool {
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        if !self.nodes.contains_key(node) {
            self.nodes.insert(node.to_owned(), Vec::with_capacity(1));
        }
        let Some(recent) = self.nodes.get_mut(node) else { return false };
        for kernel in kernels {
            if let Some((_, last)) = recent.iter_mut().find(|(known, _)| known == kernel) {
                *last = now;
                continue;
            }
            // Keep at most one kernel over the limit: that suffices to detect the excess.
            let oldest = recent.iter().enumerate().min_by_key(|(_, (_, last))| *last).map(|(index, _)| index);
            match oldest.filter(|_| recent.len() > most) {
                Some(oldest) => recent[oldest] = (kernel.clone(), now),
                None => recent.push((kernel.clone(), now)),
            }
        }
        recent.len() > most
    }

    /// Returns at most `most` of the kernels that trusted nodes run. Prefers those on more nodes, then those seen first.
    fn admitted<'a>(
        &mut self,
        counts: &BTreeMap<&'a KernelTarget, usize>,
        most: u32,
        now: Duration,
    ) -> BTreeSet<&'a KernelTarget> {
        let mut ranked: Vec<_> = counts
            .iter()
            .map(|(kernel, nodes)| {
                let (first, last) = self.kernels.entry((*kernel).clone()).or_insert((now, now));
                *last = now;
                (Reverse(*nodes), *first, *kernel)
            })
            .collect();
        ranked.sort_unstable();
        let most = usize::try_from(most).unwrap_or(usize::MAX);
        ranked.into_iter().take(most).map(|(_, _, kernel)| kernel).collect()
    }
}

#[cfg(test)]
mod tests;
