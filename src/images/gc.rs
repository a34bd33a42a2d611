//! Adapter: removes published images for kernels that are gone, with what is stored beside them.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, stream};
use jiff::Timestamp;
use serde::Serialize;

use super::record::{add_to_record, day, read_record};
use crate::{
    cluster::{Cluster, Directory},
    error_chain, git,
    image::{Digest, ImageName, Repository, RolloutSpec, Tag, Version},
    oci::{ImageManifest, subject_of_tag},
    parts::{AT_ONCE, Parts, Result, TargetError},
    plan::{
        Announcements, Candidates, GcInputs, GcPlan, GoingImage, HeldImage, KernelRecord, LiveKernels,
        gc_plan,
    },
    registry::RegistryError,
    resolve::tracked,
    store::{InputKind, is_about_another},
};

/// What is asked for.
#[derive(Clone, Debug)]
pub struct GcOptions {
    /// An image goes when its kernel was not seen for so many days.
    pub keep_days: u32,
    /// Images beside those of the definitions: whose definitions are gone.
    pub further: Vec<ImageName>,
    /// Delete; otherwise nothing is touched.
    pub delete: bool,
}

/// What became of an image that goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum GcState {
    /// It would be deleted; this run only reports.
    WouldGo,
    /// It is gone, with what was stored beside it.
    Deleted,
    /// It is not, or something beside it is not.
    Failed {
        /// Why.
        error: String,
    },
    /// It was not tried.
    Untouched,
}

/// An image that goes, and what became of it.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GcImage {
    /// Which.
    #[serde(flatten)]
    pub going: GoingImage,
    /// What became of it.
    #[serde(flatten)]
    pub state: GcState,
}

/// What was stored beside an image that is gone: an earlier run was interrupted, or the image was deleted by other means.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Leftover {
    /// Where.
    pub repository: Repository,
    /// The image that is gone.
    pub subject: Digest,
    /// What became of it.
    #[serde(flatten)]
    pub state: GcState,
}

/// What the store keeps, which is left alone.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredKind {
    /// The repository below the registry's prefix.
    pub kind: &'static str,
    /// How many.
    pub artifacts: usize,
    /// Bytes of their layers.
    pub bytes: u64,
}

/// What goes or went, what stays, and why.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GcReport {
    /// The registry.
    pub registry: String,
    /// Days that an image outlives its kernel.
    pub keep_days: u32,
    /// Was anything to be deleted?
    pub delete: bool,
    /// What goes.
    pub images: Vec<GcImage>,
    /// What is left of images that are gone.
    pub leftovers: Vec<Leftover>,
    /// What stays.
    pub kept: Vec<crate::plan::KeptImage>,
    /// Bytes that only images which go name.
    pub bytes: u64,
    /// What the store keeps.
    pub stored: Vec<StoredKind>,
    /// Why nothing is deleted, though it was asked for.
    pub refused: Option<String>,
    /// What to do about it.
    pub hint: Option<String>,
}

impl GcReport {
    /// Was something to be deleted that was not?
    pub fn failed(&self) -> bool {
        let states = self.images.iter().map(|image| &image.state);
        let mut states = states.chain(self.leftovers.iter().map(|leftover| &leftover.state));
        self.refused.is_some()
            || states.any(|state| matches!(state, GcState::Failed { .. } | GcState::Untouched))
    }
}

/// What the registry holds of images.
#[derive(Default)]
struct Holdings {
    images: Vec<HeldImage>,
    /// Manifests under tags that say what they are about (referrers, cosign's signatures), by repository and subject.
    about: BTreeMap<(Repository, Digest), BTreeSet<Digest>>,
    /// Those of them whose subject is gone.
    leftovers: BTreeSet<(Repository, Digest)>,
}

impl Holdings {
    /// Is there a tag that people gave to this manifest?
    fn is_tagged(&self, repository: &Repository, digest: &Digest) -> bool {
        self.images.iter().any(|image| image.digest == *digest && image.repository == *repository)
    }
}

