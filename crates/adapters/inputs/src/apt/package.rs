//! Looks up and downloads one package that a definition names.

use std::{
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use farrier_core::{image::AptSource, kernel::Architecture};
use farrier_local::machine::native;
use serde::{Deserialize, Serialize};

use super::{AptArchive, Packages, control::PackageRecord, key_parts};
use crate::{FetchError, Fetcher, Result, digest};

/// Format version of cached search results. Change it whenever [`Package`] or the meaning of its fields changes.
const FORMAT: &str = "source-1";
/// Kind of the cache records that hold search results.
const KIND: &str = "packages";

/// Result of a package search.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Package {
    pub name: String,
    pub version: String,
    pub sha256: String,
    /// Time of the search, in seconds since the Unix epoch.
    found: u64,
}

impl Package {
    /// Returns `name=version sha256:...`.
    pub fn identity(&self) -> String {
        format!("{}={} sha256:{}", self.name, self.version, self.sha256)
    }
}

/// Returns the cached search result if it is still valid, or else searches the archive.
pub async fn find(fetcher: &Fetcher, source: &AptSource, arch: Architecture) -> Result<Package> {
    let version = source.version.as_deref();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
    if let Some(known) = known(fetcher, source, arch)? {
        let age = now.checked_sub(known.found);
        let is_fresh = age.is_some_and(|age| age < fetcher.options.refresh.as_secs());
        // A pinned version never changes. Offline, the last result is used whatever its age.
        if version.is_some() || fetcher.is_offline() || is_fresh {
            return Ok(known);
        }
    }
    let describe = || format!("package {}", source.package);
    let (_, record) = fetcher.explain_if_offline(look_up(fetcher, source, version, arch).await, describe)?;
    let PackageRecord { name, version, sha256, .. } = record;
    let found = Package { name, version, sha256, found: now };
    fetcher.cache.write_record(KIND, &key(fetcher, source, arch)?, &found)?;
    Ok(found)
}

/// Returns the last search result, whatever its age.
pub fn known(fetcher: &Fetcher, source: &AptSource, arch: Architecture) -> Result<Option<Package>> {
    Ok(fetcher.cache.read_record(KIND, &key(fetcher, source, arch)?)?)
}

/// Whether to look in the store for the package's identity before searching the archive.
pub fn needs_store_lookup(fetcher: &Fetcher, source: &AptSource, arch: Architecture) -> Result<bool> {
    let is_pinned = source.version.is_some();
    let is_known = is_pinned && known(fetcher, source, arch)?.is_some();
    Ok((fetcher.is_offline() || is_pinned) && !is_known)
}

/// Returns the path of the package's file in the cache, and downloads a missing file.
pub async fn file(
    fetcher: &Fetcher,
    source: &AptSource,
    package: &Package,
    arch: Architecture,
) -> Result<PathBuf> {
    let describe = || format!("package {}={}", package.name, package.version);
    let download = async {
        let (archive, found) = look_up(fetcher, source, Some(&package.version), arch).await?;
        if found.sha256 != package.sha256 {
            // The package was published again under its version: let the next search find the new one.
            fetcher.cache.remove_record(KIND, &key(fetcher, source, arch)?)?;
            return Err(FetchError::sha256(describe(), &found.sha256, &package.sha256));
        }
        archive.download(&[found]).await
    };
    fetcher.explain_if_offline(download.await, describe)?.pop().ok_or(FetchError::Interrupted)
}

async fn look_up(
    fetcher: &Fetcher,
    source: &AptSource,
    version: Option<&str>,
    arch: Architecture,
) -> Result<(AptArchive, PackageRecord)> {
    let (package, suites) = (source.package.to_string(), source.apt_suites());
    let archive = AptArchive::open(fetcher, &suites, arch).await?;
    if version.is_none() {
        archive.ensure_no_suite_is_missing(&format!("choose package {package}")).await?;
    }
    let chosen = archive.choose(&[vec![package.clone()]], version).await?;
    if let Packages::Found(mut found) = chosen
        && let Some(found) = found.pop()
    {
        return Ok((archive, found));
    }
    // apt's notation for packages of another architecture.
    let qualified = if arch == native() { package } else { format!("{package}:{arch}") };
    Err(FetchError::NoPackage(
        version.map_or_else(|| qualified.clone(), |version| format!("{qualified}={version}")),
        suites.suites.join(", "),
    ))
}

/// Returns the cache key of a search result.
fn key(fetcher: &Fetcher, source: &AptSource, arch: Architecture) -> Result<String> {
    let AptSource { package, version, signed_by, .. } = source;
    let mut parts = key_parts(&source.apt_suites());
    parts.extend(fetcher.keys_digest(signed_by.as_ref())?);
    let head = [FORMAT, arch.as_str(), package, version.as_deref().unwrap_or_default()];
    Ok(digest::of_parts(head.into_iter().chain(parts.iter().map(String::as_str))))
}
