//! Announced kernels and their announcers. Images for an announced kernel are built before any node runs it.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use serde::Serialize;

use super::{
    ClusterSnapshot, ExceededLimit, NEXT_KERNEL_ANNOTATION, NEXT_KERNEL_LABEL, NodeFacts, OS_ID_LABEL,
    OS_VERSION_LABEL, reasons::and_more, skip_reason::serialize_reason,
};
use crate::{
    image::{Definitions, DriverImage, ImageName, Period},
    kernel::{
        Architecture, KernelLabel, KernelRelease, KernelTarget, OsId, OsVersion, match_family, version_order,
    },
};

/// Maximum number of kernels that all nodes together may announce. Without a limit, anyone who can write one node's
/// annotation could keep the builders busy forever.
const MAX_ANNOUNCED_BY_NODES: usize = 32;

/// Origin of a kernel's announcement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, derive_more::Display)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "by")]
pub enum AnnouncedBy {
    /// A file in `announced/`.
    #[display("configuration {name}")]
    Configuration { name: String },
    /// A kernel family. The kernel is the newest one in the suites that the family tracks.
    #[display("tracked family {family}")]
    Tracked { family: String },
    /// Annotated nodes: the name of the first one, and their number.
    #[display("node {node}{}", and_more(*count))]
    Nodes { node: String, count: usize },
}

/// A kernel target without the release.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Platform {
    /// Operating system id.
    pub os: OsId,
    /// Operating system version.
    pub os_version: OsVersion,
    /// Processor architecture.
    pub arch: Architecture,
}

impl Platform {
    /// Returns a node's platform. The kernel label, which may be stale after a reboot, is not needed.
    pub fn of(node: &NodeFacts) -> Option<Self> {
        Some(Self {
            os: node.labels.get(OS_ID_LABEL)?.parse().ok()?,
            os_version: node.labels.get(OS_VERSION_LABEL)?.parse().ok()?,
            arch: node.architecture.parse().ok()?,
        })
    }

    /// Returns the kernel target of this platform with the given release.
    pub fn with(&self, release: KernelRelease) -> KernelTarget {
        let Self { os, os_version, arch } = self.clone();
        KernelTarget { os, os_version, release, arch }
    }

    fn matches(&self, target: &KernelTarget) -> bool {
        (&self.os, &self.os_version, self.arch) == (&target.os, &target.os_version, target.arch)
    }
}

/// Newest kernel of one flavor in a family's tracked suites.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct TrackedKernel {
    /// The kernel.
    pub target: KernelTarget,
    /// The family that tracks it.
    pub family: ImageName,
    /// Flavor of the kernel, such as `cloud-amd64`.
    pub flavor: String,
}

/// Returns the newest release of a flavor, with versions ordered by `compare`. Skips releases that belong to another
/// family on this platform.
pub fn newest_tracked(
    definitions: &Definitions,
    family: &ImageName,
    platform: &Platform,
    flavor: &str,
    releases: impl IntoIterator<Item = KernelRelease>,
    compare: impl Fn(&str, &str) -> std::cmp::Ordering,
) -> Option<TrackedKernel> {
    let target = releases
        .into_iter()
        .filter(|release| has_flavor(release, flavor))
        .map(|release| platform.with(release))
        .filter(|target| {
            match_family(&definitions.families, target).is_some_and(|other| other.metadata.name == *family)
        })
        .max_by(|a, b| compare(a.release.as_str(), b.release.as_str()))?;
    Some(TrackedKernel { target, family: family.clone(), flavor: flavor.to_owned() })
}

/// Whether a release has a flavor. The word before the flavor must start with a digit:
/// `6.1.0-47-cloud-amd64` has the flavor `cloud-amd64` and not `amd64`; `5.14.0-503.el9.x86_64` has `x86_64`.
fn has_flavor(release: &KernelRelease, flavor: &str) -> bool {
    let prefix = release.as_str().strip_suffix(flavor).and_then(|text| text.strip_suffix(['-', '.']));
    let last_word = prefix.and_then(|prefix| prefix.rsplit('-').next());
    let follows_number = last_word.is_some_and(|part| part.starts_with(|c: char| c.is_ascii_digit()));
    follows_number || rpm_flavor(release) == flavor
}

/// Returns the flavor of an RPM distribution's release: `x86_64`, `x86_64+rt`, `default`, `azl3`. Without an
/// architecture in the release, the flavor consists of the words that are neither numbers nor `rcN`: `acme` for
/// `5.10.0-acme.3`. It is empty for `6.12.90` and `6.12.0-rc3`.
pub fn rpm_flavor(release: &KernelRelease) -> String {
    let text = release.as_str();
    let arch_start = [".x86_64", ".aarch64"].iter().filter_map(|arch| text.find(arch)).min();
    if let Some((_, flavor)) = arch_start.and_then(|start| text.split_at_checked(start + 1)) {
        return flavor.to_owned();
    }
    let is_number = |word: &str| word.starts_with(|c: char| c.is_ascii_digit());
    let is_word = |word: &&str| !is_number(word) && !word.strip_prefix("rc").is_some_and(is_number);
    text.split(['-', '.']).filter(is_word).collect::<Vec<_>>().join("-")
}

