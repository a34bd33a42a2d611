//! Adapter: what the planner asks, and what was found out before.

use std::{collections::BTreeMap, time::Duration};

use futures::{StreamExt, stream};
use tokio::time::Instant;

use crate::{
    build::known_failures,
    error_chain,
    image::{GitPlace, ImageReference},
    images::look_up_signatures,
    inputs::{FetchError, Lookup},
    kernel::{KernelTarget, NodeSystem, match_family},
    parts::{AT_ONCE, Parts, Result},
    plan::{
        Cell, HeaderState, ManifestFacts, Observed, Questions, Resolved, SignatureState, TreeKey, Unverified,
    },
    resolve::with_hint,
};

/// What was found out, kept from one pass of the loop to the next: a change in the cluster asks nothing again that
/// was answered a moment ago. What is not in it is looked up.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pub(super) resolved: Resolved,
    pub(super) observed: Observed,
    /// Was the registry out of reach?
    pub(super) unreachable: bool,
    /// What stood in Git repositories, and when they were asked.
    pub(super) repositories: BTreeMap<GitPlace, (Instant, Result<ManifestFacts, String>)>,
    /// Prebuilt images that are not there, or do not count, and when their registries said so.
    refused_sources: BTreeMap<TreeKey, Instant>,
}

/// A Git repository is asked again after this long: it cannot tell that it changed.
const REPOSITORIES_ASKED: Duration = Duration::from_secs(30);

/// The registry of a prebuilt image that does not count is asked again after this long: it is somebody else's, and may count requests.
const SOURCES_ASKED: Duration = Duration::from_mins(5);

impl Memory {
    /// Forgets what is to be looked up anew now and then.
    pub(super) fn renew(&mut self) {
        let Self { resolved: Resolved { mut kernel_sources, .. }, refused_sources, .. } =
            std::mem::take(self);
        kernel_sources.retain(|key, _| refused_sources.contains_key(key));
        self.resolved.kernel_sources = kernel_sources;
        self.refused_sources = refused_sources;
    }

    /// Notes prebuilt images that do not count.
    pub(super) fn note_refused(&mut self, sources: Vec<TreeKey>) {
        self.refused_sources.extend(sources.into_iter().map(|source| (source, Instant::now())));
    }

    /// Forgets what could not be found out, so that it is tried again.
    pub fn forget_faults(&mut self) {
        let Self { resolved, observed, unreachable, repositories: _, refused_sources } = self;
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
            unmakeable_root_fs,
            unreachable: unresolved,
        } = resolved;
        let refused = |found: &Unverified| matches!(found, Unverified::Refused(_));
        images.retain(|_, outcome| outcome.is_ok());
        toolchains.retain(|_, outcome| outcome.is_ok());
        headers.retain(|target, outcome| {
            outcome.is_ok() && !unverified_headers.get(target).is_some_and(refused)
        });
        unverified_headers.retain(|_, found| !refused(found));
        headers.retain(|target, _| !without_headers.contains_key(target));
        without_headers.clear();
        compilers.retain(|target, _| headers.contains_key(target));
        header_texts.retain(|_, outcome| outcome.is_ok());
        refused_sources.retain(|_, asked| asked.elapsed() < SOURCES_ASKED);
        kernel_sources.retain(|key, outcome| outcome.is_ok() || refused_sources.contains_key(key));
        trees.retain(|_, outcome| outcome.is_ok());
        unverified_root_fs.retain(|key, found| {
            !found.as_ref().is_some_and(refused) && !unmakeable_root_fs.contains_key(key)
        });
        unmakeable_root_fs.clear();
        observed.signatures.retain(|_, state| *state == SignatureState { ours: true, refused: None });
        observed.headers.retain(|_, state| matches!(state, HeaderState::There(_)));
        observed.unreachable.clear();
        (*unreachable, *unresolved) = (false, false);
    }

    /// Takes in what nodes say of their system now. What was found out for those who said something else is forgotten.
    pub(super) fn set_systems(&mut self, systems: BTreeMap<KernelTarget, NodeSystem>) {
        let Resolved { systems: known, headers, without_headers, header_texts, .. } = &mut self.resolved;
        let is_same = |target: &KernelTarget| known.get(target) == systems.get(target);
        headers.retain(|target, _| is_same(target));
        without_headers.retain(|target, _| is_same(target));
        header_texts.retain(|(target, _), _| is_same(target));
        self.observed.headers.retain(|target, _| is_same(target));
        *known = systems;
    }

    /// A build has ended: what the registry said of its names is not so any more, and neither are the inputs, where it found one
    /// changed.
    pub(super) fn forget_build(&mut self, cell: &Cell, outdated: bool) {
        self.forget(cell.references());
        self.observed.headers.remove(&cell.target);
        if outdated {
            self.resolved = Resolved::default();
        }
    }

    /// When a Git repository is to be asked again.
    pub(super) fn repositories_due(&self) -> Option<Instant> {
        self.repositories.values().map(|(asked, _)| *asked + REPOSITORIES_ASKED).min()
    }

    /// What was read of a Git repository a moment ago.
    pub(super) fn repository(&self, place: &GitPlace) -> Option<&Result<ManifestFacts, String>> {
        let (asked, found) = self.repositories.get(place)?;
        (asked.elapsed() < REPOSITORIES_ASKED).then_some(found)
    }

    /// Forgets what the registry said about these names.
    pub fn forget<'a>(&mut self, references: impl IntoIterator<Item = &'a ImageReference>) {
        for reference in references {
            self.observed.published.remove(reference);
            self.observed.absent.remove(reference);
            self.observed.unreachable.remove(reference);
        }
    }
}