/// What the cluster says at one moment.
struct Uses {
    mentioned: BTreeSet<String>,
    live: LiveKernels,
    /// What could not be seen, with what to do.
    unseen: Option<String>,
}

/// Says what may go, and deletes it where that is asked for. Interrupted, it goes on when it is run again.
pub async fn gc(parts: &Parts, cluster: &dyn Cluster, options: &GcOptions) -> Result<GcReport> {
    let today = day(Timestamp::now());
    let holdings = list_holdings(parts, options).await?;
    let candidates = Candidates::of(&holdings.images);
    let mut record: KernelRecord = read_record(parts).await?;
    let decide = |uses: &Uses, record: &KernelRecord| {
        gc_plan(&GcInputs {
            images: &holdings.images,
            mentioned: &uses.mentioned,
            live: &uses.live,
            record,
            keep_days: options.keep_days,
            today,
        })
    };
    let uses = look_at_uses(parts, cluster, &candidates).await?;
    let mut report = report_of(parts, options, &holdings, decide(&uses, &record)).await?;
    if !options.delete {
        return Ok(report);
    }
    if let Some(unseen) = uses.unseen {
        report.refused = Some(format!("what the cluster uses is not known: {unseen}"));
        report.all(&GcState::Untouched);
        return Ok(report);
    }
    // From today on these are counted, too.
    let kernels: BTreeSet<&String> = holdings.images.iter().flat_map(|image| &image.kernels).collect();
    let noticed = record.noticed(kernels, today);
    if noticed != record {
        add_to_record(parts, &noticed).await?;
        record = noticed;
    }
    // It took its time to look at all that; what is used by now is not deleted.
    let uses = look_at_uses(parts, cluster, &candidates).await?;
    report.take(decide(&uses, &record));
    delete_all(parts, &holdings, &mut report).await?;
    Ok(report)
}

async fn look_at_uses(parts: &Parts, cluster: &dyn Cluster, candidates: &Candidates) -> Result<Uses> {
    let snapshot = cluster.snapshot().await?;
    let announced = Announcements::of(&parts.definitions, &snapshot, tracked(parts, &snapshot).await);
    let mut mentioned = cluster.mentions(candidates).await?;
    for spec in parts.definitions.images.values().flat_map(|image| &image.spec.rollout) {
        match spec {
            RolloutSpec::File { path, .. } => {
                let directory = Directory::open(&parts.definitions.root.join(path))?;
                mentioned.extend(directory.mentions(candidates).await?);
            }
            RolloutSpec::Git { place, .. } => {
                mentioned.extend(git::mentions(parts, place, candidates).await?);
            }
            _ => {}
        }
    }
    let unseen: Vec<String> = snapshot.all_unseen().map(|(what, why)| format!("{what}: {why}")).collect();
    Ok(Uses {
        mentioned,
        live: LiveKernels::of(&snapshot, &announced),
        unseen: (!unseen.is_empty()).then(|| unseen.join("; ")),
    })
}

/// Every image of the definitions' repositories.
async fn list_holdings(parts: &Parts, options: &GcOptions) -> Result<Holdings> {
    let names: BTreeSet<&ImageName> = parts.definitions.images.keys().chain(&options.further).collect();
    let mut holdings = Holdings::default();
    for name in names {
        let repository = parts.location.repository(name.as_str())?;
        let tags = parts.registry.tags(&repository).await?;
        let found: Vec<_> = stream::iter(tags)
            .map(|tag| manifest_of(parts, &repository, tag))
            .buffer_unordered(AT_ONCE)
            .collect()
            .await;
        let mut images: BTreeMap<Digest, (BTreeSet<Tag>, Vec<u8>)> = BTreeMap::new();
        for found in found {
            // A tag that is gone by now was deleted by another.
            let Some((tag, digest, bytes)) = found? else { continue };
            match subject_of_tag(&tag) {
                Some(subject) => {
                    let place = (repository.clone(), subject);
                    holdings.about.entry(place).or_default().insert(digest);
                }
                None => {
                    images.entry(digest).or_insert((BTreeSet::new(), bytes)).0.insert(tag);
                }
            }
        }
        let mut images: Vec<HeldImage> = images
            .into_iter()
            .map(|(digest, (tags, bytes))| HeldImage::new(repository.clone(), digest, tags, &bytes))
            .collect();
        add_entries(parts, &repository, &mut images).await?;
        holdings.images.extend(images);
    }
    holdings.leftovers = find_leftovers(parts, &holdings).await?;
    Ok(holdings)
}

