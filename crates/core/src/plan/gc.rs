//! Pure: which published images are for kernels that are gone, and may go themselves.
//!
//! Whatever speaks for an image keeps it: a word in the cluster that names it, a kernel that runs, is announced or was
//! seen lately, an image that stays and is made from it. An image goes only where nothing does.

mod candidates;
mod held_image;
mod record;

use std::collections::{BTreeMap, BTreeSet, HashMap};

use jiff::{ToSpan, civil::Date};
use serde::Serialize;

use super::{
    Announcements, ClusterSnapshot, NEXT_KERNEL_ANNOTATION, node_target,
    rollout::{left_kernels, left_release},
};
use crate::image::{Digest, Repository, Tag};

pub use candidates::Candidates;
pub use held_image::HeldImage;
pub use record::{KernelKey, KernelRecord};

/// Kernels that count as in use whatever the record says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LiveKernels(BTreeMap<String, KernelUse>);

/// How a kernel is in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum KernelUse {
    Runs,
    Announced,
    /// The rollout of a union gives it its grace time, which may be longer than gc's.
    Left,
}

impl LiveKernels {
    /// What nodes run, by whatever they say of themselves, what is announced, heard or not, and what unions still hold.
    pub fn of(snapshot: &ClusterSnapshot, announced: &Announcements) -> Self {
        let mut kernels = BTreeMap::new();
        for live in snapshot.daemon_sets.iter().filter_map(|found| found.live.as_ref()) {
            let left = left_kernels(&live.annotations);
            kernels.extend(left.keys().map(|key| (left_release(key).to_owned(), KernelUse::Left)));
        }
        for target in announced.targets() {
            kernels.insert(target.release.to_string(), KernelUse::Announced);
        }
        for node in &snapshot.nodes {
            if let Some(next) = node.annotations.get(NEXT_KERNEL_ANNOTATION) {
                kernels.insert(next.clone(), KernelUse::Announced);
            }
        }
        for node in &snapshot.nodes {
            kernels.insert(node.kernel_version.clone(), KernelUse::Runs);
        }
        Self(kernels)
    }
}

/// What is noted of nodes' and announced kernels: of those whose targets are known.
pub fn kernels_to_note(snapshot: &ClusterSnapshot, announced: &Announcements) -> BTreeSet<KernelKey> {
    let running = snapshot.nodes.iter().filter_map(|node| node_target(node).ok());
    let all = running.chain(announced.targets().cloned());
    all.map(|target| KernelKey { release: target.release.to_string(), arch: Some(target.arch) }).collect()
}

/// What a decision is made from.
#[derive(Clone, Copy, Debug)]
pub struct GcInputs<'a> {
    /// What the registry holds: every tag of every repository that is looked at.
    pub images: &'a [HeldImage],
    /// Which of [`Candidates`] the cluster's objects mention.
    pub mentioned: &'a BTreeSet<String>,
    /// Kernels in use.
    pub live: &'a LiveKernels,
    /// When kernels were last seen. One that is not in it counts as seen today.
    pub record: &'a KernelRecord,
    /// An image goes when its kernel was not seen for so many days.
    pub keep_days: u32,
    /// Today, in UTC.
    pub today: Date,
}

/// Why an image stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "why")]
#[expect(missing_docs, reason = "the variants say what their fields are")]
pub enum KeptWhy {
    /// farrier did not publish it, or it is for no kernel.
    NotOurs,
    /// A rollout target, a pod, a record for rollback names it, by this word.
    Named { by: String },
    /// A node runs its kernel.
    Runs { kernel: String },
    /// Its kernel is announced.
    Announced { kernel: String },
    /// Unions are still to hold its kernel for a while.
    Left { kernel: String },
    /// All its kernels were seen lately; this one was not seen for the longest time.
    Recent { kernel: String, seen: Date },
    /// An image that stays is put together from it.
    PartOf { image: String },
    /// An image that stays stands on it.
    BaseOf { image: String },
}

/// An image that stays.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KeptImage {
    /// Its name.
    pub image: String,
    /// Why.
    #[serde(flatten)]
    pub why: KeptWhy,
}

/// An image that goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GoingImage {
    /// Where.
    pub repository: Repository,
    /// What.
    pub digest: Digest,
    /// All its tags.
    pub tags: Vec<Tag>,
    /// Its kernels that are gone, with the day on which each was last seen.
    pub gone: BTreeMap<String, Date>,
    /// Bytes of its blobs that no image which stays names.
    pub bytes: u64,
}

/// What goes, and what stays.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GcPlan {
    /// What goes: images before those that they are made from.
    pub going: Vec<GoingImage>,
    /// What stays.
    pub kept: Vec<KeptImage>,
    /// Bytes of blobs that only images which go name, each blob once.
    pub bytes: u64,
}

