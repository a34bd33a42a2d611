//! Adapter: the newest kernels of tracked families.

use std::collections::BTreeSet;

use super::{Controller, chain};
use crate::{
    kernel::{KernelFamily, KernelTrack},
    plan::{ClusterSnapshot, Platform, TrackedKernel, called_for, newest},
};

impl Controller {
    /// The newest kernels of the tracked suites, for the platforms whose nodes call for images. Suites that cannot be
    /// read announce nothing this time: what runs is not held up by what may run one day.
    pub(super) async fn tracked(&self, snapshot: &ClusterSnapshot) -> BTreeSet<TrackedKernel> {
        let mut found = BTreeSet::new();
        if self.definitions.families.iter().all(|family| family.spec.track.is_none()) {
            return found;
        }
        let platforms = called_for(&self.definitions, snapshot);
        for family in &self.definitions.families {
            let Some(KernelTrack::Apt(suites)) = &family.spec.track else { continue };
            for (platform, _) in platforms.iter().filter(|(_, images)| !images.is_empty()) {
                if !family.spec.matches.may_match(&platform.os, &platform.os_version, platform.arch) {
                    continue;
                }
                found.extend(self.newest_of(family, suites, platform).await);
            }
        }
        found
    }

    async fn newest_of(
        &self,
        family: &KernelFamily,
        suites: &crate::kernel::TrackedSuites,
        platform: &Platform,
    ) -> Vec<TrackedKernel> {
        let name = &family.metadata.name;
        let releases = match self.fetcher.kernel_releases(&family.spec.headers, suites, platform.arch).await {
            Ok(releases) => releases,
            Err(error) => {
                tracing::warn!(family = %name, error = chain(&error), "the tracked suites cannot be read");
                return Vec::new();
            }
        };
        let compare = crate::headers::apt::version::compare;
        let newest = |flavour: &String| {
            newest(&self.definitions, name, platform, flavour, releases.iter().cloned(), compare)
        };
        suites.flavours.iter().filter_map(newest).collect()
    }
}
