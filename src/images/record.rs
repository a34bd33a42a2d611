//! Adapter: what the registry remembers beside images: when each kernel was last seen, so that the decision which images are for
//! kernels that are gone needs nothing of this machine; and how long builds took.
//!
//! One manifest under one tag of `kernels` each, the record in an annotation. Its tag moves, as no image's does: it is no
//! content but a memory. Writers put together what they and others know, so that it does not matter who comes last.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use jiff::{Timestamp, civil::Date, tz::TimeZone};

use crate::{
    error_chain,
    image::{Repository, Version},
    oci::{self, Descriptor, ImageManifest, Record, annotations, media_type},
    parts::{Parts, Result, TargetError},
    plan::{BuildTimes, Cell, KernelKey, KernelRecord},
    registry::{MAX_TRIES, RegistryError, pause_before},
};

/// The repository, below the registry's prefix. No driver image can have this name.
pub const REPOSITORY: &str = "kernels";
/// Until it is tried again to write down what could not be: a registry that does not take it is not asked with each pass.
const PATIENCE: Duration = Duration::from_hours(1);
/// How long is waited for build times, which nothing depends on.
const SHORT: Duration = Duration::from_secs(5);

/// What was written down last: the same kernels are written down once a day.
#[derive(Clone, Debug, Default)]
pub struct LastRecord {
    written: Option<(Date, BTreeSet<KernelKey>)>,
    failed: Option<Instant>,
}

/// The day of the record, the same everywhere.
pub(crate) fn day(now: Timestamp) -> Date {
    now.to_zoned(TimeZone::UTC).date()
}

/// Writes down which kernels are run or announced, at most once a day for each. A record that cannot be written stops
/// nothing: kernels that are not in it count as seen when they are noticed.
pub(crate) async fn record_kernels(parts: &Parts, kernels: BTreeSet<KernelKey>, last: &mut LastRecord) {
    let today = day(Timestamp::now());
    let known = |(day, known): &(Date, BTreeSet<KernelKey>)| *day == today && kernels.is_subset(known);
    let tried = last.failed.is_some_and(|failed| failed.elapsed() < PATIENCE);
    if kernels.is_empty() || tried || last.written.as_ref().is_some_and(known) {
        return;
    }
    let seen = KernelRecord::default().with(&kernels, today);
    match add_to_record(parts, &seen).await {
        Ok(()) => *last = LastRecord { written: Some((today, kernels)), failed: None },
        Err(TargetError::Cancelled) => {}
        Err(error) => {
            last.failed = Some(Instant::now());
            tracing::warn!(error = %error_chain(&error), "kernels in use cannot be written down");
        }
    }
}

/// Writes down how long a build took that compiled. That it cannot costs an estimate, and no build; so no build waits to see
/// whether another one has overwritten it.
pub(crate) async fn record_build(parts: &Parts, cell: &Cell, took: Duration) {
    let times = BuildTimes::of(&cell.image, cell.target.arch, Timestamp::now(), took);
    let written = tokio::time::timeout(SHORT, write_to_record(parts, &times)).await;
    if !matches!(written, Ok(Ok(_))) {
        let error = written.ok().and_then(Result::err).map(|error| error_chain(&error));
        tracing::debug!(error, "how long a build took cannot be written down");
    }
}

/// How long builds took, as far as the registry says so in time.
pub(crate) async fn build_times(parts: &Parts) -> BuildTimes {
    let read = tokio::time::timeout(SHORT, read_record(parts)).await;
    read.ok().and_then(Result::ok).unwrap_or_default()
}

/// What the registry remembers; nothing where it has no record.
pub(crate) async fn read_record<R: Record>(parts: &Parts) -> Result<R> {
    let (repository, version) = place_of::<R>(parts)?;
    let stored = parts.registry.manifest(&repository, &version).await?;
    let Some(stored) = stored else { return Ok(R::default()) };
    let unusable = |reason: String| {
        TargetError::Registry(RegistryError::Protocol {
            host: parts.registry.describe(),
            action: format!("read the record in {repository}{version}"),
            reason,
        })
    };
    let manifest = ImageManifest::parse(&stored.bytes).map_err(|error| unusable(error.to_string()))?;
    let text = manifest.annotations.get(R::NOTE);
    let text = text.ok_or_else(|| unusable(format!("it has no annotation {}", R::NOTE)))?;
    R::parse(text).map_err(unusable)
}

/// Writes what is not in the record yet, then reads it again until it is: the protocol has no way to make others
/// wait that write at the same time.
pub(crate) async fn add_to_record<R: Record>(parts: &Parts, news: &R) -> Result<()> {
    for attempt in 0..=MAX_TRIES {
        pause_before(attempt).await;
        if !write_to_record(parts, news).await? {
            return Ok(());
        }
    }
    let (repository, version) = place_of::<R>(parts)?;
    Err(TargetError::Registry(RegistryError::Protocol {
        host: parts.registry.describe(),
        action: format!("write the record in {repository}{version}"),
        reason: format!("what is added is gone again, {MAX_TRIES} times"),
    }))
}

/// Writes what is not in the record yet; was there such? Who writes at the same time may overwrite it.
async fn write_to_record<R: Record>(parts: &Parts, news: &R) -> Result<bool> {
    let known: R = read_record(parts).await?;
    let all = known.joined(news);
    if all == known {
        return Ok(false);
    }
    parts.may_write()?;
    let (repository, version) = place_of::<R>(parts)?;
    parts.registry.push_bytes(&repository, oci::EMPTY).await?;
    parts.registry.push_manifest(&repository, &version, media_type::OCI_MANIFEST, &manifest(&all)?).await?;
    Ok(true)
}

fn place_of<R: Record>(parts: &Parts) -> Result<(Repository, Version)> {
    let repository = parts.location.repository(REPOSITORY)?;
    Ok((repository, Version::Tag(R::TAG.parse()?)))
}

fn manifest<R: Record>(record: &R) -> Result<Vec<u8>> {
    let empty = || Descriptor::of(media_type::OCI_EMPTY, oci::EMPTY);
    let notes = [
        (annotations::CREATED, oci::CREATED.to_owned()),
        (annotations::TITLE, R::TITLE.to_owned()),
        (R::NOTE, record.to_text()),
    ];
    let manifest = ImageManifest {
        artifact_type: Some(R::KIND.to_owned()),
        annotations: notes.into_iter().map(|(key, note)| (key.to_owned(), note)).collect::<BTreeMap<_, _>>(),
        ..ImageManifest::new(empty(), vec![empty()])
    };
    Ok(manifest.to_bytes()?)
}
