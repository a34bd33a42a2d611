//! Garbage-collects published images whose kernels are gone, with their referrers and signatures, for `farrier gc`.
#![forbid(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};

use farrier_builder::{
    images::{RECORDS, add_to_record, day, read_record},
    resolve::tracked_kernels,
    services::{BuildError, BuildServices, ImageAccess, MAX_CONCURRENT_REQUESTS, Result},
};
use farrier_cluster::{Cluster, Directory};
use farrier_core::{
    image::{Digest, HostOutput, ImageName, Repository, RolloutSpec, Tag, Version},
    plan::{
        Announcements, Candidates, GcInputs, GcPlan, KernelRecord, LiveKernels, PrunedImage, RegistryImage,
        gc_plan,
    },
};
use farrier_git as git;
use farrier_store::{
    InputKind, is_referrer_or_signature,
    registry::{RegistryError, StoredManifest},
};
use futures::{StreamExt, stream};
use jiff::{SignedDuration, Timestamp, ToSpan as _, civil::Date};
use oci::{AnyManifest, ImageManifest, error_chain, media_type, subject_of_tag};
use serde::Serialize;

/// Largest accepted difference between this machine's clock and the registry's.
const MAX_CLOCK_SKEW: SignedDuration = SignedDuration::from_hours(1);

/// Options of a garbage collection.
#[derive(Clone, Debug)]
pub struct GcOptions {
    /// Number of days that an image is kept after its kernel was last seen.
    pub keep_days: u32,
    /// Names of further images to collect, whose definitions no longer exist.
    pub further: Vec<ImageName>,
    /// Whether to delete. `false` is a dry run.
    pub delete: bool,
    /// Whether to continue if no kernel was seen for `keep_days`.
    pub accept_stale_record: bool,
}

/// Outcome for an image to remove.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum GcState {
    /// The dry run would delete the image.
    WouldDelete,
    /// The image, its referrers and its signatures were deleted.
    Deleted,
    /// The image, a referrer or a signature could not be deleted.
    Failed {
        /// Reason for the failure.
        error: String,
    },
    /// The run stopped before this image.
    Untouched,
}

/// An image to remove, and its outcome.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GcImage {
    #[serde(flatten)]
    pub pruned: PrunedImage,
    /// Outcome.
    #[serde(flatten)]
    pub state: GcState,
}

/// Referrers and signatures of a missing image. An earlier run was interrupted, or another client deleted the image.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Leftover {
    pub repository: Repository,
    /// Digest of the missing image.
    pub subject: Digest,
    /// Outcome.
    #[serde(flatten)]
    pub state: GcState,
}

/// Stored inputs of one kind. Garbage collection does not delete stored inputs.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredKind {
    /// Repository below the registry's prefix.
    pub kind: &'static str,
    /// Number of artifacts.
    pub artifacts: usize,
    /// Total size of the artifacts' layers in bytes.
    pub bytes: u64,
}

/// Result of a garbage collection: removed images, kept images, and the reasons.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GcReport {
    pub registry: String,
    /// Number of days that an image is kept after its kernel was last seen.
    pub keep_days: u32,
    /// Whether this run deletes.
    pub delete: bool,
    /// Images to remove.
    pub images: Vec<GcImage>,
    /// Referrers and signatures of missing images.
    pub leftovers: Vec<Leftover>,
    /// Kept images, with the reasons.
    pub kept: Vec<farrier_core::plan::KeptImage>,
    /// Size in bytes of the blobs that only the images to remove reference.
    pub bytes: u64,
    /// Stored inputs by kind.
    pub stored: Vec<StoredKind>,
    /// Reason why some or all images were not deleted.
    pub refused: Option<String>,
    /// Remedy for `refused` in the imperative.
    pub hint: Option<String>,
}

impl GcReport {
    /// Whether the deletion of an image failed or was refused.
    pub fn failed(&self) -> bool {
        let states = self.images.iter().map(|image| &image.state);
        let mut states = states.chain(self.leftovers.iter().map(|leftover| &leftover.state));
        self.refused.is_some()
            || states.any(|state| matches!(state, GcState::Failed { .. } | GcState::Untouched))
    }
}

/// Contents of the registry's repositories of driver images.
#[derive(Default)]
struct RegistryContents {
    images: Vec<RegistryImage>,
    /// Manifests whose tags name a subject (lists of referrers, cosign's signatures), by repository and subject.
    by_subject: BTreeMap<(Repository, Digest), BTreeSet<Digest>>,
    /// Keys of `by_subject` whose subject does not exist.
    leftovers: BTreeSet<(Repository, Digest)>,
}

