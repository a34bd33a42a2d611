//! Adapter: reads from several locations, mirrors first.

use std::sync::Arc;

use super::{
    error::{Result, chain},
    registry::Access,
};
use crate::Repository;

/// Locations that reads try.
pub(super) struct Places {
    pub(super) access: Arc<dyn Access>,
    /// `host[:port][/prefix]`; repositories below it are never read from mirrors.
    pub(super) published: Option<String>,
}

impl Places {
    fn of(&self, repository: &Repository) -> Vec<Repository> {
        let below = |place: &String| {
            repository.as_str().strip_prefix(place.as_str()).is_some_and(|rest| rest.starts_with('/'))
        };
        if self.published.as_ref().is_some_and(below) {
            vec![repository.clone()]
        } else {
            self.access.candidates(repository)
        }
    }

    /// Asks each location in turn and returns the first result. A location that lacks the content, cannot be reached or
    /// returns content with a wrong digest leads to the next location.
    ///
    /// Returns `None` only if every location reported the content missing: an unreachable one may have it.
    pub(super) async fn first_of<T, Answer: Future<Output = Result<Option<T>>>>(
        &self,
        repository: &Repository,
        ask: impl Fn(Repository) -> Answer,
    ) -> Result<Option<T>> {
        let mut failure = None;
        for place in self.of(repository) {
            let is_mirror = place != *repository;
            match ask(place.clone()).await {
                Ok(Some(found)) => {
                    if is_mirror {
                        tracing::debug!(%repository, mirror = %place, "found at a mirror");
                    }
                    return Ok(Some(found));
                }
                Ok(None) => {
                    if is_mirror {
                        tracing::debug!(%repository, mirror = %place, "not found at the mirror");
                    }
                }
                Err(error) => {
                    if is_mirror {
                        tracing::warn!(%repository, mirror = %place, error = %chain(&error), "mirror failed, trying the next source");
                    }
                    // The last error is the repository's own, or the error of the last mirror that may be used.
                    failure = Some(error);
                }
            }
        }
        failure.map_or(Ok(None), Err)
    }

    /// First list that is not empty.
    pub(super) async fn first_list_of<T, Answer: Future<Output = Result<Vec<T>>>>(
        &self,
        repository: &Repository,
        ask: impl Fn(Repository) -> Answer,
    ) -> Result<Vec<T>> {
        let ask = |place| {
            let listed = ask(place);
            async { Ok(Some(listed.await?).filter(|listed| !listed.is_empty())) }
        };
        Ok(self.first_of(repository, ask).await?.unwrap_or_default())
    }
}