/// Reason for not using a node's announcement.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum AnnouncementReason {
    /// The announcement is not a kernel release, or its release has no label.
    #[error("{detail}")]
    Malformed { detail: String },
    /// The node's operating system or architecture is unknown.
    #[error("its operating system or architecture is not known from its labels")]
    NoPlatform,
    /// Nodes announce more kernels than the limit for all nodes allows.
    #[error("{release} exceeds the limit of kernels that nodes may announce at a time: {most}")]
    TooMany { release: String, most: usize },
    /// The node named more kernels than the site's limit for one node allows.
    #[error(
        "it named more than {most} kernels within {within}: its announcements are untrusted until those \
         expire; find out who changes its kernel, its labels and its annotations, or raise \
         kernelLimits.perNode in site.yaml"
    )]
    TooManyNamed { most: u32, within: Period },
}

/// Node whose announcement is not used.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct UnusedAnnouncement {
    /// Name of the node.
    pub node: String,
    /// Reason for not using the announcement.
    #[serde(serialize_with = "serialize_reason")]
    pub why: AnnouncementReason,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct KernelAnnouncement {
    announcers: BTreeSet<AnnouncedBy>,
    /// Whether the kernel is announced for every image whose kernel range includes it.
    for_all_images: bool,
    /// Images that select the announcing nodes or, for a tracked kernel, nodes of its platform.
    images: BTreeSet<ImageName>,
}

impl KernelAnnouncement {
    fn is_for(&self, image: &ImageName) -> bool {
        self.for_all_images || self.images.contains(image)
    }
}

/// All announced kernels, with their announcers and images.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Announcements {
    kernels: BTreeMap<KernelTarget, KernelAnnouncement>,
    /// Newest kernels of the tracked suites.
    tracked: BTreeSet<TrackedKernel>,
    /// Nodes whose announcements are not used.
    pub unused: Vec<UnusedAnnouncement>,
}

impl Announcements {
    /// Collects the announcements from definitions, tracked suites and nodes.
    pub fn of(
        definitions: &Definitions,
        snapshot: &ClusterSnapshot,
        tracked: BTreeSet<TrackedKernel>,
    ) -> Self {
        let mut this = Self::default();
        for (name, list) in &definitions.announced {
            for kernel in &list.spec.kernels {
                let by = AnnouncedBy::Configuration { name: name.to_string() };
                this.add(kernel.clone(), by, None);
            }
        }
        let platforms =
            if tracked.is_empty() { BTreeMap::new() } else { platforms_with_images(definitions, snapshot) };
        for TrackedKernel { target, family, flavor: _ } in &tracked {
            let matching = platforms.iter().find(|(platform, _)| platform.matches(target));
            if let Some((_, images)) = matching.filter(|(_, images)| !images.is_empty()) {
                let by = AnnouncedBy::Tracked { family: family.to_string() };
                this.add(target.clone(), by, Some(images.clone()));
            }
        }
        this.tracked = tracked;
        this.add_nodes(definitions, snapshot);
        this
    }

    fn add_nodes(&mut self, definitions: &Definitions, snapshot: &ClusterSnapshot) {
        let mut announcers: BTreeMap<KernelTarget, Vec<&NodeFacts>> = BTreeMap::new();
        for node in &snapshot.nodes {
            match announcement(node) {
                None => {}
                Some(Ok(target)) => announcers.entry(target).or_default().push(node),
                Some(Err(why)) => self.unused.push(UnusedAnnouncement { node: node.name.clone(), why }),
            }
        }
        let mut ranked: Vec<_> = announcers.into_iter().collect();
        // Kernels with the most announcing nodes first. The stable sort keeps ties in kernel order.
        ranked.sort_by_key(|(_, nodes)| std::cmp::Reverse(nodes.len()));
        for (rank, (target, nodes)) in ranked.into_iter().enumerate() {
            if rank >= MAX_ANNOUNCED_BY_NODES {
                let release = target.release.to_string();
                let why = AnnouncementReason::TooMany { release, most: MAX_ANNOUNCED_BY_NODES };
                let unused =
                    |node: &&NodeFacts| UnusedAnnouncement { node: node.name.clone(), why: why.clone() };
                self.unused.extend(nodes.iter().map(unused));
                continue;
            }
            let selects_any = |image: &&DriverImage| nodes.iter().any(|node| node.is_selected_by(image));
            let images =
                definitions.images.values().filter(selects_any).map(|image| image.metadata.name.clone());
            let Some(node) = nodes.iter().map(|node| &node.name).min() else { continue };
            let by = AnnouncedBy::Nodes { node: node.clone(), count: nodes.len() };
            self.add(target, by, Some(images.collect()));
        }
        self.unused.sort();
    }

    /// Adds a kernel for the given images; `None` adds it for all images.
    fn add(&mut self, target: KernelTarget, by: AnnouncedBy, images: Option<BTreeSet<ImageName>>) {
        let announcement = self.kernels.entry(target).or_default();
        announcement.announcers.insert(by);
        announcement.for_all_images |= images.is_none();
        announcement.images.extend(images.into_iter().flatten());
    }