impl RegistryContents {
    /// Whether the manifest is an image, or has a tag that does not name its subject.
    fn is_tagged(&self, repository: &Repository, digest: &Digest) -> bool {
        self.images.iter().any(|image| image.digest == *digest && image.repository == *repository)
    }

    /// Whether the manifest also has a tag that names another subject, and this subject exists. The deletion of a manifest
    /// removes all its tags.
    fn has_other_subject(&self, repository: &Repository, subject: &Digest, digest: &Digest) -> bool {
        self.by_subject.iter().any(|(key, manifests)| {
            key.0 == *repository
                && key.1 != *subject
                && !self.leftovers.contains(key)
                && manifests.contains(digest)
        })
    }
}

/// Images and kernels that are in use at one moment.
struct Uses {
    /// Members of [`Candidates`] that the cluster's objects and manifests mention.
    mentioned: BTreeSet<String>,
    live: LiveKernels,
    /// Kinds of objects that could not be read, with the reasons.
    unreadable: Option<String>,
}

/// Plans a garbage collection, and deletes if the options request it. After an interruption, the next run continues.
pub async fn gc(services: &BuildServices, cluster: &dyn Cluster, options: &GcOptions) -> Result<GcReport> {
    let now = Timestamp::now();
    let today = day(now);
    let contents = list_contents(services, options).await?;
    let candidates = Candidates::of(&contents.images);
    let mut record: KernelRecord = read_record(&services.images).await?;
    let plan_deletions = |uses: &Uses, record: &KernelRecord| {
        gc_plan(&GcInputs {
            images: &contents.images,
            mentioned: &uses.mentioned,
            live: &uses.live,
            record,
            keep_days: options.keep_days,
            today,
        })
    };
    let uses = read_uses(services, cluster, &candidates).await?;
    let mut report = report_of(&services.images, options, &contents, plan_deletions(&uses, &record)).await?;
    let stale = if report.images.is_empty() { None } else { stale_kernel_record(options, &record, today) };
    if let Some((refused, hint)) = clock_skew(&services.images, now).await?.or(stale) {
        (report.refused, report.hint) = (Some(refused), Some(hint));
        report.set_all_states(&GcState::Untouched);
        return Ok(report);
    }
    if !options.delete {
        return Ok(report);
    }
    if let Some(unreadable) = uses.unreadable {
        report.refused = Some(format!("the images used by the cluster are unknown: {unreadable}"));
        report.set_all_states(&GcState::Untouched);
        return Ok(report);
    }
    // For kernels that the record lacks, the days count from today.
    let kernels: BTreeSet<&String> = contents.images.iter().flat_map(|image| &image.kernels).collect();
    let complete_record = record.noticed(kernels, today);
    if complete_record != record {
        add_to_record(services, &complete_record).await?;
        record = complete_record;
    }
    // Plan again with current uses, because the lookups have taken time.
    let uses = read_uses(services, cluster, &candidates).await?;
    report.set_plan(plan_deletions(&uses, &record));
    delete_all(services, &contents, &mut report).await?;
    Ok(report)
}

/// Returns a refusal and its remedy if the clocks of this machine and of the registry differ by more than [`MAX_CLOCK_SKEW`].
async fn clock_skew(access: &ImageAccess, now: Timestamp) -> Result<Option<(String, String)>> {
    let registry_clock = access.registry.clock(&access.location.repository(RECORDS)?).await?;
    let is_skewed = |clock: &Timestamp| now.duration_since(*clock).abs() > MAX_CLOCK_SKEW;
    let Some(registry_clock) = registry_clock.filter(is_skewed) else { return Ok(None) };
    let refused = format!(
        "the clocks of this machine ({now:.0}) and of the registry ({registry_clock:.0}) differ by more than an hour"
    );
    Ok(Some((refused, "correct the wrong clock: the age of images is counted in days".to_owned())))
}

/// Returns a refusal and its remedy if no kernel in the record was seen for `keep_days`. With 0 days, garbage collection does not
/// use the record.
fn stale_kernel_record(options: &GcOptions, record: &KernelRecord, today: Date) -> Option<(String, String)> {
    if options.accept_stale_record || options.keep_days == 0 {
        return None;
    }
    let limit = today.saturating_sub(i64::from(options.keep_days).days());
    let newest = record.newest().filter(|seen| *seen <= limit)?;
    let refused = format!(
        "the record of kernels is stale: by this machine's clock it is {today}, and no kernel was seen after {newest}"
    );
    let hint = "check the clock, and that `farrier run`, which writes the record every day, uses this registry; \
                or continue with --accept-stale-record";
    Some((refused, hint.to_owned()))
}

