//! RPM repositories. farrier parses their metadata; the distributions' own tools verify signatures.

mod address;
pub(super) mod keys;
pub mod metadata;
mod modules;
pub mod package;
pub(super) mod source;
mod system;

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use address::{base_urls, join_below, parse_address};
use farrier_core::{
    image::checked::{RpmAlternatives, matches_glob},
    kernel::{Architecture, KernelRelease, RpmArchive, RpmRepository, RpmSigned},
};
use farrier_local::{archive, blocking::stoppable, cache::LockMode};
use fs_err::{self as fs, File};
use keys::Keys;
use metadata::{Part, Repomd};
use package::RpmPackage;
use serde::{Deserialize, Serialize};
use url::Url;

use super::{
    FetchError, Fetcher, MISSING_PACKAGE_MAX_AGE, Result,
    apt::Packages,
    checksum::Checksum,
    digest,
    download::{download_from_any, fetch_from, is_placeholder, transfer},
    error::MetadataError,
};

/// Format version; change it when listings have another form.
const FORMAT: &str = "rpm-4";
/// Kind of the cache's records and locks.
const KIND: &str = "rpm";
/// Remedy for missing keys, repositories or packages.
pub const HINT: &str = "add the distribution's keys, name mirrors of its repositories in site.yaml \
    (`mirrors`), or add the repository with the missing package to the family";
/// Maximum size of `repomd.xml`, a signature or a list of mirrors, in bytes.
const MAX_INDEX_SIZE: u64 = 4 << 20;

/// Repositories with packages of certain names, for one version and architecture of a distribution.
#[derive(Clone, Debug)]
pub struct Repositories {
    fetcher: Fetcher,
    arch: Architecture,
    signed: RpmSigned,
    keys: Keys,
    urls: Vec<RepositoryUrls>,
    /// Names of packages, with `*` for a flavor or a release.
    names: Vec<String>,
    /// Repositories without an address, for messages.
    no_address: Vec<String>,
    /// Whether all repositories must answer. An absent or unreachable repository may have the newest package.
    requires_all: bool,
}

/// Addresses of a repository, or of its list of mirrors.
#[derive(Clone, Debug)]
struct RepositoryUrls {
    is_list: bool,
    urls: Vec<Url>,
}

/// A package with the addresses of its repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedPackage {
    pub package: RpmPackage,
    urls: Vec<String>,
}

/// Listing of one repository, as last fetched.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Listing {
    /// Time of the last request, in seconds since the Unix epoch.
    #[serde(rename = "asked")]
    requested_at: u64,
    /// Digest of `repomd.xml`; `None` if there is no repository.
    revision: Option<String>,
    /// Addresses of the repository; the one that answered comes first.
    #[serde(rename = "places")]
    urls: Vec<String>,
    /// Metadata files named in `repomd.xml`.
    parts: Option<Repomd>,
    /// Packages with the names in [`Repositories::names`].
    packages: Vec<RpmPackage>,
}

impl Repositories {
    /// Opens the repositories for a version of the distribution, without contacting them yet. The inner
    /// `Err` names the missing key file, or the repositories if none has an address.
    pub fn open(
        fetcher: &Fetcher,
        archive: &RpmArchive,
        (version, arch): (&str, Architecture),
        groups: &[RpmAlternatives],
    ) -> Result<Result<Self, String>> {
        let file = fetcher.root.join(&archive.signed_by);
        let Some(keys) = Keys::read(&file)? else {
            return Ok(Err(format!("file {} with the keys of the distribution", file.display())));
        };
        let (mut repositories, mut no_address) = (Vec::new(), Vec::new());
        for repository in &*archive.repositories {
            let is_list = matches!(repository, RpmRepository::MirrorList(_));
            let text = repository.address().expand(version, arch.gnu_name());
            let url = parse_address(&text, !is_list)?;
            let mut urls = fetcher.net.url_candidates(&url);
            urls.retain(|url| !is_placeholder(url));
            if urls.is_empty() {
                no_address.push(format!("{text} (no mirror in site.yaml)"));
            } else {
                repositories.push(RepositoryUrls { is_list, urls });
            }
        }
        if repositories.is_empty() {
            return Ok(Err(format!("repository {}", no_address.join(", "))));
        }
        let names = groups.iter().flat_map(RpmAlternatives::names);
        let names = names.map(|name| name.replace("{{flavor}}", "*").replace("{{release}}", "*")).collect();
        let (fetcher, signed, requires_all) = (fetcher.clone(), archive.signed, false);
        Ok(Ok(Self { fetcher, arch, signed, keys, urls: repositories, names, no_address, requires_all }))
    }