/// Adds the images that indexes lead to, which have no tag of their own.
async fn add_entries(parts: &Parts, repository: &Repository, images: &mut Vec<HeldImage>) -> Result<()> {
    let known: BTreeSet<Digest> = images.iter().map(|image| image.digest.clone()).collect();
    let members = images.iter().filter(|image| image.is_index()).flat_map(|index| &index.members);
    let wanted: BTreeSet<Digest> = members.filter(|member| !known.contains(*member)).cloned().collect();
    for digest in wanted {
        let found = parts.registry.manifest(repository, &Version::Digest(digest)).await?;
        images.extend(
            found.map(|stored| {
                HeldImage::new(repository.clone(), stored.digest, BTreeSet::new(), &stored.bytes)
            }),
        );
    }
    let (mut indexes, mut single): (Vec<_>, Vec<_>) = images.drain(..).partition(HeldImage::is_index);
    for index in &mut indexes {
        index.lead_to(&single);
    }
    images.append(&mut indexes);
    images.append(&mut single);
    Ok(())
}

async fn manifest_of(
    parts: &Parts,
    repository: &Repository,
    tag: Tag,
) -> Result<Option<(Tag, Digest, Vec<u8>)>> {
    let version = Version::Tag(tag.clone());
    let stored = parts.registry.manifest(repository, &version).await?;
    Ok(stored.map(|stored| (tag, stored.digest, stored.bytes)))
}

/// What is about images that are not there. An image without a tag is: it is published before its tags.
async fn find_leftovers(parts: &Parts, holdings: &Holdings) -> Result<BTreeSet<(Repository, Digest)>> {
    let mut leftovers = BTreeSet::new();
    for (repository, subject) in holdings.about.keys() {
        if holdings.is_tagged(repository, subject) {
            continue;
        }
        let version = Version::Digest(subject.clone());
        let found = parts.registry.manifest(repository, &version).await?;
        if found.is_none() {
            leftovers.insert((repository.clone(), subject.clone()));
        }
    }
    Ok(leftovers)
}

async fn report_of(
    parts: &Parts,
    options: &GcOptions,
    holdings: &Holdings,
    plan: GcPlan,
) -> Result<GcReport> {
    let mut stored = Vec::new();
    for kind in InputKind::ALL {
        stored.extend(count_stored(parts, kind).await?);
    }
    let leftover = |(repository, subject): &(Repository, Digest)| Leftover {
        repository: repository.clone(),
        subject: subject.clone(),
        state: GcState::WouldGo,
    };
    let mut report = GcReport {
        registry: parts.location.to_string(),
        keep_days: options.keep_days,
        delete: options.delete,
        images: Vec::new(),
        leftovers: holdings.leftovers.iter().map(leftover).collect(),
        kept: Vec::new(),
        bytes: 0,
        stored,
        refused: None,
        hint: None,
    };
    report.take(plan);
    Ok(report)
}

/// How much of one kind the store keeps; `None` where it has none.
async fn count_stored(parts: &Parts, kind: InputKind) -> Result<Option<StoredKind>> {
    let repository = parts.location.repository(kind.repository())?;
    let tags = parts.registry.tags(&repository).await?;
    let mut layers: BTreeMap<Digest, u64> = BTreeMap::new();
    let mut artifacts = 0;
    for tag in tags.into_iter().filter(|tag| !is_about_another(tag)) {
        let Some((_, _, bytes)) = manifest_of(parts, &repository, tag).await? else { continue };
        let Ok(manifest) = ImageManifest::parse(&bytes) else { continue };
        artifacts += 1;
        layers.extend(manifest.layers.into_iter().map(|layer| (layer.digest, layer.size)));
    }
    let bytes = layers.values().fold(0, |sum: u64, size| sum.saturating_add(*size));
    Ok((artifacts > 0).then_some(StoredKind { kind: kind.repository(), artifacts, bytes }))
}

