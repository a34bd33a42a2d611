//! The lookups that are kept from one reconcile to the next, so that a change in the cluster repeats no recent lookup.
//!
//! This file decides when a lookup is repeated:
//!
//! | lookup | repeated |
//! |---|---|
//! | Git repository, also after an error | after [`REPOSITORY_READ_INTERVAL`], or after farrier's own commit |
//! | absent or rejected prebuilt image | after [`PREBUILT_LOOKUP_INTERVAL`], even after a resync |
//! | other failed or refused lookup; build failures | for each plan ([`LookupCache::begin_plan`]) |
//! | contents of an image in use | for each plan, if a tag names the image |
//! | headers of a target | when the system that its nodes report changes ([`LookupCache::begin_plan`]) |
//! | references and headers of a cell | after the cell's build ([`LookupCache::forget_build`]); other resolved inputs, too, if the build was outdated |
//! | references that got an image or a tag | after the push ([`LookupCache::forget`]) |
//! | everything else | after a resync ([`LookupCache::reset`]) |
//!
//! The loop also starts with an empty cache after a change of the definitions or the leadership.

use std::{collections::BTreeMap, time::Duration};

use farrier_builder::services::Result;
use farrier_core::{
    image::{GitLocation, ImageReference},
    kernel::{KernelTarget, NodeSystem},
    plan::{Cell, HeaderState, ManifestFacts, Observed, Resolved, SignatureState, TreeKey, Unverified},
};
use tokio::time::Instant;

/// Results of lookups, kept across reconciles.
#[derive(Clone, Debug, Default)]
pub struct LookupCache {
    pub(super) resolved: Resolved,
    pub(super) observed: Observed,
    /// Whether the registry was unreachable.
    pub(super) unreachable: bool,
    /// Contents of Git repositories, with the time of each lookup.
    repositories: BTreeMap<GitLocation, (Instant, Result<ManifestFacts, String>)>,
    /// Prebuilt images that are absent or were rejected, with the time of the lookup.
    refused_sources: BTreeMap<TreeKey, Instant>,
    /// Whether the registry refuses anonymous pulls, if already asked.
    pub(super) refuses_anonymous: Option<bool>,
}

/// Interval between reads of a Git repository. A repository does not notify farrier of changes.
const REPOSITORY_READ_INTERVAL: Duration = Duration::from_secs(30);

/// Interval between lookups of a prebuilt image that is absent or was rejected. Its registry belongs to a third party
/// and may limit the request rate.
const PREBUILT_LOOKUP_INTERVAL: Duration = Duration::from_mins(5);

impl LookupCache {
    /// Drops all cached lookups for a resync. Keeps recent negative results for prebuilt images.
    pub(super) fn reset(&mut self) {
        let Self { resolved: Resolved { mut kernel_sources, .. }, refused_sources, .. } =
            std::mem::take(self);
        kernel_sources.retain(|key, _| refused_sources.contains_key(key));
        self.resolved.kernel_sources = kernel_sources;
        self.refused_sources = refused_sources;
    }

    /// Records prebuilt images that are absent or were rejected.
    pub(super) fn record_refused(&mut self, sources: Vec<TreeKey>) {
        self.refused_sources.extend(sources.into_iter().map(|source| (source, Instant::now())));
    }

    /// Drops what a new plan must look up again. `systems` are the systems that the nodes report now.
    pub(super) fn begin_plan(&mut self, systems: BTreeMap<KernelTarget, NodeSystem>) {
        self.forget_faults();
        self.set_systems(systems);
        // Another process may have cleared a failure (`farrier retry`).
        self.observed.failures.clear();
    }