/// Decides.
pub fn gc_plan(inputs: &GcInputs<'_>) -> GcPlan {
    let GcInputs { images, .. } = *inputs;
    let mut kept: Vec<Option<KeptWhy>> = images.iter().map(|image| kept_by_itself(inputs, image)).collect();
    keep_parts(images, &mut kept);

    let staying = images.iter().zip(&kept).filter(|(_, why)| why.is_some());
    let needed: BTreeSet<&Digest> = staying.flat_map(|(image, _)| image.blobs.keys()).collect();
    let mut freed: BTreeMap<&Digest, u64> = BTreeMap::new();
    let mut plan = GcPlan::default();
    for (image, why) in images.iter().zip(kept) {
        if let Some(why) = why {
            plan.kept.push(KeptImage { image: image.reference(), why });
            continue;
        }
        let own: BTreeMap<&Digest, u64> = image
            .blobs
            .iter()
            .filter(|(digest, _)| !needed.contains(digest))
            .map(|(digest, size)| (digest, *size))
            .collect();
        plan.going.push(GoingImage {
            repository: image.repository.clone(),
            digest: image.digest.clone(),
            tags: image.tags.iter().cloned().collect(),
            gone: gone(inputs, image),
            bytes: total(&own),
        });
        freed.extend(own);
    }
    // What is put together from others goes before them: at no time does it name what is not there.
    let held = |digest: &Digest| images.iter().find(|image| image.digest == *digest);
    let count = |digest: &Digest| held(digest).map_or(0, |image| image.members.len());
    // An index leads to images that are put together themselves.
    let parts = |going: &GoingImage| {
        let members = held(&going.digest).into_iter().flat_map(|image| &image.members);
        members.map(|member| 1 + count(member)).sum::<usize>()
    };
    plan.going.sort_by_cached_key(|going| {
        (std::cmp::Reverse(parts(going)), going.repository.clone(), going.tags.clone())
    });
    plan.kept.sort_by(|a, b| a.image.cmp(&b.image));
    plan.bytes = total(&freed);
    plan
}

/// Sizes are a registry's word.
fn total(blobs: &BTreeMap<&Digest, u64>) -> u64 {
    blobs.values().fold(0, |sum, size| sum.saturating_add(*size))
}

/// What speaks for an image whatever becomes of the others.
fn kept_by_itself(inputs: &GcInputs<'_>, image: &HeldImage) -> Option<KeptWhy> {
    let GcInputs { mentioned, live, .. } = inputs;
    if let Some(by) = Candidates::of_image(image).find(|word| mentioned.contains(word)) {
        return Some(KeptWhy::Named { by });
    }
    if image.kernels.is_empty() {
        return Some(KeptWhy::NotOurs);
    }
    if !gone(inputs, image).is_empty() {
        return None;
    }
    let mut uses = image.kernels.iter().filter_map(|kernel| Some((live.0.get(kernel)?, kernel)));
    if let Some((used, kernel)) = uses.next() {
        let kernel = kernel.clone();
        return Some(match used {
            KernelUse::Runs => KeptWhy::Runs { kernel },
            KernelUse::Announced => KeptWhy::Announced { kernel },
            KernelUse::Left => KeptWhy::Left { kernel },
        });
    }
    let oldest = image.kernels.iter().min_by_key(|kernel| inputs.record.seen(kernel))?;
    let seen = inputs.record.seen(oldest).unwrap_or(inputs.today);
    Some(KeptWhy::Recent { kernel: oldest.clone(), seen })
}

/// The kernels of an image that no node has had for long enough. A union with one of them is not what a rollout asks for
/// any more: unions have the kernels that nodes run, those that are announced, and those that left only a while ago.
fn gone(inputs: &GcInputs<'_>, image: &HeldImage) -> BTreeMap<String, Date> {
    let GcInputs { live, record, keep_days, today, .. } = *inputs;
    let last = today.saturating_sub(i64::from(keep_days).days());
    let gone = |kernel: &&String| !live.0.contains_key(*kernel);
    let seen = |kernel: &String| (kernel.clone(), record.seen(kernel).unwrap_or(today));
    image.kernels.iter().filter(gone).map(seen).filter(|(_, seen)| *seen <= last).collect()
}

/// What images that stay are made from stays.
fn keep_parts(images: &[HeldImage], kept: &mut [Option<KeptWhy>]) {
    let mut places: HashMap<&Digest, Vec<usize>> = HashMap::new();
    for (place, image) in images.iter().enumerate() {
        places.entry(&image.digest).or_default().push(place);
    }
    let mut next: Vec<usize> = (0..images.len()).filter(|place| kept[*place].is_some()).collect();
    while let Some(place) = next.pop() {
        let whole = &images[place];
        let members = whole.members.iter().map(|part| (part, false));
        for (part, is_base) in members.chain(whole.base.iter().map(|base| (base, true))) {
            for &found in places.get(part).into_iter().flatten() {
                let of_it = is_base || images[found].repository == whole.repository;
                if kept[found].is_none() && of_it {
                    let image = whole.reference();
                    kept[found] =
                        Some(if is_base { KeptWhy::BaseOf { image } } else { KeptWhy::PartOf { image } });
                    next.push(found);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
