//! Adapter: removes published images for kernels that are gone, with what is stored beside them.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, stream};
use jiff::Timestamp;
use serde::Serialize;

use super::{Controller, TargetError, kernel_record::day, observe::AT_ONCE};
use crate::{
    cluster::{Cluster, ClusterError, Directory},
    fault::chain,
    image::{Digest, ImageName, Repository, RolloutSpec, Tag, Version},
    oci::{ImageManifest, subject_of_tag},
    plan::{
        Announcements, Candidates, GcInputs, GcPlan, GoingImage, HeldImage, KernelRecord, LiveKernels,
        gc_plan,
    },
    registry::RegistryError,
    store::Kind,
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

/// Why it cannot be said what may go.
#[derive(Debug, thiserror::Error)]
pub enum GcError {
    /// What is in use is not known.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// What the registry holds is not known.
    #[error(transparent)]
    Target(#[from] TargetError),
}

/// What became of an image that goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state")]
pub enum GcState {
    /// Nothing was asked for but to say so.
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

/// What was stored beside an image that is gone: an earlier run was interrupted, or somebody else deleted the image.
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    /// What to do about it.
    #[serde(skip_serializing_if = "Option::is_none")]
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

impl Controller {
    /// Says what may go, and deletes it where that is asked for. Interrupted, it goes on when it is run again.
    pub async fn gc(&self, cluster: &dyn Cluster, options: &GcOptions) -> Result<GcReport, GcError> {
        let today = day(Timestamp::now());
        let holdings = self.holdings(options).await?;
        let candidates = Candidates::of(&holdings.images);
        let mut record = self.kernel_record().await?;
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
        let uses = self.uses(cluster, &candidates).await?;
        let mut report = self.report(options, &holdings, decide(&uses, &record)).await?;
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
            self.add_to_kernel_record(&noticed).await?;
            record = noticed;
        }
        // It took its time to look at all that; what is used by now is not deleted.
        let uses = self.uses(cluster, &candidates).await?;
        report.take(decide(&uses, &record));
        self.delete_all(&holdings, &mut report).await?;
        Ok(report)
    }

    async fn uses(&self, cluster: &dyn Cluster, candidates: &Candidates) -> Result<Uses, GcError> {
        let snapshot = cluster.snapshot().await?;
        let announced = Announcements::of(&self.definitions, &snapshot, self.tracked(&snapshot).await);
        let mut mentioned = cluster.mentions(candidates).await?;
        for spec in self.definitions.images.values().flat_map(|image| &image.spec.rollout) {
            if let RolloutSpec::File { path, .. } = spec {
                let directory = Directory::open(&self.definitions.root.join(path))?;
                mentioned.extend(directory.mentions(candidates).await?);
            }
        }
        let unseen: Vec<String> =
            snapshot.unseen.iter().map(|(what, why)| format!("{what}: {why}")).collect();
        Ok(Uses {
            mentioned,
            live: LiveKernels::of(&snapshot, &announced),
            unseen: (!unseen.is_empty()).then(|| unseen.join("; ")),
        })
    }

    /// Every image of the definitions' repositories.
    async fn holdings(&self, options: &GcOptions) -> Result<Holdings, TargetError> {
        let names: BTreeSet<&ImageName> = self.definitions.images.keys().chain(&options.further).collect();
        let mut holdings = Holdings::default();
        for name in names {
            let repository = self.location.repository(name.as_str())?;
            let tags = self.registry.tags(&repository).await?;
            let found: Vec<_> = stream::iter(tags)
                .map(|tag| self.manifest_of(&repository, tag))
                .buffer_unordered(AT_ONCE)
                .collect()
                .await;
            let mut images: BTreeMap<Digest, (BTreeSet<Tag>, Vec<u8>)> = BTreeMap::new();
            for found in found {
                // A tag that is gone by now was somebody else's to delete.
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
            holdings.images.extend(
                images
                    .into_iter()
                    .map(|(digest, (tags, bytes))| HeldImage::new(repository.clone(), digest, tags, &bytes)),
            );
        }
        holdings.leftovers = self.leftovers(&holdings).await?;
        Ok(holdings)
    }

    async fn manifest_of(
        &self,
        repository: &Repository,
        tag: Tag,
    ) -> Result<Option<(Tag, Digest, Vec<u8>)>, TargetError> {
        let version = Version::Tag(tag.clone());
        let stored = self.registry.manifest(repository, &version).await?;
        Ok(stored.map(|stored| (tag, stored.digest, stored.bytes)))
    }

    /// What is about images that are not there. An image without a tag is: it is published before its tags.
    async fn leftovers(&self, holdings: &Holdings) -> Result<BTreeSet<(Repository, Digest)>, TargetError> {
        let mut leftovers = BTreeSet::new();
        for (repository, subject) in holdings.about.keys() {
            if holdings.is_tagged(repository, subject) {
                continue;
            }
            let version = Version::Digest(subject.clone());
            let found = self.registry.manifest(repository, &version).await?;
            if found.is_none() {
                leftovers.insert((repository.clone(), subject.clone()));
            }
        }
        Ok(leftovers)
    }

    async fn report(
        &self,
        options: &GcOptions,
        holdings: &Holdings,
        plan: GcPlan,
    ) -> Result<GcReport, TargetError> {
        let mut stored = Vec::new();
        for kind in Kind::ALL {
            stored.extend(self.stored(kind).await?);
        }
        let leftover = |(repository, subject): &(Repository, Digest)| Leftover {
            repository: repository.clone(),
            subject: subject.clone(),
            state: GcState::WouldGo,
        };
        let mut report = GcReport {
            registry: self.location.to_string(),
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
    async fn stored(&self, kind: Kind) -> Result<Option<StoredKind>, TargetError> {
        let repository = self.location.repository(kind.repository())?;
        let tags = self.registry.tags(&repository).await?;
        let mut layers: BTreeMap<Digest, u64> = BTreeMap::new();
        let mut artifacts = 0;
        for tag in tags {
            let Some((_, _, bytes)) = self.manifest_of(&repository, tag).await? else { continue };
            let Ok(manifest) = ImageManifest::parse(&bytes) else { continue };
            artifacts += 1;
            layers.extend(manifest.layers.into_iter().map(|layer| (layer.digest, layer.size)));
        }
        let bytes = layers.values().fold(0, |sum: u64, size| sum.saturating_add(*size));
        Ok((artifacts > 0).then_some(StoredKind { kind: kind.repository(), artifacts, bytes }))
    }

    /// Deletes what the report says would go, one after the other, and stops where the registry allows nothing.
    async fn delete_all(&self, holdings: &Holdings, report: &mut GcReport) -> Result<(), TargetError> {
        let mut stopped = None;
        for leftover in &mut report.leftovers {
            leftover.state = if stopped.is_some() {
                GcState::Untouched
            } else {
                let outcome = self.delete_about(holdings, &leftover.repository, &leftover.subject).await;
                state_of(outcome, &mut stopped)
            };
        }
        for image in &mut report.images {
            image.state = match stopped {
                Some(_) => GcState::Untouched,
                None => state_of(self.delete_image(holdings, &image.going).await, &mut stopped),
            };
        }
        match stopped {
            Some(TargetError::Cancelled) => Err(TargetError::Cancelled),
            Some(error) => {
                report.refused = Some(chain(&error));
                report.hint = error.hint();
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// The image first: while it is there, so is what proves it.
    async fn delete_image(&self, holdings: &Holdings, going: &GoingImage) -> Result<(), TargetError> {
        let GoingImage { repository, digest, .. } = going;
        let referrers = self.referrers_of(repository, digest).await?;
        self.delete_one(repository, digest).await?;
        self.delete_those_about(holdings, repository, digest, referrers).await
    }

    /// What is stored beside an image that is gone already.
    async fn delete_about(
        &self,
        holdings: &Holdings,
        repository: &Repository,
        subject: &Digest,
    ) -> Result<(), TargetError> {
        let referrers = self.referrers_of(repository, subject).await?;
        self.delete_those_about(holdings, repository, subject, referrers).await
    }

    async fn delete_those_about(
        &self,
        holdings: &Holdings,
        repository: &Repository,
        subject: &Digest,
        mut manifests: Vec<Digest>,
    ) -> Result<(), TargetError> {
        // The list of referrers last: it says what is left to be deleted.
        let lists = holdings.about.get(&(repository.clone(), subject.clone()));
        manifests.retain(|digest| lists.is_none_or(|lists| !lists.contains(digest)));
        manifests.extend(lists.into_iter().flatten().cloned());
        for digest in manifests {
            // Somebody gave it a name of its own.
            if !holdings.is_tagged(repository, &digest) {
                self.delete_one(repository, &digest).await?;
            }
        }
        Ok(())
    }

    async fn referrers_of(
        &self,
        repository: &Repository,
        subject: &Digest,
    ) -> Result<Vec<Digest>, TargetError> {
        let listed = self.registry.referrers(repository, subject, None).await?;
        Ok(listed.into_iter().map(|descriptor| descriptor.digest).collect())
    }

    /// What is not there (any more) is as good as deleted.
    async fn delete_one(&self, repository: &Repository, digest: &Digest) -> Result<(), TargetError> {
        self.may_write()?;
        self.registry.delete_manifest(repository, digest).await?;
        Ok(())
    }
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
fn state_of(outcome: Result<(), TargetError>, stopped: &mut Option<TargetError>) -> GcState {
    let Err(error) = outcome else { return GcState::Deleted };
    let state = GcState::Failed { error: chain(&error) };
    let for_all = matches!(
        error,
        TargetError::Cancelled
            | TargetError::Fenced { .. }
            | TargetError::Registry(RegistryError::NoDeletion { .. } | RegistryError::Denied { .. })
    );
    if for_all {
        *stopped = Some(error);
    }
    state
}
