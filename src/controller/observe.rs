//! Adapter: the look-ups before a plan: what sources, patches and bases are at this moment, and what the
//! registry holds.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, stream};

use super::Controller;
use crate::{
    image::{Digest, ImageReference},
    parts::AT_ONCE,
    plan::{ImageContents, Published, SignatureState},
    resolve::{Resolved, with_hint},
};

/// What was found out, kept from one pass of the loop to the next: a change in the cluster asks nothing again that
/// was answered a moment ago. What is not in it is looked up.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pub(super) resolved: Resolved,
    pub(super) lookups: Lookups,
    /// What images in use hold, by digest.
    pub(super) contents: BTreeMap<String, ImageContents>,
    /// What is known of images' signatures.
    pub(super) signatures: BTreeMap<Digest, SignatureState>,
}

impl Memory {
    /// Forgets what could not be found out, so that it is tried again.
    pub fn forget_faults(&mut self) {
        let Self { resolved, lookups, contents: _, signatures } = self;
        signatures.retain(|_, state| *state == SignatureState { ours: true, refused: None });
        resolved.images.retain(|_, outcome| outcome.is_ok());
        resolved.toolchains.retain(|_, outcome| outcome.is_ok());
        resolved.headers.retain(|_, outcome| outcome.is_ok());
        resolved.trees.retain(|_, outcome| outcome.is_ok());
        resolved.unreachable = false;
        lookups.failed.clear();
        lookups.unreachable = false;
    }

    /// Is there something that could not be found out?
    pub fn has_faults(&self) -> bool {
        let Self { resolved, lookups, contents: _, signatures: _ } = self;
        resolved.images.values().any(Result::is_err)
            || resolved.toolchains.values().any(Result::is_err)
            || resolved.headers.values().any(Result::is_err)
            || !lookups.failed.is_empty()
    }

    /// Forgets what the registry said about these names.
    pub fn forget<'a>(&mut self, references: impl IntoIterator<Item = &'a ImageReference>) {
        for reference in references {
            self.lookups.published.remove(reference);
            self.lookups.absent.remove(reference);
            self.lookups.failed.remove(reference);
        }
    }
}

/// What the registry answered.
#[derive(Clone, Debug, Default)]
pub struct Lookups {
    /// What it holds.
    pub published: BTreeMap<ImageReference, Published>,
    /// References that it does not have.
    pub absent: BTreeSet<ImageReference>,
    /// References that could not be looked up, and why.
    pub failed: BTreeMap<ImageReference, String>,
    /// Was it out of reach?
    pub unreachable: bool,
}

impl Controller {
    /// Asks the registry for those of the references about which it has not been asked. Says whether there were any.
    pub(super) async fn look_up_more<'a>(
        &self,
        references: impl IntoIterator<Item = &'a ImageReference>,
        lookups: &mut Lookups,
    ) -> bool {
        let known = |reference: &&ImageReference| {
            lookups.published.contains_key(*reference)
                || lookups.absent.contains(*reference)
                || lookups.failed.contains_key(*reference)
        };
        let references: Vec<ImageReference> =
            references.into_iter().filter(|reference| !known(reference)).cloned().collect();
        if references.is_empty() {
            return false;
        }
        let found = stream::iter(references)
            .map(|reference| async move {
                let published = self.look_up(&reference).await;
                (reference, published)
            })
            .buffer_unordered(AT_ONCE)
            .collect::<Vec<_>>()
            .await;
        for (reference, outcome) in found {
            match outcome {
                Ok(None) => {
                    lookups.absent.insert(reference);
                }
                Ok(Some(published)) => {
                    lookups.published.insert(reference, published);
                }
                Err(error) => {
                    lookups.unreachable |= error.is_unreachable();
                    lookups.failed.insert(reference, with_hint(&error));
                }
            }
        }
        true
    }
}
