//! Adapter: a search at several places, mirrors first.

use super::RegistryError;
use crate::image::Repository;

/// What came of the places so far. A place that does not have what is looked for, cannot be reached or gives something
/// else than its digest says leads to the next one.
pub(super) struct Search<'a> {
    repository: &'a Repository,
    fault: Option<RegistryError>,
}

impl<'a> Search<'a> {
    pub(super) fn new(repository: &'a Repository) -> Self {
        Self { repository, fault: None }
    }

    /// What the place had, if anything.
    pub(super) fn take<T>(
        &mut self,
        place: &Repository,
        answer: Result<Option<T>, RegistryError>,
    ) -> Option<T> {
        let repository = self.repository;
        match answer {
            Ok(Some(found)) => {
                if place != repository {
                    tracing::debug!(%repository, mirror = %place, "found at a mirror");
                }
                return Some(found);
            }
            Ok(None) => {
                if place != repository {
                    tracing::debug!(%repository, mirror = %place, "the mirror does not have it");
                }
            }
            Err(error) => {
                if place != repository {
                    tracing::warn!(%repository, mirror = %place, %error, "the mirror cannot be used");
                }
                // The last one is the repository's own, or of the last mirror that may be asked.
                self.fault = Some(error);
            }
        }
        None
    }

    /// What the search came to. "Not there" only when every place has said so: one that cannot be reached may have it.
    pub(super) fn end<T>(self, missing: T) -> Result<T, RegistryError> {
        self.fault.map_or(Ok(missing), Err)
    }
}