    /// Chooses one package of each group for a kernel. Refreshes the listings before reporting a group or a repository as missing.
    pub async fn choose(
        &self,
        groups: &[Vec<String>],
        release: &KernelRelease,
    ) -> Result<Packages<ListedPackage>> {
        match self.choose_listed(groups, release, self.fetcher.options.refresh).await {
            Ok(Packages::Missing(_)) | Err(FetchError::Program { .. }) if self.renew().await? => {
                self.choose_listed(groups, release, MISSING_PACKAGE_MAX_AGE).await
            }
            outcome => outcome,
        }
    }

    async fn choose_listed(
        &self,
        groups: &[Vec<String>],
        release: &KernelRelease,
        max_age: Duration,
    ) -> Result<Packages<ListedPackage>> {
        let (listings, errors) = self.listings(max_age).await;
        let (refused, mut error) = split_errors(errors, listings.is_empty());
        if let Some(error) = error.take_if(|_| self.requires_all) {
            return Err(error);
        }
        let missing_note = self.missing_note(&listings, &refused);
        let is_complete = refused.is_empty() && listings.iter().all(|listing| listing.revision.is_some());
        if self.requires_all && !is_complete {
            return Err(FetchError::permanent(
                format!("choose package {} for kernel {release}", groups.concat().join(" or ")),
                format!("not all repositories are available{missing_note}"),
            ));
        }
        let packages: Vec<RpmPackage> =
            listings.iter().flat_map(|listing| listing.packages.iter().cloned()).collect();
        let mut chosen = Vec::with_capacity(groups.len());
        for names in groups {
            let Some(package) = package::choose(&packages, names, release.as_str()) else {
                let missing = Packages::Missing(format!("{}{missing_note}", names.join(" or ")));
                return error.map_or(Ok(missing), Err);
            };
            let listing = listings.iter().find(|listing| listing.packages.contains(package));
            let urls = listing.map(|listing| listing.urls.clone()).unwrap_or_default();
            chosen.push(ListedPackage { package: package.clone(), urls });
        }
        Ok(Packages::Found(chosen))
    }

    /// Returns the kernels of each repository, in no particular order.
    pub async fn releases(&self) -> Result<Vec<Vec<KernelRelease>>> {
        let (listings, errors) = self.listings(self.fetcher.options.refresh).await;
        let releases = |listing: &Listing| {
            let releases = listing.packages.iter().flat_map(|package| &package.releases);
            releases.filter_map(|release| release.parse().ok()).collect()
        };
        let error = errors.into_iter().next().filter(|_| listings.is_empty());
        error.map_or_else(|| Ok(listings.iter().map(releases).collect()), Err)
    }

    /// Returns the listings of the repositories, and the errors. An error is not fatal: another repository may have the package,
    /// and an entitlement need not cover all repositories.
    async fn listings(&self, max_age: Duration) -> (Vec<Listing>, Vec<FetchError>) {
        let (mut listings, mut errors) = (Vec::new(), Vec::new());
        for repository in &self.urls {
            match self.listing(repository, max_age).await {
                Ok((listing, _)) => listings.push(listing),
                Err(error) => errors.push(error),
            }
        }
        (listings, errors)
    }

    /// Returns a note for messages about missing repositories and those that this site may not use.
    fn missing_note(&self, listings: &[Listing], refused: &[String]) -> String {
        let missing = listings.iter().filter(|listing| listing.revision.is_none());
        let missing = missing.filter_map(|listing| Some(format!("{} (missing)", listing.urls.first()?)));
        let unused: Vec<String> = self.no_address.iter().chain(refused).cloned().chain(missing).collect();
        if unused.is_empty() { String::new() } else { format!(", without {}", unused.join(", ")) }
    }

