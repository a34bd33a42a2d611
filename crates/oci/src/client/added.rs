//! Pure but for the clock: what this process has just added to a list of referrers, which another writer may have
//! overwritten.

use std::time::{Duration, Instant};

use crate::{Descriptor, Digest, ImageIndex, Repository};

/// How long what was added is put back when it is gone: as long as one image is published. Later it may have been deleted.
const REMEMBERED: Duration = Duration::from_mins(1);

/// What was added to one list just now.
pub(super) struct Added {
    repository: Repository,
    subject: Digest,
    referrers: Vec<Descriptor>,
    last: Instant,
}

impl Added {
    /// One entry more of the list that was added to last, or the first one of another.
    pub(super) fn with(
        before: Option<Self>,
        repository: &Repository,
        subject: &Digest,
        referrer: &Descriptor,
    ) -> Self {
        let same = |added: &Self| {
            added.repository == *repository && added.subject == *subject && added.last.elapsed() < REMEMBERED
        };
        let mut referrers = before.filter(same).map(|added| added.referrers).unwrap_or_default();
        referrers.retain(|known| known.digest != referrer.digest);
        referrers.push(referrer.clone());
        Self { repository: repository.clone(), subject: subject.clone(), referrers, last: Instant::now() }
    }

    /// Those that the list does not have.
    pub(super) fn missing_in(&self, index: &ImageIndex) -> Vec<Descriptor> {
        let is_listed =
            |added: &&Descriptor| index.manifests.iter().any(|known| known.digest == added.digest);
        self.referrers.iter().filter(|added| !is_listed(added)).cloned().collect()
    }
}
