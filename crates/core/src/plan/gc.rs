//! Garbage collection: decides which published images belong to kernels that are gone and can be deleted.
//!
//! Any one of these reasons keeps an image:
//!
//! - an object in the cluster names the image
//! - the image's kernel runs, is announced or was seen recently
//! - a kept image is made from the image

mod candidates;
mod record;
mod registry_image;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::{ToSpan, civil::Date};
use serde::Serialize;

use super::{
    Announcements, ClusterSnapshot, node_target,
    rollout::{release_of_key, unused_kernels},
};
use crate::image::{Digest, Repository, Tag};

pub use candidates::Candidates;
pub use record::{KernelKey, KernelRecord};
pub use registry_image::RegistryImage;

/// Kernels in use, regardless of the record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveKernels(BTreeMap<String, KeepReason>);

impl LiveKernels {
    /// Collects the kernels that nodes report, all announced kernels whether or not the announcement is used, and the
    /// kernels that unions still keep.
    pub fn of(snapshot: &ClusterSnapshot, announced: &Announcements) -> Self {
        // The strongest use of a kernel is inserted last and replaces the others.
        let mut kernels = BTreeMap::new();
        for live in snapshot.daemon_sets.iter().filter_map(|daemon_set| daemon_set.live.as_ref()) {
            for key in unused_kernels(&live.annotations).keys() {
                let kernel = release_of_key(key).to_owned();
                kernels.insert(kernel.clone(), KeepReason::Left { kernel });
            }
        }
        let by_nodes = snapshot.nodes.iter().filter_map(|node| Some(node.announced_release()?.into_owned()));
        let announced = announced.targets().map(|target| target.release.to_string()).chain(by_nodes);
        kernels.extend(announced.map(|kernel| (kernel.clone(), KeepReason::Announced { kernel })));
        let running = snapshot.nodes.iter().map(|node| node.kernel_version.clone());
        kernels.extend(running.map(|kernel| (kernel.clone(), KeepReason::Runs { kernel })));
        Self(kernels)
    }
}

/// Returns the kernels to record as seen: announced kernels, and the kernels of nodes with a known target.
pub fn kernels_in_use(snapshot: &ClusterSnapshot, announced: &Announcements) -> BTreeSet<KernelKey> {
    let running = snapshot.nodes.iter().filter_map(|node| node_target(node).ok());
    let all = running.chain(announced.targets().cloned());
    all.map(|target| KernelKey { release: target.release.to_string(), arch: Some(target.arch) }).collect()
}

/// Inputs of the garbage collection.
#[derive(Clone, Copy, Debug)]
pub struct GcInputs<'a> {
    /// Images of the registry: every tag of every examined repository.
    pub images: &'a [RegistryImage],
    /// Members of [`Candidates`] that the cluster's objects mention.
    pub mentioned: &'a BTreeSet<String>,
    /// Kernels in use.
    pub live: &'a LiveKernels,
    /// Day on which each kernel was last seen. A kernel without an entry counts as seen today.
    pub record: &'a KernelRecord,
    /// Number of days since an image's kernel was last seen, after which the image is deleted.
    pub keep_days: u32,
    /// Today, in UTC.
    pub today: Date,
}

/// Reason for keeping an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "why")]
pub enum KeepReason {
    /// farrier did not publish the image, or it is for no kernel.
    NotOurs,
    /// A rollout target, a pod or a rollback record contains this name of the image.
    Named { by: String },
    /// A node runs the image's kernel.
    Runs { kernel: String },
    /// The image's kernel is announced.
    Announced { kernel: String },
    /// A union rollout keeps the kernel for its grace time, which may be longer than the garbage collector's.
    Left { kernel: String },
    /// All kernels of the image were seen recently; this is the one seen longest ago.
    Recent { kernel: String, seen: Date },
    /// A kept image is assembled from this image.
    PartOf { image: String },
    /// A kept image has this image as its base.
    BaseOf { image: String },
}

/// Image that is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KeptImage {
    /// Name of the image.
    pub image: String,
    /// Reason for keeping it.
    #[serde(flatten)]
    pub why: KeepReason,
}

/// Image that is deleted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PrunedImage {
    /// Repository of the image.
    pub repository: Repository,
    /// Digest of the manifest.
    pub digest: Digest,
    /// All tags of the image.
    pub tags: Vec<Tag>,
    /// Kernels of the image that are gone, each with the day on which it was last seen.
    pub gone: BTreeMap<String, Date>,
    /// Bytes of the image's blobs that no kept image refers to.
    pub bytes: u64,
}

/// Images to delete and images to keep.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GcPlan {
    /// Images to delete, each before the images that it is made from.
    pub going: Vec<PrunedImage>,
    /// Images to keep.
    pub kept: Vec<KeptImage>,
    /// Bytes of the blobs that only deleted images refer to, each blob counted once.
    pub bytes: u64,
}

