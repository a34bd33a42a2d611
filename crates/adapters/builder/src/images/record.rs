//! Records that farrier keeps in the registry: when each kernel was last seen, and how long builds took. Garbage
//! collection uses the record of kernels, so it needs no local state.
//!
//! Each record is one manifest under one tag of `kernels`, with the data in an annotation. Unlike an image's tag, the
//! record's tag moves. Writers merge their entries with the existing ones, so their order does not matter.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use farrier_core::{
    facts::{RegistryRecord, annotations},
    image::{Repository, Version},
    plan::{BuildTimes, Cell, KernelKey, KernelRecord},
};
use farrier_store::registry::{MAX_TRIES, RegistryError, pause_before, read_annotation, write_annotations};
use jiff::{Timestamp, civil::Date, tz::TimeZone};
use oci::error_chain;

use crate::services::{BuildError, BuildServices, ImageAccess, Result};

/// Repository below the registry's prefix. Driver images cannot have this name.
pub const REPOSITORY: &str = "kernels";
/// Delay before a failed write is retried. Without it, each reconcile would repeat a write that the registry rejects.
const RETRY_DELAY: Duration = Duration::from_hours(1);
/// Timeout for build times, which are optional.
const BUILD_TIMES_TIMEOUT: Duration = Duration::from_secs(5);

/// The last write. The same kernels are recorded once a day.
#[derive(Clone, Debug, Default)]
pub struct LastRecord {
    written: Option<(Date, BTreeSet<KernelKey>)>,
    failed: Option<Instant>,
}

/// Day for the record, in UTC so that all writers use the same day.
pub fn day(now: Timestamp) -> Date {
    now.to_zoned(TimeZone::UTC).date()
}

/// Records the kernels that run or are announced, at most once a day for each. A failed write is only logged: a kernel
/// without a record counts as seen when garbage collection first notices it.
pub async fn record_kernels(services: &BuildServices, kernels: BTreeSet<KernelKey>, last: &mut LastRecord) {
    let today = day(Timestamp::now());
    let failed_recently = last.failed.is_some_and(|failed| failed.elapsed() < RETRY_DELAY);
    let is_recorded =
        matches!(&last.written, Some((day, known)) if *day == today && kernels.is_subset(known));
    if kernels.is_empty() || failed_recently || is_recorded {
        return;
    }
    let seen = KernelRecord::default().with(&kernels, today);
    match add_to_record(services, &seen).await {
        Ok(()) => *last = LastRecord { written: Some((today, kernels)), failed: None },
        Err(BuildError::Canceled) => {}
        Err(error) => {
            last.failed = Some(Instant::now());
            tracing::warn!(error = %error_chain(&error), "cannot record the kernels in use");
        }
    }
}

/// Records the duration of a build that compiled. Best effort: without the record only an estimate is missing. So
/// failures are ignored, and nothing checks whether another writer overwrote the entry.
pub(crate) async fn record_build(services: &BuildServices, cell: &Cell, took: Duration) {
    let times = BuildTimes::of(&cell.image, cell.target.arch, Timestamp::now(), took);
    let written = tokio::time::timeout(BUILD_TIMES_TIMEOUT, write_to_record(services, &times)).await;
    if !matches!(written, Ok(Ok(_))) {
        let error = written.ok().and_then(Result::err).map(|error| error_chain(&error));
        tracing::debug!(error, "cannot record the duration of a build");
    }
}

/// Recorded build times; empty if the registry does not answer in time.
pub async fn build_times(access: &ImageAccess) -> BuildTimes {
    let read = tokio::time::timeout(BUILD_TIMES_TIMEOUT, read_record(access)).await;
    read.ok().and_then(Result::ok).unwrap_or_default()
}

/// Reads a record; empty if the registry has none.
pub async fn read_record<R: RegistryRecord>(access: &ImageAccess) -> Result<R> {
    let (repository, version) = location_of::<R>(access)?;
    let found =
        read_annotation(access.registry.as_ref(), (&repository, &version), R::ANNOTATION, R::parse).await?;
    Ok(found.unwrap_or_default())
}

/// Adds entries to a record, and repeats until a read shows them, because the registry protocol has no locks.
pub async fn add_to_record<R: RegistryRecord>(services: &BuildServices, entries: &R) -> Result<()> {
    for attempt in 0..=MAX_TRIES {
        pause_before(attempt).await;
        if !write_to_record(services, entries).await? {
            return Ok(());
        }
    }
    let (repository, version) = location_of::<R>(&services.images)?;
    let action = format!("write the record in {repository}{version}");
    let reason = format!("other writers removed the added entries {MAX_TRIES} times");
    Err(RegistryError::protocol(services.images.registry.describe(), action, reason).into())
}

/// Adds missing entries to a record. Returns whether entries were missing. A concurrent writer may overwrite them.
async fn write_to_record<R: RegistryRecord>(services: &BuildServices, entries: &R) -> Result<bool> {
    let known: R = read_record(&services.images).await?;
    let merged = known.merged(entries);
    if merged == known {
        return Ok(false);
    }
    services.process.ensure_may_write()?;
    let (repository, version) = location_of::<R>(&services.images)?;
    let annotations = [(annotations::TITLE, R::TITLE.to_owned()), (R::ANNOTATION, merged.to_text())];
    write_annotations(services.images.registry.as_ref(), (&repository, &version), R::KIND, annotations)
        .await?;
    Ok(true)
}

fn location_of<R: RegistryRecord>(access: &ImageAccess) -> Result<(Repository, Version)> {
    let repository = access.location.repository(REPOSITORY)?;
    Ok((repository, Version::Tag(R::TAG.parse()?)))
}