    /// Refreshes the listings unless they are very recent; returns whether any was refreshed.
    pub async fn renew(&self) -> Result<bool> {
        let mut any_refreshed = false;
        for repository in &self.urls {
            // Ignore an error here: the search for a missing package reports unreadable repositories.
            any_refreshed |= matches!(self.listing(repository, MISSING_PACKAGE_MAX_AGE).await, Ok((_, true)));
        }
        Ok(any_refreshed)
    }

    /// Downloads the packages' files, verified by checksum, and by signature if packages are signed.
    pub async fn download(&self, packages: &[ListedPackage]) -> Result<Vec<PathBuf>> {
        let mut files = Vec::with_capacity(packages.len());
        for ListedPackage { package, urls } in packages {
            let what = format!("package {}-{}", package.name, package.version);
            // A copy of a repository may have the package although its metadata names the original address.
            let mut all_urls =
                package.base.as_ref().map_or(Ok(Vec::new()), |base| base_urls(&self.fetcher.net, base))?;
            all_urls.extend(urls.iter().cloned());
            files.push(self.fetch(&all_urls, &what, &package.location, &package.checksum).await?);
        }
        if self.signed.covers_packages() {
            Box::pin(self.keys.verify_packages(&self.fetcher.cache.scratch()?, &files)).await?;
        }
        Ok(files)
    }

    /// Returns a repository's listing, not older than `max_age`, and whether it was refreshed.
    async fn listing(&self, repository: &RepositoryUrls, max_age: Duration) -> Result<(Listing, bool)> {
        let RepositoryUrls { is_list, urls } = repository;
        let kind = if *is_list { "listed" } else { "at" };
        let signed = if self.signed.covers_metadata() { "signed" } else { "" };
        let keys = self.keys.digest();
        let head = [FORMAT, self.arch.gnu_name(), signed, kind, &keys];
        let parts =
            head.into_iter().chain(urls.iter().map(Url::as_str)).chain(self.names.iter().map(String::as_str));
        let key = digest::of_parts(parts);
        let cache = &self.fetcher.cache;
        let is_fresh = |listing: &Listing| {
            now().checked_sub(listing.requested_at).is_some_and(|age| age < max_age.as_secs())
        };
        let recorded = cache.read_record::<Listing>(KIND, &key)?;
        if let Some(recorded) = recorded.filter(is_fresh) {
            return Ok((recorded, false));
        }
        let _lock = cache.lock(KIND, &key, LockMode::Exclusive).await?;
        let recorded = match cache.read_record::<Listing>(KIND, &key)? {
            // Another farrier refreshed the listing while this one waited.
            Some(recorded) if is_fresh(&recorded) => return Ok((recorded, true)),
            recorded => recorded,
        };
        let urls = if *is_list { Box::pin(self.mirrors(urls)).await? } else { urls.clone() };
        // Box this future, because it makes up much of the size of the many futures that contain it.
        let listing = Box::pin(self.fetch_listing(&urls, recorded)).await?;
        cache.write_record(KIND, &key, &listing)?;
        Ok((listing, true))
    }

    /// Returns the addresses in a list of mirrors.
    async fn mirrors(&self, lists: &[Url]) -> Result<Vec<Url>> {
        let (scratch, net) = (self.fetcher.cache.scratch()?, &self.fetcher.net);
        let file = scratch.path().join("mirrors");
        download_from_any(net, "the list of mirrors", lists, None, MAX_INDEX_SIZE, &file).await?;
        let mirrors = metadata::mirrors(&fs::read(&file)?).map_err(|source| {
            let first = lists.first().map(Url::to_string);
            FetchError::Metadata(first.unwrap_or_default(), source)
        })?;
        let mirrors = mirrors.iter().map(|text| parse_address(text, true)).collect::<Result<Vec<_>, _>>()?;
        Ok(mirrors.iter().flat_map(|url| net.url_candidates(url)).collect())
    }