/// Decides which images to delete and which to keep.
pub fn gc_plan(inputs: &GcInputs<'_>) -> GcPlan {
    let GcInputs { images, .. } = *inputs;
    let mut keep_reasons: Vec<Option<KeepReason>> =
        images.iter().map(|image| own_keep_reason(inputs, image)).collect();
    keep_parts(images, &mut keep_reasons);

    let kept_images = images.iter().zip(&keep_reasons).filter(|(_, why)| why.is_some());
    let kept_blobs: BTreeSet<&Digest> = kept_images.flat_map(|(image, _)| image.blobs.keys()).collect();
    let mut freed: BTreeMap<&Digest, u64> = BTreeMap::new();
    let mut plan = GcPlan::default();
    for (image, why) in images.iter().zip(keep_reasons) {
        if let Some(why) = why {
            plan.kept.push(KeptImage { image: image.reference(), why });
            continue;
        }
        let freeable: BTreeMap<&Digest, u64> = image
            .blobs
            .iter()
            .filter(|(digest, _)| !kept_blobs.contains(digest))
            .map(|(digest, size)| (digest, *size))
            .collect();
        plan.going.push(PrunedImage {
            repository: image.repository.clone(),
            digest: image.digest.clone(),
            tags: image.tags.iter().cloned().collect(),
            gone: gone(inputs, image),
            bytes: total(&freeable),
        });
        freed.extend(freeable);
    }
    // Delete an assembled image before its parts, so that no image ever refers to a missing one.
    let find = |digest: &Digest| images.iter().find(|image| image.digest == *digest);
    let member_count = |digest: &Digest| find(digest).map_or(0, |image| image.members.len());
    // An index refers to images that can themselves have members.
    let part_count = |pruned: &PrunedImage| {
        let members = find(&pruned.digest).into_iter().flat_map(|image| &image.members);
        members.map(|member| 1 + member_count(member)).sum::<usize>()
    };
    plan.going.sort_by_cached_key(|pruned| {
        (std::cmp::Reverse(part_count(pruned)), pruned.repository.clone(), pruned.tags.clone())
    });
    plan.kept.sort_by(|a, b| a.image.cmp(&b.image));
    plan.bytes = total(&freed);
    plan
}

/// The sizes come from the registry and are untrusted: saturate instead of overflowing.
fn total(blobs: &BTreeMap<&Digest, u64>) -> u64 {
    blobs.values().fold(0, |sum, size| sum.saturating_add(*size))
}

/// Returns the reason that keeps an image regardless of other images.
fn own_keep_reason(inputs: &GcInputs<'_>, image: &RegistryImage) -> Option<KeepReason> {
    let GcInputs { mentioned, live, .. } = inputs;
    if let Some(by) = Candidates::of_image(image).find(|word| mentioned.contains(word)) {
        return Some(KeepReason::Named { by });
    }
    if image.kernels.is_empty() {
        return Some(KeepReason::NotOurs);
    }
    if !gone(inputs, image).is_empty() {
        return None;
    }
    if let Some(why) = image.kernels.iter().find_map(|kernel| live.0.get(kernel)) {
        return Some(why.clone());
    }
    let oldest = image.kernels.iter().min_by_key(|kernel| inputs.record.seen(kernel))?;
    let seen = inputs.record.seen(oldest).unwrap_or(inputs.today);
    Some(KeepReason::Recent { kernel: oldest.clone(), seen })
}

/// Returns the kernels of an image that are not in use and were last seen at least `keep_days` ago. No rollout asks for a
/// union with such a kernel: unions include only kernels that nodes run, announced kernels, and kernels that left recently.
fn gone(inputs: &GcInputs<'_>, image: &RegistryImage) -> BTreeMap<String, Date> {
    let GcInputs { live, record, keep_days, today, .. } = *inputs;
    let cutoff = today.saturating_sub(i64::from(keep_days).days());
    let unused = image.kernels.iter().filter(|kernel| !live.0.contains_key(*kernel));
    let last_seen = unused.map(|kernel| (kernel.clone(), record.seen(kernel).unwrap_or(today)));
    last_seen.filter(|(_, seen)| *seen <= cutoff).collect()
}

/// Keeps the images that kept images are made from.
fn keep_parts(images: &[RegistryImage], keep_reasons: &mut [Option<KeepReason>]) {
    let mut by_digest: HashMap<&Digest, Vec<usize>> = HashMap::new();
    for (index, image) in images.iter().enumerate() {
        by_digest.entry(&image.digest).or_default().push(index);
    }
    let mut pending: Vec<usize> = (0..images.len()).filter(|index| keep_reasons[*index].is_some()).collect();
    while let Some(index) = pending.pop() {
        let whole = &images[index];
        let members = whole.members.iter().map(|part| (part, false));
        for (part, is_base) in members.chain(whole.base.iter().map(|base| (base, true))) {
            for &part_index in by_digest.get(part).into_iter().flatten() {
                let is_part = is_base || images[part_index].repository == whole.repository;
                if keep_reasons[part_index].is_none() && is_part {
                    let image = whole.reference();
                    keep_reasons[part_index] = Some(if is_base {
                        KeepReason::BaseOf { image }
                    } else {
                        KeepReason::PartOf { image }
                    });
                    pending.push(part_index);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