async fn read_uses(services: &BuildServices, cluster: &dyn Cluster, candidates: &Candidates) -> Result<Uses> {
    let snapshot = cluster.snapshot().await?;
    let announced =
        Announcements::of(&services.definitions, &snapshot, tracked_kernels(services, &snapshot).await);
    let mut mentioned = cluster.mentions(candidates).await?;
    for spec in services.definitions.images.values().flat_map(|image| &image.spec.rollout) {
        match spec {
            RolloutSpec::File { path, .. } => {
                let directory = Directory::open(&services.definitions.root.join(path))?;
                mentioned.extend(directory.mentions(candidates).await?);
            }
            RolloutSpec::Git { location, .. } => {
                mentioned.extend(git::mentions(services, location, candidates).await?);
            }
            _ => {}
        }
    }
    let unreadable: Vec<String> = snapshot.all_unseen().map(|(kind, why)| format!("{kind}: {why}")).collect();
    Ok(Uses {
        mentioned,
        live: LiveKernels::of(&snapshot, &announced),
        unreadable: (!unreadable.is_empty()).then(|| unreadable.join("; ")),
    })
}

/// Lists the images in the repositories of the definitions and of `options.further`.
async fn list_contents(services: &BuildServices, options: &GcOptions) -> Result<RegistryContents> {
    let names: BTreeSet<&ImageName> = services.definitions.images.keys().chain(&options.further).collect();
    let mut contents = RegistryContents::default();
    for name in names {
        let repository = services.images.location.repository(name.as_str())?;
        let tags = services.images.registry.tags(&repository).await?;
        let outcomes: Vec<_> = stream::iter(tags)
            .map(|tag| tagged_manifest(&services.images, &repository, tag))
            .buffer_unordered(MAX_CONCURRENT_REQUESTS)
            .collect()
            .await;
        let mut images: BTreeMap<Digest, RegistryImage> = BTreeMap::new();
        for outcome in outcomes {
            // `None`: another client has deleted the tag.
            let Some(found) = outcome? else { continue };
            if let Some(subject) = subject_of_tag(&found.tag).filter(|subject| found.is_about(subject)) {
                let key = (repository.clone(), subject);
                contents.by_subject.entry(key).or_default().insert(found.image.digest);
            } else {
                let TaggedManifest { tag, image, .. } = found;
                images.entry(image.digest.clone()).or_insert(image).tags.insert(tag);
            }
        }
        let mut images: Vec<RegistryImage> = images.into_values().collect();
        add_members(&services.images, &repository, &mut images).await?;
        contents.images.extend(images);
    }
    contents.leftovers = find_leftovers(&services.images, &contents).await?;
    Ok(contents)
}

/// A tag, and the facts about its manifest.
struct TaggedManifest {
    tag: Tag,
    /// Without its tags.
    image: RegistryImage,
    /// Subject that the manifest itself names.
    subject: Option<Digest>,
    is_container_image: bool,
}

impl TaggedManifest {
    /// Reads a manifest. Keeps facts only, because the manifests of all tags may not fit into memory.
    fn new(repository: &Repository, tag: Tag, stored: StoredManifest) -> Self {
        let manifest = AnyManifest::parse(&stored.bytes);
        Self {
            tag,
            is_container_image: manifest.as_ref().is_ok_and(is_container_image),
            subject: match manifest {
                Ok(AnyManifest::Image(image)) => image.subject.map(|subject| subject.digest),
                Ok(AnyManifest::Index(_)) | Err(_) => None,
            },
            image: RegistryImage::new(repository.clone(), stored.digest, BTreeSet::new(), &stored.bytes),
        }
    }

    /// Whether the manifest belongs to the subject that its tag names. Anyone who may push can give an image in use, or a referrer of
    /// such an image, a tag that names another subject.
    fn is_about(&self, subject: &Digest) -> bool {
        self.image.digest == *subject
            || self.subject.as_ref().map_or(!self.is_container_image, |own| own == subject)
    }
}

/// Whether a manifest is a container image or an index of container images.
fn is_container_image(manifest: &AnyManifest) -> bool {
    match manifest {
        AnyManifest::Image(image) => {
            image.layers.iter().any(|layer| media_type::oci_layer(&layer.media_type).is_some())
        }
        AnyManifest::Index(index) => index.manifests.iter().any(|entry| entry.platform.is_some()),
    }
}