/// Deletes what the report says would go, one after the other, and stops where the registry allows nothing.
async fn delete_all(parts: &Parts, holdings: &Holdings, report: &mut GcReport) -> Result<()> {
    let mut stopped = None;
    let leftovers = report
        .leftovers
        .iter_mut()
        .map(|Leftover { repository, subject, state }| (&*repository, &*subject, false, state));
    let images = report
        .images
        .iter_mut()
        .map(|GcImage { going, state }| (&going.repository, &going.digest, true, state));
    for (repository, digest, is_image, state) in leftovers.chain(images) {
        *state = match stopped {
            Some(_) => GcState::Untouched,
            None => match delete(parts, holdings, repository, digest, is_image).await {
                Ok(false) => continue,
                outcome => state_of(outcome.map(drop), &mut stopped),
            },
        };
    }
    // An image that came meanwhile has left nothing.
    report.leftovers.retain(|leftover| leftover.state != GcState::WouldGo);
    match stopped {
        Some(TargetError::Cancelled) => Err(TargetError::Cancelled),
        Some(error) => {
            report.refused = Some(error_chain(&error));
            report.hint = error.hint();
            Ok(())
        }
        None => Ok(()),
    }
}

/// Deletes an image (first: while it is there, so is what proves it) and what is stored beside it; of an image that is
/// gone already, only the latter. `false` where that image is there by now: another publishes it, and all of it stays.
async fn delete(
    parts: &Parts,
    holdings: &Holdings,
    repository: &Repository,
    digest: &Digest,
    is_image: bool,
) -> Result<bool> {
    let referrers = parts.registry.referrers(repository, digest, None).await?;
    if is_image {
        delete_one(parts, repository, digest).await?;
    } else if parts.registry.manifest(repository, &Version::Digest(digest.clone())).await?.is_some() {
        return Ok(false);
    }
    // The list of referrers last: it says what is left to be deleted.
    let lists = holdings.about.get(&(repository.clone(), digest.clone()));
    let mut manifests: Vec<Digest> = referrers.into_iter().map(|descriptor| descriptor.digest).collect();
    manifests.retain(|digest| lists.is_none_or(|lists| !lists.contains(digest)));
    manifests.extend(lists.into_iter().flatten().cloned());
    for digest in manifests {
        // A tag of its own keeps it.
        if !holdings.is_tagged(repository, &digest) {
            delete_one(parts, repository, &digest).await?;
        }
    }
    Ok(true)
}

/// What is not there (any more) is as good as deleted.
async fn delete_one(parts: &Parts, repository: &Repository, digest: &Digest) -> Result<()> {
    parts.may_write()?;
    parts.registry.delete_manifest(repository, digest).await?;
    Ok(())
}

impl GcReport {
    /// What goes and stays is this.
    fn take(&mut self, plan: GcPlan) {
        let GcPlan { going, kept, bytes } = plan;
        self.images = going.into_iter().map(|going| GcImage { going, state: GcState::WouldGo }).collect();
        (self.kept, self.bytes) = (kept, bytes);
    }

    fn all(&mut self, state: &GcState) {
        self.images.iter_mut().for_each(|image| image.state = state.clone());
        self.leftovers.iter_mut().for_each(|leftover| leftover.state = state.clone());
    }
}

/// A registry that deletes nothing, or nothing for this user, does not do so for the next image either.
fn state_of(outcome: Result<()>, stopped: &mut Option<TargetError>) -> GcState {
    let Err(error) = outcome else { return GcState::Deleted };
    let state = GcState::Failed { error: error_chain(&error) };
    let for_all = matches!(
        error,
        TargetError::Cancelled
            | TargetError::Fenced(_)
            | TargetError::Registry(RegistryError::NoDeletion { .. } | RegistryError::Denied { .. })
    );
    if for_all {
        *stopped = Some(error);
    }
    state
}

#[cfg(test)]
#[path = "gc_tests.rs"]
mod tests;
