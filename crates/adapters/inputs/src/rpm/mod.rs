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

use address::{based, below, directory};
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
    download::{download_from_any, fetch_from, transfer},
    error::MetadataError,
};

/// Format version; change it when listings have another form.
const FORMAT: &str = "rpm-4";
/// Kind of the cache's records and locks.
const KIND: &str = "rpm";
/// Remedy for missing keys, or for a repository without any address.
pub const LACKING: &str = "add the distribution's keys, name mirrors of its repositories in site.yaml \
    (`mirrors`), or add the repository that has it to the family";
/// Maximum size of `repomd.xml`, a signature or a list of mirrors, in bytes.
const MAX_INDEX_SIZE: u64 = 4 << 20;

/// Repositories with packages of certain names, for one version and architecture of a distribution.
#[derive(Clone, Debug)]
pub struct Repositories {
    fetcher: Fetcher,
    arch: Architecture,
    signed: RpmSigned,
    keys: Keys,
    places: Vec<Place>,
    /// Names of packages, with `*` for a flavor or a release.
    names: Vec<String>,
    /// Repositories without an address, for messages.
    absent: Vec<String>,
    /// Whether all repositories must answer. An unreachable repository may have the newest package.
    all: bool,
}

/// Addresses of a repository, or of its list of mirrors.
#[derive(Clone, Debug)]
enum Place {
    At(Vec<Url>),
    Listed(Vec<Url>),
}

/// A package with the addresses of its repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub package: RpmPackage,
    places: Vec<String>,
}

/// Listing of one repository, as last fetched.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Listing {
    /// Time of the last request, in seconds since 1970.
    asked: u64,
    /// Digest of `repomd.xml`; `None` if there is no repository.
    revision: Option<String>,
    /// Addresses of the repository; the one that answered comes first.
    places: Vec<String>,
    /// Metadata files named in `repomd.xml`.
    parts: Option<Repomd>,
    /// Packages with the wanted names.
    packages: Vec<RpmPackage>,
}

