//! Finds the newest kernels of tracked families.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
};

use farrier_core::{
    kernel::{
        FurtherRpmPackages, KernelFamily, KernelRelease, KernelTrack, TrackedSuites, debian_version,
        rpm_version,
    },
    plan::{ClusterSnapshot, Platform, TrackedKernel, newest_tracked, platforms_with_images, rpm_flavor},
};
use farrier_inputs::Result;
use oci::error_chain;

use crate::services::BuildServices;

/// Returns the newest kernels of the tracked suites and repositories, for platforms whose nodes need images. An unreadable suite
/// or repository announces no kernels this time, so that the images for running kernels are still built.
pub async fn tracked_kernels(
    services: &BuildServices,
    snapshot: &ClusterSnapshot,
) -> BTreeSet<TrackedKernel> {
    let mut kernels = BTreeSet::new();
    if services.definitions.families.iter().all(|family| family.spec.track.is_none()) {
        return kernels;
    }
    let platforms = platforms_with_images(&services.definitions, snapshot);
    for family in &services.definitions.families {
        let Some(track) = &family.spec.track else { continue };
        for (platform, _) in platforms.iter().filter(|(_, images)| !images.is_empty()) {
            if !family.spec.matches.may_match(&platform.os, &platform.os_version, platform.arch) {
                continue;
            }
            let found = match track {
                KernelTrack::Apt(suites) => newest_in_suites(services, family, suites, platform).await,
                KernelTrack::Rpm(packages) => {
                    newest_in_repositories(services, family, packages, platform).await
                }
            };
            match found {
                Ok(newest) => kernels.extend(newest),
                Err(error) => {
                    let (family, hint) = (&family.metadata.name, error.hint());
                    tracing::warn!(%family, error = error_chain(&error), hint, "cannot look up the tracked kernels");
                }
            }
        }
    }
    kernels
}

async fn newest_in_suites(
    services: &BuildServices,
    family: &KernelFamily,
    suites: &TrackedSuites,
    platform: &Platform,
) -> Result<Vec<TrackedKernel>> {
    let headers = services.fetcher.headers();
    let releases = headers.releases(&family.spec.headers, suites, platform.arch).await?;
    let compare = debian_version::compare;
    let flavors = suites.flavors.iter();
    Ok(flavors
        .filter_map(|flavor| newest_kernel(services, family, platform, flavor, &releases, compare))
        .collect())
}

/// Returns the newest kernel of each flavor in each repository.
async fn newest_in_repositories(
    services: &BuildServices,
    family: &KernelFamily,
    packages: &FurtherRpmPackages,
    platform: &Platform,
) -> Result<Vec<TrackedKernel>> {
    // The lookup needs a kernel target, but repositories depend only on the platform. Any release will do.
    let Ok(placeholder) = "any".parse() else { return Ok(Vec::new()) };
    let target = platform.with(placeholder);
    let headers = services.fetcher.headers();
    let releases = match headers.rpm_releases(&family.spec.headers, packages, &target).await? {
        Ok(releases) => releases,
        Err(missing) => {
            let family = &family.metadata.name;
            tracing::warn!(%family, "cannot track kernels: there is no {missing}");
            return Ok(Vec::new());
        }
    };
    let mut kernels = Vec::new();
    for repository in releases {
        let mut flavors: BTreeMap<String, Vec<KernelRelease>> = BTreeMap::new();
        for release in repository {
            flavors.entry(rpm_flavor(&release)).or_default().push(release);
        }
        kernels.extend(flavors.iter().filter_map(|(flavor, releases)| {
            newest_kernel(services, family, platform, flavor, releases, rpm_version::compare)
        }));
    }
    Ok(kernels)
}

fn newest_kernel(
    services: &BuildServices,
    family: &KernelFamily,
    platform: &Platform,
    flavor: &str,
    releases: &[KernelRelease],
    order: fn(&str, &str) -> Ordering,
) -> Option<TrackedKernel> {
    let name = &family.metadata.name;
    newest_tracked(&services.definitions, name, platform, flavor, releases.iter().cloned(), order)
}
