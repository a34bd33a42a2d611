//! Reads a repository from its mirrors, or from the repository itself.

use std::sync::Arc;

use super::{error::Result, registry::Access};
use crate::{Repository, error_chain};

/// Finds the locations from which a repository is read.
pub(super) struct ReadLocations {
    pub(super) access: Arc<dyn Access>,
    /// `host[:port][/prefix]` of published images. Repositories below this location are never read from mirrors.
    pub(super) publish_prefix: Option<String>,
}

impl ReadLocations {
    /// Returns the name of a repository below the location of published images. Returns `None` for a repository elsewhere.
    pub(super) fn name_below_prefix<'a>(&self, repository: &'a Repository) -> Option<&'a str> {
        repository.as_str().strip_prefix(self.publish_prefix.as_deref()?)?.strip_prefix('/')
    }

    fn candidates(&self, repository: &Repository) -> Vec<Repository> {
        if self.name_below_prefix(repository).is_some() {
            vec![repository.clone()]
        } else {
            self.access.candidates(repository)
        }
    }

    /// Tries each location in turn and returns the first result. Skips a location that lacks the content, cannot be reached or
    /// returns content with a wrong digest.
    ///
    /// Returns `None` only if every location reported the content as missing, because an unreachable location may have the content.
    pub(super) async fn first_of<T, Reading: Future<Output = Result<Option<T>>>>(
        &self,
        repository: &Repository,
        read: impl Fn(Repository) -> Reading,
    ) -> Result<Option<T>> {
        let mut failure = None;
        for location in self.candidates(repository) {
            let is_mirror = location != *repository;
            match read(location.clone()).await {
                Ok(Some(found)) => {
                    if is_mirror {
                        tracing::debug!(%repository, mirror = %location, "found at a mirror");
                    }
                    return Ok(Some(found));
                }
                Ok(None) => {
                    if is_mirror {
                        tracing::debug!(%repository, mirror = %location, "not found at the mirror");
                    }
                }
                Err(error) => {
                    if is_mirror {
                        tracing::warn!(%repository, mirror = %location, error = %error_chain(&error), "mirror failed, trying the next source");
                    }
                    // Return the last error. It comes from the repository itself, unless access to the repository is forbidden.
                    failure = Some(error);
                }
            }
        }
        failure.map_or(Ok(None), Err)
    }

    /// Like [`Self::first_of`], for lists. An empty list counts as missing.
    pub(super) async fn first_list_of<T, Reading: Future<Output = Result<Vec<T>>>>(
        &self,
        repository: &Repository,
        read: impl Fn(Repository) -> Reading,
    ) -> Result<Vec<T>> {
        let read = |location| {
            let listed = read(location);
            async { Ok(Some(listed.await?).filter(|listed| !listed.is_empty())) }
        };
        Ok(self.first_of(repository, read).await?.unwrap_or_default())
    }
}