    /// Drops failed and refused lookups.
    fn forget_faults(&mut self) {
        let Self { resolved, observed, unreachable, repositories: _, refused_sources, refuses_anonymous: _ } =
            self;
        let Resolved {
            systems: _,
            images,
            toolchains,
            headers,
            compilers,
            without_headers,
            header_texts,
            kernel_sources,
            trees,
            unverified_headers,
            unverified_root_fs,
            unbuildable_root_fs,
            unreachable: unresolved,
        } = resolved;
        let is_refused = |unverified: &Unverified| matches!(unverified, Unverified::Refused(_));
        images.retain(|_, outcome| outcome.is_ok());
        toolchains.retain(|_, outcome| outcome.is_ok());
        headers.retain(|target, outcome| {
            outcome.is_ok() && !unverified_headers.get(target).is_some_and(is_refused)
        });
        unverified_headers.retain(|_, unverified| !is_refused(unverified));
        headers.retain(|target, _| !without_headers.contains_key(target));
        without_headers.clear();
        compilers.retain(|target, _| headers.contains_key(target));
        header_texts.retain(|_, outcome| outcome.is_ok());
        refused_sources.retain(|_, answered_at| answered_at.elapsed() < PREBUILT_LOOKUP_INTERVAL);
        kernel_sources.retain(|key, outcome| outcome.is_ok() || refused_sources.contains_key(key));
        trees.retain(|_, outcome| outcome.is_ok());
        unverified_root_fs.retain(|key, unverified| {
            !unverified.as_ref().is_some_and(is_refused) && !unbuildable_root_fs.contains_key(key)
        });
        unbuildable_root_fs.clear();
        observed.signatures.retain(|_, state| *state == SignatureState { ours: true, refused: None });
        observed.headers.retain(|_, state| matches!(state, HeaderState::Available(_)));
        observed.unreachable.clear();
        (*unreachable, *unresolved, observed.is_registry_down) = (false, false, false);
    }

    /// Updates the systems of the nodes, and drops the lookups of targets whose system changed.
    fn set_systems(&mut self, systems: BTreeMap<KernelTarget, NodeSystem>) {
        let Resolved { systems: known, headers, without_headers, header_texts, .. } = &mut self.resolved;
        let is_same = |target: &KernelTarget| known.get(target) == systems.get(target);
        headers.retain(|target, _| is_same(target));
        without_headers.retain(|target, _| is_same(target));
        header_texts.retain(|(target, _), _| is_same(target));
        self.observed.headers.retain(|target, _| is_same(target));
        *known = systems;
    }

    /// Drops the lookups that a build made stale: the cell's references, which the build may have published, and its headers. If
    /// the build found a changed input, also drops all resolved inputs.
    pub(super) fn forget_build(&mut self, cell: &Cell, outdated: bool) {
        self.forget(cell.references());
        self.observed.headers.remove(&cell.target);
        if outdated {
            self.resolved = Resolved::default();
        }
    }

    /// Records the contents of a Git repository, or the error of the lookup.
    pub(super) fn record_repository(
        &mut self,
        repository: GitLocation,
        contents: Result<ManifestFacts, String>,
    ) {
        self.repositories.insert(repository, (Instant::now(), contents));
    }

    /// Drops the contents of a Git repository, after a commit to the repository.
    pub(super) fn forget_repository(&mut self, repository: &GitLocation) {
        self.repositories.remove(repository);
    }

    /// Returns the time of the next read of a Git repository.
    pub(super) fn repositories_due(&self) -> Option<Instant> {
        self.repositories.values().map(|(read_at, _)| *read_at + REPOSITORY_READ_INTERVAL).min()
    }

    /// Returns the contents of a Git repository at the last read, if it succeeded.
    pub(super) fn last_read(&self, repository: &GitLocation) -> Option<ManifestFacts> {
        self.repositories.get(repository)?.1.clone().ok()
    }

    /// Returns the cached contents of a Git repository, unless they are stale.
    pub(super) fn repository(&self, repository: &GitLocation) -> Option<&Result<ManifestFacts, String>> {
        let (read_at, contents) = self.repositories.get(repository)?;
        (read_at.elapsed() < REPOSITORY_READ_INTERVAL).then_some(contents)
    }

    /// Drops cached registry lookups for these references.
    pub fn forget<'a>(&mut self, references: impl IntoIterator<Item = &'a ImageReference>) {
        for reference in references {
            self.observed.published.remove(reference);
            self.observed.absent.remove(reference);
            self.observed.unreachable.remove(reference);
        }
    }
}