impl Repositories {
    /// Opens the repositories for a version of the distribution, without contacting them yet. Missing keys, or a lack of any
    /// address, are a finding and not an error.
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
        let (mut places, mut absent) = (Vec::new(), Vec::new());
        for repository in &*archive.repositories {
            let is_list = matches!(repository, RpmRepository::MirrorList(_));
            let text = repository.address().expand(version, arch.gnu_name());
            let url = directory(&text, !is_list)?;
            let mut found = fetcher.net.url_candidates(&url);
            // RFC 6761: names below `invalid` never resolve, so definitions can use them as placeholders for the site's own
            // addresses.
            found.retain(|url| !url.host_str().is_some_and(|host| host.ends_with(".invalid")));
            if found.is_empty() {
                absent.push(format!("{text} (no mirror in site.yaml)"));
            } else {
                places.push(if is_list { Place::Listed(found) } else { Place::At(found) });
            }
        }
        if places.is_empty() {
            return Ok(Err(format!("repository {}", absent.join(", "))));
        }
        let names = groups.iter().flat_map(RpmAlternatives::names);
        let names = names.map(|name| name.replace("{{flavor}}", "*").replace("{{release}}", "*")).collect();
        let (fetcher, signed) = (fetcher.clone(), archive.signed);
        Ok(Ok(Self { fetcher, arch, signed, keys, places, names, absent, all: false }))
    }

    /// Chooses one package of each group for a kernel. Refreshes the listings before reporting a group as missing.
    pub async fn choose(&self, groups: &[Vec<String>], release: &KernelRelease) -> Result<Packages<Listed>> {
        let chosen = self.choose_now(groups, release, self.fetcher.options.refresh).await?;
        let again = matches!(chosen, Packages::Missing(_)) && self.renew().await?;
        if again { self.choose_now(groups, release, MISSING_PACKAGE_MAX_AGE).await } else { Ok(chosen) }
    }

    async fn choose_now(
        &self,
        groups: &[Vec<String>],
        release: &KernelRelease,
        max_age: Duration,
    ) -> Result<Packages<Listed>> {
        let (listings, faults) = self.listings(max_age).await;
        let (refused, mut fault) = sorted(faults, listings.is_empty());
        if let Some(fault) = fault.take_if(|_| self.all) {
            return Err(fault);
        }
        let without = self.without(&listings, &refused);
        let with_places = |listing: Listing| {
            let Listing { places, packages, .. } = listing;
            packages.into_iter().map(move |package| (package, places.clone()))
        };
        let known: Vec<_> = listings.into_iter().flat_map(with_places).collect();
        let packages: Vec<RpmPackage> = known.iter().map(|(package, _)| package.clone()).collect();
        let mut chosen = Vec::with_capacity(groups.len());
        for names in groups {
            let Some(package) = package::choose(&packages, names, release.as_str()) else {
                let missing = Packages::Missing(format!("{}{without}", names.join(" or ")));
                return fault.map_or(Ok(missing), Err);
            };
            let places = known.iter().find(|(known, _)| known == package).map(|(_, places)| places.clone());
            chosen.push(Listed { package: package.clone(), places: places.unwrap_or_default() });
        }
        Ok(Packages::Found(chosen))
    }

    /// Returns the kernels of each repository, in no particular order.
    pub async fn releases(&self) -> Result<Vec<Vec<KernelRelease>>> {
        let (listings, faults) = self.listings(self.fetcher.options.refresh).await;
        let releases = |listing: &Listing| {
            let releases = listing.packages.iter().flat_map(|package| &package.releases);
            releases.filter_map(|release| release.parse().ok()).collect()
        };
        let found: Vec<_> = listings.iter().map(releases).collect();
        faults.into_iter().find(|_| found.is_empty()).map_or(Ok(found), Err)
    }

    /// Returns the listings of the repositories, and the errors. An error is not fatal: another repository may have the package,
    /// and an entitlement need not cover all repositories.
    async fn listings(&self, max_age: Duration) -> (Vec<Listing>, Vec<FetchError>) {
        let (mut found, mut faults) = (Vec::new(), Vec::new());
        for place in &self.places {
            match self.listing(place, max_age).await {
                Ok((listing, _)) => found.push(listing),
                Err(error) => faults.push(error),
            }
        }
        (found, faults)
    }

    /// Returns a note for messages about missing repositories and those that this site may not use.
    fn without(&self, listings: &[Listing], refused: &[String]) -> String {
        let gone = listings.iter().filter(|listing| listing.revision.is_none());
        let gone = gone.filter_map(|listing| Some(format!("{} (not there)", listing.places.first()?)));
        let absent: Vec<String> = self.absent.iter().chain(refused).cloned().chain(gone).collect();
        if absent.is_empty() { String::new() } else { format!(", without {}", absent.join(", ")) }
    }

    /// Refreshes the listings unless they are very recent; returns whether any was refreshed.
    pub async fn renew(&self) -> Result<bool> {
        let mut asked = false;
        for place in &self.places {
            // Unreadable repositories are reported where a package is missing.
            asked |= self.listing(place, MISSING_PACKAGE_MAX_AGE).await.is_ok_and(|(_, asked)| asked);
        }
        Ok(asked)
    }

    /// Downloads the packages' files, verified by checksum, and by signature if packages are signed.
    pub async fn download(&self, packages: &[Listed]) -> Result<Vec<PathBuf>> {
        let mut files = Vec::with_capacity(packages.len());
        for Listed { package, places } in packages {
            let what = format!("package {}-{}", package.name, package.version);
            // A copy of a repository may have the package although its metadata names the original address.
            let mut all =
                package.base.as_ref().map_or(Ok(Vec::new()), |base| based(&self.fetcher.net, base))?;
            all.extend(places.iter().cloned());
            files.push(self.fetch(&all, &what, &package.location, &package.checksum).await?);
        }
        if self.signed.covers_packages() {
            Box::pin(self.keys.verify_packages(&self.fetcher.cache.scratch()?, &files)).await?;
        }
        Ok(files)
    }

    /// Returns a repository's listing, not older than `max_age`, and whether it was refreshed.
    async fn listing(&self, place: &Place, max_age: Duration) -> Result<(Listing, bool)> {
        let (kind, urls) = match place {
            Place::At(urls) => ("at", urls),
            Place::Listed(urls) => ("listed", urls),
        };
        let signed = if self.signed.covers_metadata() { "signed" } else { "" };
        let head = [FORMAT, self.arch.gnu_name(), signed, kind];
        let parts =
            head.into_iter().chain(urls.iter().map(Url::as_str)).chain(self.names.iter().map(String::as_str));
        let key = digest::of_parts(parts);
        let cache = &self.fetcher.cache;
        let fresh =
            |listing: &Listing| now().checked_sub(listing.asked).is_some_and(|age| age < max_age.as_secs());
        let known = cache.read_record::<Listing>(KIND, &key)?;
        if let Some(known) = known.filter(fresh) {
            return Ok((known, false));
        }
        let _lock = cache.lock(KIND, &key, LockMode::Exclusive).await?;
        let known = match cache.read_record::<Listing>(KIND, &key)? {
            // Another farrier refreshed the listing while this one waited.
            Some(known) if fresh(&known) => return Ok((known, true)),
            known => known,
        };
        let places = match place {
            Place::At(urls) => urls.clone(),
            Place::Listed(urls) => Box::pin(self.mirrors(urls)).await?,
        };
        // Boxed: many futures contain this one, and it makes up much of their size.
        let listing = Box::pin(self.ask(&places, known)).await?;
        cache.write_record(KIND, &key, &listing)?;
        Ok((listing, true))
    }

    /// Returns the addresses in a list of mirrors.
    async fn mirrors(&self, lists: &[Url]) -> Result<Vec<Url>> {
        let (scratch, net) = (self.fetcher.cache.scratch()?, &self.fetcher.net);
        let file = scratch.path().join("mirrors");
        download_from_any(net, "the list of mirrors", lists, None, MAX_INDEX_SIZE, &file).await?;
        let found = metadata::mirrors(&fs::read(&file)?).map_err(|source| {
            let first = lists.first().map(Url::to_string);
            FetchError::Metadata(first.unwrap_or_default(), source)
        })?;
        let found = found.iter().map(|text| directory(text, true)).collect::<Result<Vec<_>, _>>()?;
        Ok(found.iter().flat_map(|url| net.url_candidates(url)).collect())
    }

    /// Returns the listing from the first place that answers. A repository that no place has is a finding.
    async fn ask(&self, places: &[Url], known: Option<Listing>) -> Result<Listing> {
        let mut fault = None;
        for place in places {
            match self.read(place, known.as_ref()).await {
                Ok(Some(listing)) => {
                    let others = places.iter().filter(|other| *other != place);
                    return Ok(Listing {
                        places: std::iter::once(place).chain(others).map(Url::to_string).collect(),
                        ..listing
                    });
                }
                Ok(None) => {}
                Err(error) => {
                    tracing::debug!(repository = %place, error = %oci::error_chain(&error), "cannot read the repository");
                    // Of several errors, report the first one: the first place is the intended one.
                    fault.get_or_insert(error);
                }
            }
        }
        fault.map_or_else(|| Ok(Listing::absent(places)), Err)
    }

    /// Reads a listing; returns `None` if there is no repository. An index that names a missing file belongs to a repository that
    /// is being updated, which is an error.
    async fn read(&self, place: &Url, known: Option<&Listing>) -> Result<Option<Listing>> {
        let (scratch, net) = (self.fetcher.cache.scratch()?, &self.fetcher.net);
        let (index, url) = (scratch.path().join("repomd.xml"), below(place, "repodata/repomd.xml")?);
        let what = format!("the metadata of {place}");
        let revision = match transfer(net, &what, &url, None, MAX_INDEX_SIZE, index.clone()).await {
            Err(FetchError::Status(_, 404 | 410)) => return Ok(None),
            got => got?,
        };
        if self.signed.covers_metadata() {
            let (signature, url) =
                (scratch.path().join("repomd.xml.asc"), below(place, "repodata/repomd.xml.asc")?);
            let got = transfer(net, &what, &url, None, MAX_INDEX_SIZE, signature.clone()).await;
            got.map_err(|error| match error {
                FetchError::Status(url, 404 | 410) => FetchError::unusable(
                    format!("verify {what}: there is no signature {url}"),
                    "if the packages are signed, set `signed: packages` in the family",
                ),
                error => error,
            })?;
            self.keys.verify_file(&scratch, &index, &signature, &what).await?;
        }
        let revision = Some(revision.to_string());
        if let Some(known) = known.filter(|known| known.revision == revision) {
            return Ok(Some(Listing { asked: now(), ..known.clone() }));
        }
        let index = BufReader::new(File::open(&index)?);
        let parts = metadata::repomd(index).map_err(|source| unreadable(&url, source))?;
        let packages = self.packages(place, &parts).await?;
        Ok(Some(Listing { asked: now(), revision, places: Vec::new(), parts: Some(parts), packages }))
    }

    /// Returns the packages with the wanted names. For packages that do not name their kernel, the lists of files are searched.
    async fn packages(&self, place: &Url, repomd: &Repomd) -> Result<Vec<RpmPackage>> {
        if self.names.is_empty() {
            return Ok(Vec::new());
        }
        let (names, arch) = (self.names.clone(), self.arch);
        let wanted = move |name: &str| names.iter().any(|pattern| matches_glob(pattern, name));
        let read = move |from: &mut dyn BufRead| metadata::primary(from, arch, &wanted);
        let mut packages = self.part(place, &repomd.primary, read).await?;
        let silent = packages.iter().filter(|package| package.releases.is_empty());
        let silent: BTreeSet<String> = silent.map(|package| package.checksum.hex().to_owned()).collect();
        if let (Some(part), false) = (&repomd.filelists, silent.is_empty()) {
            let read = move |from: &mut dyn BufRead| {
                metadata::filelists(from, &silent.iter().map(String::as_str).collect())
            };
            let mut told = self.part(place, part, read).await?;
            for package in &mut packages {
                package.releases.extend(told.remove(package.checksum.hex()).unwrap_or_default());
            }
        }
        packages.iter_mut().for_each(RpmPackage::releases_by_version);
        Ok(packages)
    }

    /// Fetches and parses a metadata file.
    async fn part<T: Send + 'static>(
        &self,
        place: &Url,
        part: &Part,
        read: impl FnOnce(&mut dyn BufRead) -> Result<T, MetadataError> + Send + 'static,
    ) -> Result<T> {
        let url = below(place, &part.location)?;
        let what = format!("the metadata of {place}");
        let file = fetch_from(&self.fetcher, &what, std::slice::from_ref(&url), &part.checksum).await?;
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
        places: &[String],
        what: &str,
        location: &str,
        checksum: &Checksum,
    ) -> Result<PathBuf> {
        let places = places.iter().map(|place| below(&directory(place, true)?, location));
        let places = places.collect::<Result<Vec<_>, _>>()?;
        Box::pin(fetch_from(&self.fetcher, what, &places, checksum)).await
    }
}