/// Adds the untagged images that indexes reference.
async fn add_members(
    access: &ImageAccess,
    repository: &Repository,
    images: &mut Vec<RegistryImage>,
) -> Result<()> {
    let known: BTreeSet<Digest> = images.iter().map(|image| image.digest.clone()).collect();
    let members = images.iter().filter(|image| image.is_index()).flat_map(|index| &index.members);
    let untagged: BTreeSet<Digest> = members.filter(|member| !known.contains(*member)).cloned().collect();
    for digest in untagged {
        let found = access.registry.manifest(repository, &Version::Digest(digest)).await?;
        images.extend(found.map(|stored| {
            RegistryImage::new(repository.clone(), stored.digest, BTreeSet::new(), &stored.bytes)
        }));
    }
    let (mut indexes, mut single): (Vec<_>, Vec<_>) = images.drain(..).partition(RegistryImage::is_index);
    for index in &mut indexes {
        index.add_kernels_of(&single);
    }
    images.append(&mut indexes);
    images.append(&mut single);
    Ok(())
}

async fn tagged_manifest(
    access: &ImageAccess,
    repository: &Repository,
    tag: Tag,
) -> Result<Option<TaggedManifest>> {
    let version = Version::Tag(tag.clone());
    let stored = access.registry.manifest(repository, &version).await?;
    Ok(stored.map(|stored| TaggedManifest::new(repository, tag, stored)))
}

/// Finds referrers and signatures whose image does not exist. Looks up the manifests of untagged images, because an image is
/// published before its tags.
async fn find_leftovers(
    access: &ImageAccess,
    contents: &RegistryContents,
) -> Result<BTreeSet<(Repository, Digest)>> {
    let mut leftovers = BTreeSet::new();
    for (repository, subject) in contents.by_subject.keys() {
        if contents.is_tagged(repository, subject) {
            continue;
        }
        let version = Version::Digest(subject.clone());
        let found = access.registry.manifest(repository, &version).await?;
        if found.is_none() {
            leftovers.insert((repository.clone(), subject.clone()));
        }
    }
    Ok(leftovers)
}

async fn report_of(
    access: &ImageAccess,
    options: &GcOptions,
    contents: &RegistryContents,
    plan: GcPlan,
) -> Result<GcReport> {
    let mut stored = Vec::new();
    for kind in InputKind::ALL {
        stored.extend(count_stored(access, kind).await?);
    }
    let leftover = |(repository, subject): &(Repository, Digest)| Leftover {
        repository: repository.clone(),
        subject: subject.clone(),
        state: GcState::WouldDelete,
    };
    let mut report = GcReport {
        registry: access.location.to_string(),
        keep_days: options.keep_days,
        delete: options.delete,
        leftovers: contents.leftovers.iter().map(leftover).collect(),
        stored,
        ..GcReport::default()
    };
    report.set_plan(plan);
    Ok(report)
}

/// Counts the stored inputs of one kind. Returns `None` if there are none.
async fn count_stored(access: &ImageAccess, kind: InputKind) -> Result<Option<StoredKind>> {
    let repository = access.location.repository(kind.repository())?;
    let tags = access.registry.tags(&repository).await?;
    let mut layers: BTreeMap<Digest, u64> = BTreeMap::new();
    let mut artifacts = 0;
    for tag in tags.into_iter().filter(|tag| !is_referrer_or_signature(tag)) {
        let Some(stored) = access.registry.manifest(&repository, &Version::Tag(tag)).await? else { continue };
        let Ok(manifest) = ImageManifest::parse(&stored.bytes) else { continue };
        artifacts += 1;
        layers.extend(manifest.layers.into_iter().map(|layer| (layer.digest, layer.size)));
    }
    let bytes = layers.values().fold(0, |sum: u64, size| sum.saturating_add(*size));
    Ok((artifacts > 0).then_some(StoredKind { kind: kind.repository(), artifacts, bytes }))
}

