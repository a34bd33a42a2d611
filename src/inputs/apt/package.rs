//! Adapter: one package that a definition names.

use std::{
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

use super::{AptArchive, Packages, control::PackageRecord, key_parts};
use crate::{
    image::AptSource,
    inputs::{CARRY, FetchError, Fetcher, Result, digest},
    kernel::Architecture,
    machine::native,
};

/// Changes when records of searches have another form.
const FORMAT: &str = "source-1";
/// The kind of the cache's records.
const KIND: &str = "packages";

/// What a package search came to, and when.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Package {
    pub name: String,
    pub version: String,
    pub sha256: String,
    /// Seconds since 1970.
    found: u64,
}

impl Package {
    /// `name=version sha256:...`.
    pub fn identity(&self) -> String {
        format!("{}={} sha256:{}", self.name, self.version, self.sha256)
    }
}

/// The package, from a record while that is fresh.
pub async fn find(fetcher: &Fetcher, source: &AptSource, arch: Architecture) -> Result<Package> {
    let version = source.version.as_deref();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    if let Some(known) = known(fetcher, source, arch)? {
        let age = now.checked_sub(known.found);
        let is_fresh = age.is_some_and(|age| age < fetcher.options.refresh.as_secs());
        // One version's content never changes; and where no archive may be asked, what was said last counts.
        if version.is_some() || fetcher.is_offline() || is_fresh {
            return Ok(known);
        }
    }
    let what = || format!("package {}", source.package);
    let (_, record) = fetcher.unless_kept(look_up(fetcher, source, version, arch).await, what, CARRY)?;
    let PackageRecord { name, version, sha256, .. } = record;
    let found = Package { name, version, sha256, found: now };
    fetcher.cache.write_record(KIND, &key(source, arch), &found)?;
    Ok(found)
}

/// What a search came to last, however long ago.
pub fn known(fetcher: &Fetcher, source: &AptSource, arch: Architecture) -> Result<Option<Package>> {
    Ok(fetcher.cache.read_record(KIND, &key(source, arch))?)
}

/// Is the store asked before the archive which package this is?
pub fn asks_store(fetcher: &Fetcher, source: &AptSource, arch: Architecture) -> Result<bool> {
    let is_fixed = source.version.is_some();
    let is_known = is_fixed && known(fetcher, source, arch)?.is_some();
    Ok((fetcher.is_offline() || is_fixed) && !is_known)
}

/// The package's file in the cache.
pub async fn file(
    fetcher: &Fetcher,
    source: &AptSource,
    package: &Package,
    arch: Architecture,
) -> Result<PathBuf> {
    let download = async {
        let (archive, found) = look_up(fetcher, source, Some(&package.version), arch).await?;
        archive.download(&[found]).await
    };
    let what = || format!("package {}={}", package.name, package.version);
    fetcher.unless_kept(download.await, what, CARRY)?.pop().ok_or(FetchError::Interrupted)
}

async fn look_up(
    fetcher: &Fetcher,
    source: &AptSource,
    version: Option<&str>,
    arch: Architecture,
) -> Result<(AptArchive, PackageRecord)> {
    let (package, suites) = (source.package.to_string(), source.apt_suites());
    let archive = AptArchive::open(fetcher, &suites, arch).await?;
    if let Packages::Found(mut found) = archive.choose(&[vec![package.clone()]], version).await?
        && let Some(found) = found.pop()
    {
        return Ok((archive, found));
    }
    // As apt names those of other machines.
    let named = if arch == native() { package } else { format!("{package}:{arch}") };
    Err(FetchError::NoPackage(
        version.map_or_else(|| named.clone(), |version| format!("{named}={version}")),
        suites.suites.join(", "),
    ))
}

/// Where a search's result is recorded.
fn key(source: &AptSource, arch: Architecture) -> String {
    let AptSource { package, version, .. } = source;
    let parts = key_parts(&source.apt_suites());
    let head = [FORMAT, arch.as_str(), package, version.as_deref().unwrap_or_default()];
    digest::of_parts(head.into_iter().chain(parts.iter().map(String::as_str)))
}