impl Parts {
    /// Finds out what the planner asks.
    pub(super) async fn answer(&self, questions: Questions, memory: &mut Memory) -> Result<()> {
        let Questions { images, signatures, failures, headers } = questions;
        let Memory { resolved, observed, unreachable, .. } = memory;
        observed.failures.extend(known_failures(&self.cache, failures)?);
        let found = stream::iter(images)
            .map(|reference| async move {
                let published = self.look_up(&reference).await;
                (reference, published)
            })
            .buffer_unordered(AT_ONCE)
            .collect::<Vec<_>>()
            .await;
        for (reference, outcome) in found {
            match outcome {
                Ok(None) => drop(observed.absent.insert(reference)),
                Ok(Some(published)) => drop(observed.published.insert(reference, published)),
                Err(error) => {
                    *unreachable |= error.is_unreachable();
                    observed.unreachable.insert(reference, with_hint(&error));
                }
            }
        }
        look_up_signatures(self, &signatures, &mut observed.signatures).await;
        let systems = headers.into_iter().map(|target| (resolved.system(&target).clone(), target));
        let states = stream::iter(systems.collect::<Vec<_>>());
        let states = states.map(|(system, target)| self.headers_of(target, system)).buffer_unordered(AT_ONCE);
        observed.headers.extend(states.collect::<Vec<_>>().await);
        Ok(())
    }

    /// What is known of a kernel's headers. A fault that may pass is no reason not to try.
    async fn headers_of(&self, target: KernelTarget, system: NodeSystem) -> (KernelTarget, HeaderState) {
        let Some(family) = match_family(&self.definitions.families, &target) else {
            return (target, HeaderState::Unknown);
        };
        let source = family.spec.headers_for(&target, &system);
        let state = match self.fetcher.headers().look(&source, &target).await {
            Ok(Lookup::Found(compiler)) => HeaderState::There(compiler),
            Ok(Lookup::Missing { looked_for, hint: _ }) => HeaderState::Missing(looked_for),
            Err(error) if error.is_transient() || matches!(error, FetchError::Interrupted) => {
                tracing::warn!(%target, error = error_chain(&error), "whether there are headers is not known");
                HeaderState::Unknown
            }
            Err(error) => HeaderState::Refused(with_hint(&error.into())),
        };
        (target, state)
    }
}