    /// Returns the listing from the first address that answers, or an empty listing if no address has the repository.
    async fn fetch_listing(&self, urls: &[Url], recorded: Option<Listing>) -> Result<Listing> {
        let mut first_error = None;
        for url in urls {
            match self.read(url, recorded.as_ref()).await {
                Ok(Some(listing)) => {
                    let others = urls.iter().filter(|other| *other != url);
                    let urls = std::iter::once(url).chain(others).map(Url::to_string).collect();
                    return Ok(Listing { urls, ..listing });
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(repository = %url, error = %oci::error_chain(&error), "cannot read the repository");
                    // Of several errors, report the first one: the first address is the intended one.
                    first_error.get_or_insert(error);
                }
            }
        }
        if let Some(error) = first_error {
            return Err(error);
        }
        let urls = urls.iter().map(Url::to_string).collect();
        Ok(Listing { requested_at: now(), urls, ..Listing::default() })
    }

    /// Reads a listing; returns `None` if there is no repository. An index that names a missing file belongs to a repository that
    /// is being updated, which is an error.
    async fn read(&self, base: &Url, recorded: Option<&Listing>) -> Result<Option<Listing>> {
        let (scratch, net) = (self.fetcher.cache.scratch()?, &self.fetcher.net);
        let (index, url) = (scratch.path().join("repomd.xml"), join_below(base, "repodata/repomd.xml")?);
        let what = format!("the metadata of {base}");
        let revision = match transfer(net, &what, &url, None, MAX_INDEX_SIZE, index.clone()).await {
            Err(FetchError::Status(_, 404 | 410)) => return Ok(None),
            outcome => outcome?,
        };
        if self.signed.covers_metadata() {
            let (signature, url) =
                (scratch.path().join("repomd.xml.asc"), join_below(base, "repodata/repomd.xml.asc")?);
            let outcome = transfer(net, &what, &url, None, MAX_INDEX_SIZE, signature.clone()).await;
            outcome.map_err(|error| match error {
                FetchError::Status(url, 404 | 410) => FetchError::unusable(
                    format!("cannot verify {what}: there is no signature {url}"),
                    "if the packages are signed, set `signed: packages` in the family",
                ),
                error => error,
            })?;
            self.keys.verify_file(&scratch, &index, &signature, &what).await?;
        }
        let revision = Some(revision.to_string());
        if let Some(recorded) = recorded.filter(|recorded| recorded.revision == revision) {
            return Ok(Some(Listing { requested_at: now(), ..recorded.clone() }));
        }
        let index = BufReader::new(File::open(&index)?);
        let parts = metadata::repomd(index).map_err(|source| unreadable(&url, source))?;
        let packages = self.packages(base, &parts).await?;
        Ok(Some(Listing { requested_at: now(), revision, urls: Vec::new(), parts: Some(parts), packages }))
    }

    /// Returns the packages with the names in `self.names`. For packages that do not name their kernel, searches the lists of files.
    async fn packages(&self, base: &Url, repomd: &Repomd) -> Result<Vec<RpmPackage>> {
        if self.names.is_empty() {
            return Ok(Vec::new());
        }
        let (names, arch) = (self.names.clone(), self.arch);
        let is_selected = move |name: &str| names.iter().any(|pattern| matches_glob(pattern, name));
        let read = move |from: &mut dyn BufRead| metadata::primary(from, arch, &is_selected);
        let mut packages = self.part(base, &repomd.primary, read).await?;
        let unnamed = packages.iter().filter(|package| package.releases.is_empty());
        let unnamed: BTreeSet<String> = unnamed.map(|package| package.checksum.hex().to_owned()).collect();
        if let (Some(part), false) = (&repomd.filelists, unnamed.is_empty()) {
            let read = move |from: &mut dyn BufRead| {
                metadata::filelists(from, &unnamed.iter().map(String::as_str).collect())
            };
            let mut releases = self.part(base, part, read).await?;
            for package in &mut packages {
                package.releases.extend(releases.remove(package.checksum.hex()).unwrap_or_default());
            }
        }
        packages.iter_mut().for_each(RpmPackage::fill_missing_releases);
        Ok(packages)
    }

