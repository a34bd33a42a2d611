//! Union images, which hold the payloads of several kernels: their members and names, and the images in use whose contents must
//! be known.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use super::{ClusterSnapshot, ImageContents, RewriteRecord, reuse::by_numbers};
use crate::{
    image::{Definitions, Digest, FieldHasher, ImageName, ImageReference, InputHash, Repository, Version},
    kernel::{Architecture, KernelRelease},
};

/// Format of union images. Change it when the same members would give other bytes.
const FORMAT: &str = "farrier.dev/union/1";
/// Format of the names that unions of several architectures share.
const INDEX_FORMAT: &str = "farrier.dev/union-index/1";
/// Maximum number of kernels in one image. Each kernel is a layer, and container runtimes stack at most 128 layers, including
/// the base's layers.
pub(super) const MAX_MEMBERS: usize = 100;

/// Image for one kernel that is part of a union.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnionMember {
    /// Release of the kernel.
    pub kernel: KernelRelease,
    /// Digest of the kernel's image, in the same repository.
    pub digest: Digest,
}

/// Members of unions: images by architecture and kernel.
pub(super) type UnionMembers = BTreeMap<Architecture, BTreeMap<KernelRelease, Digest>>;

/// Union image to publish.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct PlannedUnion {
    /// The driver image.
    pub image: ImageName,
    /// The driver's version.
    pub version: String,
    /// Name of the image: `<version>-union-<12 digits>` of the input hash, or of a hash over the input hashes of all
    /// architectures that share the name.
    pub reference: ImageReference,
    /// Hash over the members: their digests determine every byte, including the base.
    pub input_hash: InputHash,
    /// Architecture of the nodes.
    pub architecture: Architecture,
    /// Members, oldest kernel first. If several members have the same file, the last one's is visible.
    pub members: Vec<UnionMember>,
}

impl PlannedUnion {
    /// Returns the unions of these members, one per architecture, under one name. `None` where the version gives no
    /// valid tag.
    pub(super) fn all(
        image: &ImageName,
        version: &str,
        repository: &Repository,
        members: &UnionMembers,
    ) -> Option<Vec<Self>> {
        let hashed_members: Vec<_> = members
            .iter()
            .map(|(architecture, images)| {
                let members = in_order(images);
                (*architecture, input_hash(version, *architecture, &members), members)
            })
            .collect();
        let hash = if let [(_, input_hash, _)] = hashed_members.as_slice() {
            *input_hash
        } else {
            let mut hasher = FieldHasher::new(INDEX_FORMAT);
            for (_, input_hash, _) in &hashed_members {
                hasher.add("union", input_hash.to_string());
            }
            hasher.finish()
        };
        let sanitize = |c: char| if c.is_ascii_alphanumeric() || "_.-".contains(c) { c } else { '_' };
        let prefix: String = version.chars().map(sanitize).take(100).collect();
        let tag = format!("{prefix}-union-{}", hash.short()).parse().ok()?;
        let reference = ImageReference { repository: repository.clone(), version: Version::Tag(tag) };
        let union = |(architecture, input_hash, members)| Self {
            image: image.clone(),
            version: version.to_owned(),
            reference: reference.clone(),
            input_hash,
            architecture,
            members,
        };
        Some(hashed_members.into_iter().map(union).collect())
    }

    /// Returns the contents of these unions, which share a name.
    pub(super) fn contents(unions: Vec<Self>) -> ImageContents {
        let platforms = unions.into_iter().map(|union| {
            let members = union.members.into_iter().map(|member| (member.kernel.to_string(), member.digest));
            (union.architecture, ImageContents::from(members.collect::<BTreeMap<_, _>>()))
        });
        ImageContents { platforms: platforms.collect(), ..ImageContents::default() }
    }
}

fn in_order(images: &BTreeMap<KernelRelease, Digest>) -> Vec<UnionMember> {
    let member = |(kernel, digest): (&KernelRelease, &Digest)| UnionMember {
        kernel: kernel.clone(),
        digest: digest.clone(),
    };
    let mut members: Vec<UnionMember> = images.iter().map(member).collect();
    members.sort_by(|a, b| by_numbers(a.kernel.as_str(), b.kernel.as_str()));
    members
}

fn input_hash(version: &str, architecture: Architecture, members: &[UnionMember]) -> InputHash {
    let mut hasher = FieldHasher::new(FORMAT);
    hasher.add("version", version).add("architecture", architecture.as_str());
    for UnionMember { kernel, digest } in members {
        hasher.add("kernel", kernel.as_str()).add("image", digest.as_str());
    }
    hasher.finish()
}

/// Returns the images that rollout targets and their pods name. Their contents must be known before farrier decides
/// about a node.
pub fn images_in_use(snapshot: &ClusterSnapshot, definitions: &Definitions) -> BTreeSet<String> {
    let mut images = BTreeSet::new();
    for spec in definitions.images.values().flat_map(|image| &image.spec.rollout) {
        let Some(target) = spec.daemon_set() else { continue };
        for daemon_set in snapshot.daemon_sets.iter().filter(|daemon_set| daemon_set.is_named(target)) {
            let containers = daemon_set.containers.iter().filter(|other| other.name == *target.container);
            images.extend(containers.map(|container| container.image.clone()));
            let Some(live) = &daemon_set.live else { continue };
            // Include the image of the record: a rejected image must not be set again under another name.
            let record =
                RewriteRecord::of(&live.annotations).unwrap_or_default().0.remove(&*target.container);
            // The replaced image is restored only if it has modules for the nodes' kernels.
            let recorded = record.iter().flat_map(|record| [&record.set, &record.replaced]);
            images.extend(recorded.filter_map(|image| image.as_str().map(str::to_owned)));
            let copies = snapshot.daemon_sets.iter().filter(|copy| copy.is_copy_of(daemon_set));
            let uids: Vec<&str> = copies.filter_map(|copy| Some(&*copy.live.as_ref()?.version.uid)).collect();
            let is_owner = |uid: &str| uid == live.version.uid || uids.contains(&uid);
            let pods = snapshot.pods.iter().filter(|pod| is_owner(&pod.daemon_set));
            images.extend(pods.filter_map(|pod| pod.images.get(&*target.container).cloned()));
        }
    }
    images.remove("");
    images
}
