//! Adapter: the newest kernels of tracked families.

use std::collections::BTreeSet;

use crate::{
    error_chain,
    image::checked::Flavour,
    kernel::{KernelFamily, KernelTrack, TrackedSuites},
    parts::Parts,
    plan::{ClusterSnapshot, Platform, TrackedKernel, called_for, newest},
};

/// The newest kernels of the tracked suites, for the platforms whose nodes call for images. Suites that cannot be
/// read announce nothing this time: what runs is not held up by what may run one day.
pub(crate) async fn tracked(parts: &Parts, snapshot: &ClusterSnapshot) -> BTreeSet<TrackedKernel> {
    let mut found = BTreeSet::new();
    if parts.definitions.families.iter().all(|family| family.spec.track.is_none()) {
        return found;
    }
    let platforms = called_for(&parts.definitions, snapshot);
    for family in &parts.definitions.families {
        let Some(KernelTrack::Apt(suites)) = &family.spec.track else { continue };
        for (platform, _) in platforms.iter().filter(|(_, images)| !images.is_empty()) {
            if !family.spec.matches.may_match(&platform.os, &platform.os_version, platform.arch) {
                continue;
            }
            found.extend(newest_of(parts, family, suites, platform).await);
        }
    }
    found
}

async fn newest_of(
    parts: &Parts,
    family: &KernelFamily,
    suites: &TrackedSuites,
    platform: &Platform,
) -> Vec<TrackedKernel> {
    let name = &family.metadata.name;
    let releases = match parts.fetcher.headers().releases(&family.spec.headers, suites, platform.arch).await {
        Ok(releases) => releases,
        Err(error) => {
            let hint = error.hint();
            tracing::warn!(family = %name, error = error_chain(&error), hint, "the tracked suites cannot be read");
            return Vec::new();
        }
    };
    let compare = crate::inputs::apt::version::compare;
    let newest = |flavour: &Flavour| {
        newest(&parts.definitions, name, platform, flavour, releases.iter().cloned(), compare)
    };
    suites.flavours.iter().filter_map(newest).collect()
}