/// Deletes all images and leftovers in the report, one after the other. Stops on an error that would affect every deletion.
async fn delete_all(
    services: &BuildServices,
    contents: &RegistryContents,
    report: &mut GcReport,
) -> Result<()> {
    let mut stopped = None;
    let leftovers = report
        .leftovers
        .iter_mut()
        .map(|Leftover { repository, subject, state }| (&*repository, &*subject, Deletion::Leftovers, state));
    let images = report
        .images
        .iter_mut()
        .map(|GcImage { pruned, state }| (&pruned.repository, &pruned.digest, Deletion::Image, state));
    for (repository, digest, deletion, state) in leftovers.chain(images) {
        *state = match stopped {
            Some(_) => GcState::Untouched,
            None => match delete(services, contents, repository, digest, deletion).await {
                Ok(false) => continue,
                outcome => deletion_state(outcome.map(drop), &mut stopped),
            },
        };
    }
    // If an image has reappeared, its referrers are no longer leftovers.
    report.leftovers.retain(|leftover| leftover.state != GcState::WouldDelete);
    match stopped {
        Some(BuildError::Canceled) => Err(BuildError::Canceled),
        Some(error) => {
            report.refused = Some(error_chain(&error));
            report.hint = error.hint();
            Ok(())
        }
        None => Ok(()),
    }
}

/// Content that [`delete`] removes.
#[derive(Clone, Copy)]
enum Deletion {
    /// An image, its referrers and its signatures.
    Image,
    /// The referrers and signatures of a missing image.
    Leftovers,
}

/// Deletes an image or its leftovers. Deletes the image first, so that an existing image always has its referrers and
/// signatures.
///
/// Returns `false`, and deletes nothing, if a missing image has reappeared because another client is publishing it.
async fn delete(
    services: &BuildServices,
    contents: &RegistryContents,
    repository: &Repository,
    digest: &Digest,
    deletion: Deletion,
) -> Result<bool> {
    let referrers = services.images.registry.referrers(repository, digest, None).await?;
    match deletion {
        Deletion::Image => delete_manifest(services, repository, digest).await?,
        Deletion::Leftovers => {
            let version = Version::Digest(digest.clone());
            if services.images.registry.manifest(repository, &version).await?.is_some() {
                return Ok(false);
            }
        }
    }
    // An output of the image has separate signatures.
    for referrer in &referrers {
        if HostOutput::has_type(referrer.artifact_type.as_deref())
            && !contents.is_tagged(repository, &referrer.digest)
        {
            Box::pin(delete(services, contents, repository, &referrer.digest, Deletion::Image)).await?;
        }
    }
    // Delete the list of referrers last, because an interrupted run finds the remaining referrers in it.
    let lists = contents.by_subject.get(&(repository.clone(), digest.clone()));
    let mut manifests: Vec<Digest> = referrers.into_iter().map(|descriptor| descriptor.digest).collect();
    manifests.retain(|digest| lists.is_none_or(|lists| !lists.contains(digest)));
    manifests.extend(lists.into_iter().flatten().cloned());
    for manifest in manifests {
        // A referrer with a separate tag is kept.
        if !contents.is_tagged(repository, &manifest)
            && !contents.has_other_subject(repository, digest, &manifest)
        {
            delete_manifest(services, repository, &manifest).await?;
        }
    }
    Ok(true)
}

/// Deletes a manifest, if it exists.
async fn delete_manifest(services: &BuildServices, repository: &Repository, digest: &Digest) -> Result<()> {
    services.process.ensure_may_write()?;
    services.images.registry.delete_manifest(repository, digest).await?;
    Ok(())
}

impl GcReport {
    /// Sets the planned deletions and the kept images.
    fn set_plan(&mut self, plan: GcPlan) {
        let GcPlan { going, kept, bytes } = plan;
        self.images =
            going.into_iter().map(|pruned| GcImage { pruned, state: GcState::WouldDelete }).collect();
        (self.kept, self.bytes) = (kept, bytes);
    }

    fn set_all_states(&mut self, state: &GcState) {
        self.images.iter_mut().for_each(|image| image.state = state.clone());
        self.leftovers.iter_mut().for_each(|leftover| leftover.state = state.clone());
    }
}

/// Returns the state after one deletion. Sets `stopped` after an error that would affect every deletion, for example if the
/// registry does not allow deletion at all.
fn deletion_state(outcome: Result<()>, stopped: &mut Option<BuildError>) -> GcState {
    let Err(error) = outcome else { return GcState::Deleted };
    let state = GcState::Failed { error: error_chain(&error) };
    let affects_all = matches!(
        error,
        BuildError::Canceled
            | BuildError::Fenced(_)
            | BuildError::Registry(RegistryError::NoDeletion { .. } | RegistryError::Denied { .. })
    );
    if affects_all {
        *stopped = Some(error);
    }
    state
}

#[cfg(test)]
#[path = "gc_tests.rs"]
mod tests;