    /// Fetches and parses a metadata file.
    async fn part<T: Send + 'static>(
        &self,
        base: &Url,
        part: &Part,
        read: impl FnOnce(&mut dyn BufRead) -> Result<T, MetadataError> + Send + 'static,
    ) -> Result<T> {
        let url = join_below(base, &part.location)?;
        let what = format!("the metadata of {base}");
        let fetched = fetch_from(&self.fetcher, &what, std::slice::from_ref(&url), &part.checksum).await;
        let file = fetched.map_err(out_of_sync)?;
        stoppable(move |stop| {
            let opened = archive::decompressed(&file, stop);
            let mut from = opened.map_err(|source| FetchError::Unpack(what, source))?;
            read(&mut *from).map_err(|source| unreadable(&url, source))
        })
        .await
    }

    /// Fetches a file of a repository from the first address that has it.
    async fn fetch(
        &self,
        bases: &[String],
        what: &str,
        location: &str,
        checksum: &Checksum,
    ) -> Result<PathBuf> {
        let urls = bases.iter().map(|base| join_below(&parse_address(base, true)?, location));
        let urls = urls.collect::<Result<Vec<_>, _>>()?;
        Box::pin(fetch_from(&self.fetcher, what, &urls, checksum)).await.map_err(out_of_sync)
    }
}

/// Turns the absence of a file that the repository's index names into a transient error.
fn out_of_sync(error: FetchError) -> FetchError {
    match error {
        FetchError::Status(url, status @ (404 | 410)) => FetchError::Program {
            action: format!("download {url}"),
            message: format!(
                "the server answers {status}, although the repository's index names the file: the mirror is incomplete or is being updated"
            ),
            transient: true,
        },
        error => error,
    }
}

/// Separates errors: returns the repositories that the site may not use, for messages, and the first other error. An entitlement
/// need not cover all repositories, and another repository may have the kernel. If no repository answered, a refusal also
/// counts as an error.
fn split_errors(errors: Vec<FetchError>, none_answered: bool) -> (Vec<String>, Option<FetchError>) {
    let (mut refused, mut first_error) = (Vec::new(), None);
    for error in errors {
        match error {
            FetchError::Status(url, status @ (401 | 403)) if !none_answered => {
                refused.push(format!("{url} ({status})"));
            }
            error => drop(first_error.get_or_insert(error)),
        }
    }
    (refused, first_error)
}

/// Returns the parts that identify an archive for a version of the distribution.
pub(super) fn key_parts(archive: &RpmArchive, (version, arch): (&str, Architecture)) -> Vec<String> {
    let RpmArchive { repositories, signed_by, signed } = archive;
    let address = |repository: &RpmRepository| {
        let kind = match repository {
            RpmRepository::Url(_) => "url",
            RpmRepository::MirrorList(_) => "mirrors",
        };
        format!("{kind} {}", repository.address().expand(version, arch.gnu_name()))
    };
    let mut parts: Vec<String> = repositories.iter().map(address).collect();
    parts.push(format!("signed by {} {signed:?}", signed_by.display()));
    parts
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

fn unreadable(url: &Url, source: MetadataError) -> FetchError {
    FetchError::Metadata(url.to_string(), source)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_repository_that_the_site_may_not_ask_is_told_beside_what_others_lack() {
        let status = |status| FetchError::Status(format!("https://a.test/eus/{status}"), status);
        let (refused, fault) = split_errors(vec![status(403), status(401)], false);
        assert_eq!(refused, ["https://a.test/eus/403 (403)", "https://a.test/eus/401 (401)"]);
        assert!(fault.is_none());
        // No repository answered, so the refusal is the error to report.
        assert!(matches!(split_errors(vec![status(403)], true), (_, Some(FetchError::Status(_, 403)))));
        assert!(matches!(
            split_errors(vec![status(403), status(503)], false),
            (_, Some(FetchError::Status(_, 503)))
        ));
    }
}