    /// Returns all announced kernels.
    pub fn targets(&self) -> impl Iterator<Item = &KernelTarget> {
        self.kernels.keys()
    }

    /// Whether any kernel is announced for this image.
    pub fn has_kernel_for(&self, image: &ImageName) -> bool {
        self.kernels.values().any(|announcement| announcement.is_for(image))
    }

    /// Returns the announcers of a kernel; empty if the kernel is not announced for the image.
    pub(super) fn announcers_of(&self, target: &KernelTarget, image: &ImageName) -> Vec<AnnouncedBy> {
        let announcement = self.kernels.get(target).filter(|announcement| announcement.is_for(image));
        announcement.map(|announcement| announcement.announcers.iter().cloned().collect()).unwrap_or_default()
    }

    /// Returns the kernels that are announced for an image.
    pub(super) fn targets_for<'a>(&'a self, image: &'a ImageName) -> impl Iterator<Item = &'a KernelTarget> {
        self.kernels.iter().filter(|(_, announcement)| announcement.is_for(image)).map(|(target, _)| target)
    }

    /// Returns the kernel that a node is to boot next: the kernel that it announces, else the newest tracked kernel of
    /// its platform and flavor.
    pub(super) fn next_kernel_of(&self, node: &NodeFacts) -> Option<KernelTarget> {
        match announcement(node) {
            Some(Ok(target)) => return self.kernels.contains_key(&target).then_some(target),
            Some(Err(_)) => return None,
            None if self.tracked.is_empty() => return None,
            None => {}
        }
        let (platform, release) = (Platform::of(node)?, node.kernel_version.parse().ok()?);
        let fits = |tracked: &&TrackedKernel| {
            platform.matches(&tracked.target) && has_flavor(&release, &tracked.flavor)
        };
        let mut tracked: Vec<&KernelTarget> =
            self.tracked.iter().filter(fits).map(|tracked| &tracked.target).collect();
        // A family may track several streams, such as RHEL's EUS and the newest minor release. Choose the oldest stream
        // whose newest kernel is not older than the node's kernel: it is the node's own stream. If all are older, choose
        // the newest one.
        let order = version_order(&platform.os, release.as_str());
        tracked.sort_by(|a, b| order(a.release.as_str(), b.release.as_str()));
        let next = tracked.iter().find(|next| order(next.release.as_str(), release.as_str()).is_ge());
        next.or(tracked.last()).copied().cloned()
    }
}

impl NodeFacts {
    /// Returns the kernel release that the node announces, by its annotation or else by its label.
    pub fn announced_release(&self) -> Option<Cow<'_, str>> {
        let annotation = self.annotations.get(NEXT_KERNEL_ANNOTATION).map(|text| Cow::from(text.as_str()));
        annotation.or_else(|| {
            // The value of a label cannot end with a dot.
            let text = self.labels.get(NEXT_KERNEL_LABEL)?.replace(".plus.", "+");
            let last = text.strip_suffix(".plus").map(|start| format!("{start}+"));
            Some(last.unwrap_or(text).into())
        })
    }

    /// Replaces the node's announcement.
    pub fn announce(&mut self, release: Option<&KernelRelease>) {
        self.labels.remove(NEXT_KERNEL_LABEL);
        self.annotations.remove(NEXT_KERNEL_ANNOTATION);
        if let Some(release) = release {
            self.annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), release.to_string());
        }
    }
}

/// Returns the kernel target that a node announces, or the reason for not using the announcement. Returns
/// `None` for a node without an announcement.
pub(super) fn announcement(node: &NodeFacts) -> Option<Result<KernelTarget, AnnouncementReason>> {
    let text = node.announced_release()?;
    if let Some(ExceededLimit::PerNode { most, within }) = node.rejected_claims.announcement {
        return Some(Err(AnnouncementReason::TooManyNamed { most, within }));
    }
    Some(match text.parse::<KernelRelease>() {
        Ok(release) if KernelLabel::of(&release).is_none() => {
            let detail = format!("kernel release {text:?} gives no label of at most 63 characters");
            Err(AnnouncementReason::Malformed { detail })
        }
        Ok(release) => {
            Platform::of(node).map(|platform| platform.with(release)).ok_or(AnnouncementReason::NoPlatform)
        }
        Err(error) => Err(AnnouncementReason::Malformed { detail: error.to_string() }),
    })
}

/// Returns the platforms of the nodes, each with the images that select at least one of its nodes.
pub fn platforms_with_images(
    definitions: &Definitions,
    snapshot: &ClusterSnapshot,
) -> BTreeMap<Platform, BTreeSet<ImageName>> {
    let mut platforms: BTreeMap<Platform, BTreeSet<ImageName>> = BTreeMap::new();
    for node in &snapshot.nodes {
        let Some(platform) = Platform::of(node) else { continue };
        let selecting = platforms.entry(platform).or_default();
        for (name, image) in &definitions.images {
            if !selecting.contains(name) && node.is_selected_by(image) {
                selecting.insert(name.clone());
            }
        }
    }
    platforms
}

#[cfg(test)]
mod tests;