/// Separates errors: returns the repositories that the site may not use, for messages, and the first other error. If no
/// repository answered, a refusal counts as an error too. An entitlement need not cover all repositories, and another one may
/// have the kernel.
fn sorted(faults: Vec<FetchError>, none_answered: bool) -> (Vec<String>, Option<FetchError>) {
    let (mut refused, mut fault) = (Vec::new(), None);
    for error in faults {
        match error {
            FetchError::Status(url, status @ (401 | 403)) if !none_answered => {
                refused.push(format!("{url} ({status})"));
            }
            error => drop(fault.get_or_insert(error)),
        }
    }
    (refused, fault)
}

impl Listing {
    fn absent(places: &[Url]) -> Self {
        Self {
            asked: now(),
            revision: None,
            places: places.iter().map(Url::to_string).collect(),
            parts: None,
            packages: Vec::new(),
        }
    }
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
        let (refused, fault) = sorted(vec![status(403), status(401)], false);
        assert_eq!(refused, ["https://a.test/eus/403 (403)", "https://a.test/eus/401 (401)"]);
        assert!(fault.is_none());
        // No repository answered, so the refusal is the error to report.
        assert!(matches!(sorted(vec![status(403)], true), (_, Some(FetchError::Status(_, 403)))));
        assert!(matches!(
            sorted(vec![status(403), status(503)], false),
            (_, Some(FetchError::Status(_, 503)))
        ));
    }
}
