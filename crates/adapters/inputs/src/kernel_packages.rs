//! Finds a kernel's packages (headers or image) and unpacks them in the cache.

use std::path::{Path, PathBuf};

use farrier_core::{
    image::checked::RpmAlternatives,
    kernel::{AptSuites, Architecture, KernelTarget, RpmArchive},
};
use farrier_local::blocking::stoppable;
use farrier_yaml::similar;
use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::{
    FetchError, Fetcher, Lookup, Result, TREE,
    apt::{self, AptArchive, Packages, control::PackageRecord},
    digest,
    rpm::{self, ListedPackage, Repositories, package::names_for},
    unpack, with_release,
};

/// Parameters of a search for packages.
pub(super) struct Search<'a> {
    pub fetcher: &'a Fetcher,
    pub target: &'a KernelTarget,
    /// Kind of the cache entries and records.
    pub kind: &'static str,
    /// Format version; change it when the same packages are laid out differently.
    pub format: &'static str,
    pub from: Location<'a>,
    /// Whether to add dependencies from the same source package.
    pub with_dependencies: bool,
    /// Remedy if the packages are missing.
    pub hint: &'static str,
}

/// Location and names of packages. A search takes the first existing package of each group.
pub(super) enum Location<'a> {
    /// Suites. `{{release}}` is replaced by the kernel release.
    Apt(AptSuites, Vec<Vec<String>>),
    /// Repositories, whose key files are below the definitions directory. The packages themselves state their kernel.
    Rpm(&'a RpmArchive, &'a [RpmAlternatives]),
}

/// An archive of packages in one format. Each archive chooses and downloads only packages in its format.
trait Archive: Sync {
    type Package: Sync;

    /// Searches the packages of one kernel, with their dependencies if requested.
    fn search(
        &self,
        search: &Search<'_>,
        with_dependencies: bool,
    ) -> impl Future<Output = Result<Packages<Self::Package>>> + Send;

    /// Returns the kernels of the archive.
    fn releases(&self, search: &Search<'_>) -> impl Future<Output = Result<Vec<String>>> + Send;

    fn identity(package: &Self::Package) -> String;

    fn fetch(&self, packages: &[Self::Package]) -> impl Future<Output = Result<Vec<PathBuf>>> + Send;

    /// Refreshes the package lists unless they are recent; returns whether they were refreshed.
    fn update(&self) -> impl Future<Output = Result<bool>> + Send;
}

/// Record of a package tree. It is valid while the tree is in the cache: the packages of a kernel release do not change, and the
/// input hash should not change from day to day.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TreeRecord {
    /// Empty, like `arch`, in records of farrier versions that did not list their header sets.
    #[serde(default)]
    pub release: String,
    pub arch: Option<Architecture>,
    /// Key of the cache entry.
    pub key: String,
    pub origin: Vec<String>,
}

impl TreeRecord {
    /// Creates the record for a tree made from this content for a kernel.
    pub fn new(format: &str, target: &KernelTarget, content: &[String], origin: Vec<String>) -> Self {
        let key = key(format, target, content.iter());
        Self { release: target.release.to_string(), arch: Some(target.arch), key, origin }
    }
}

fn key<'a>(format: &'a str, target: &'a KernelTarget, parts: impl Iterator<Item = &'a String>) -> String {
    let head = [format, target.release.as_str(), target.arch.as_str()];
    digest::of_parts(head.into_iter().chain(parts.map(String::as_str)))
}

impl Search<'_> {
    /// Returns an earlier search result while its tree is in the cache.
    pub fn known(&self) -> Result<Option<TreeRecord>> {
        let cache = &self.fetcher.cache;
        let Some(record) = cache.read_record::<TreeRecord>(self.kind, &self.key()?)? else { return Ok(None) };
        Ok(cache.get(self.kind, &record.key)?.map(|_| record))
    }

    /// Whether the archive has the packages. Fetches nothing but its lists.
    pub(crate) async fn look_up_in_archive<T: Default>(&self) -> Result<Lookup<T>> {
        let Self { fetcher, target, .. } = *self;
        match &self.from {
            Location::Apt(suites, _) => {
                let archive = Box::pin(AptArchive::open(fetcher, suites, target.arch)).await?;
                Box::pin(self.look_up(&archive)).await
            }
            Location::Rpm(archive, groups) => match self.repositories(archive, groups)? {
                Ok(archive) => Box::pin(self.look_up(&archive)).await,
                Err(missing) => Ok(self.lookup(missing)),
            },
        }
    }

    async fn look_up<T: Default>(&self, archive: &impl Archive) -> Result<Lookup<T>> {
        Ok(match Box::pin(archive.search(self, false)).await? {
            Packages::Found(_) => Lookup::Found(T::default()),
            Packages::Missing(names) => {
                let near = self.nearest_in(archive).await.map(|near| format!(" (did you mean {near}?)"));
                self.lookup(self.looked_for(&names) + &near.unwrap_or_default())
            }
        })
    }

    /// Returns the packages' tree, from the cache or from the archive. `finish` processes the unpacked tree before it becomes an
    /// entry.
    pub async fn run(
        &self,
        finish: impl FnOnce(&Path) -> Result<()> + Send + 'static,
    ) -> Result<Lookup<TreeRecord>> {
        let Self { fetcher, target, .. } = *self;
        if let Some(record) = self.known()? {
            return Ok(Lookup::Found(record));
        }
        let lookup = match &self.from {
            Location::Apt(suites, _) => {
                let archive = Box::pin(AptArchive::open(fetcher, suites, target.arch)).await?;
                Box::pin(self.fetch_tree(&archive, finish)).await?
            }
            Location::Rpm(archive, groups) => match self.repositories(archive, groups)? {
                Ok(archive) => Box::pin(self.fetch_tree(&archive, finish)).await?,
                Err(missing) => self.lookup(missing),
            },
        };
        if let Lookup::Found(record) = &lookup {
            fetcher.cache.write_record(self.kind, &self.key()?, record)?;
        }
        Ok(lookup)
    }

    /// Returns the packages' tree. Fetches the packages even if the cache has their tree, because the fetch verifies signatures.
    async fn fetch_tree<A: Archive>(
        &self,
        archive: &A,
        finish: impl FnOnce(&Path) -> Result<()> + Send + 'static,
    ) -> Result<Lookup<TreeRecord>> {
        let cache = &self.fetcher.cache;
        let mut is_renewed = false;
        loop {
            let packages = match Box::pin(archive.search(self, self.with_dependencies)).await? {
                Packages::Found(packages) => packages,
                Packages::Missing(names) => {
                    let near = self.nearest_in(archive).await;
                    let near = near.map(|near| format!("did you mean {near}? Otherwise "));
                    let hint = near.unwrap_or_default() + self.hint;
                    return Ok(Lookup::Missing { looked_for: self.looked_for(&names), hint });
                }
            };
            let origin: Vec<String> = packages.iter().map(A::identity).collect();
            let record = TreeRecord::new(self.format, self.target, &origin.clone(), origin);
            let files = match Box::pin(archive.fetch(&packages)).await {
                Ok(files) => files,
                // A retry does not change the signature.
                Err(error @ FetchError::Signature { .. }) => return Err(error),
                // A mirror drops a package when a newer one replaces it, so the lists may be outdated.
                Err(_) if !is_renewed && archive.update().await? => {
                    is_renewed = true;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let names = record.origin.clone();
            let make = |dir: PathBuf| {
                stoppable(move |stop| {
                    let root = dir.join(TREE);
                    fs::create_dir(&root)?;
                    for (file, name) in files.iter().zip(&names) {
                        let name = name.split(' ').next().unwrap_or_default();
                        unpack(stop, file, &root, &format!("package {name}"))?;
                    }
                    finish(&root)
                })
            };
            cache.get_or_make(self.kind, &record.key, make).await?;
            return Ok(Lookup::Found(record));
        }
    }

    fn repositories(
        &self,
        archive: &RpmArchive,
        groups: &[RpmAlternatives],
    ) -> Result<Result<Repositories, String>> {
        Repositories::open(
            self.fetcher,
            archive,
            (&self.target.repository_version(), self.target.arch),
            groups,
        )
    }

    /// Returns a kernel that the archive has, if the release was probably mistyped.
    async fn nearest_in(&self, archive: &impl Archive) -> Option<String> {
        // Without the list there is no suggestion.
        let available = archive.releases(self).await.unwrap_or_default();
        let available = available.iter().map(String::as_str).collect();
        nearest_release(self.target.release.as_str(), available).map(str::to_owned)
    }

    /// Describes missing packages.
    fn looked_for(&self, names: &str) -> String {
        let arch = self.target.arch;
        match &self.from {
            Location::Apt(suites, _) => format!("package {names} ({arch}) in {}", suites.suites.join(", ")),
            Location::Rpm(..) => format!("package {names} ({arch}) for this kernel in the repositories"),
        }
    }

    /// Returns the finding that packages are missing.
    pub fn missing<T>(&self, names: &str) -> Lookup<T> {
        self.lookup(self.looked_for(names))
    }

    fn lookup<T>(&self, looked_for: String) -> Lookup<T> {
        Lookup::Missing { looked_for, hint: self.hint.to_owned() }
    }

    /// Returns the packages' names, by group.
    pub fn names(&self) -> Vec<Vec<String>> {
        let with_kernel_release = |name: &String| with_release(name, self.target);
        let release = self.target.release.as_str();
        match &self.from {
            Location::Apt(_, groups) => {
                groups.iter().map(|group| group.iter().map(with_kernel_release).collect()).collect()
            }
            Location::Rpm(_, groups) => groups.iter().map(|group| names_for(group, release)).collect(),
        }
    }

    fn key(&self) -> Result<String> {
        let (mut parts, signed_by) = match &self.from {
            Location::Apt(suites, _) => (apt::key_parts(suites), suites.signed_by.as_ref()),
            Location::Rpm(archive, ..) => (
                rpm::key_parts(archive, (&self.target.repository_version(), self.target.arch)),
                Some(&archive.signed_by),
            ),
        };
        parts.extend(self.fetcher.keys_digest(signed_by)?);
        let groups: Vec<String> = self.names().iter().map(|group| group.join(" | ")).collect();
        Ok(key(self.format, self.target, groups.iter().chain(&parts)))
    }
}

/// Returns the release with the shortest flavor or architecture if `release` has none, else the most similar release; of
/// several, the newest.
fn nearest_release<'a>(release: &str, mut known: Vec<&'a str>) -> Option<&'a str> {
    known.sort_by(|a, b| apt::version::compare(b, a));
    let has_flavor =
        |known: &&&str| known.strip_prefix(release).is_some_and(|rest| rest.starts_with(['-', '.', '+']));
    let with_flavor = known.iter().filter(has_flavor).min_by_key(|known| known.len()).copied();
    with_flavor.or_else(|| similar(release, known))
}

impl Archive for AptArchive {
    type Package = PackageRecord;

    async fn search(&self, search: &Search<'_>, with_dependencies: bool) -> Result<Packages> {
        let groups = search.names();
        if with_dependencies { self.closure(&groups).await } else { self.choose(&groups, None).await }
    }

    async fn releases(&self, search: &Search<'_>) -> Result<Vec<String>> {
        let (release, names) = (search.target.release.as_str(), search.names());
        let prefix = names.iter().flatten().find_map(|name| Some(name.split_once(release)?.0));
        let Some(prefix) = prefix else { return Ok(Vec::new()) };
        let names = self.names(prefix).await?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(prefix)).map(str::to_owned).collect())
    }

    fn identity(package: &PackageRecord) -> String {
        package.identity()
    }

    async fn fetch(&self, packages: &[PackageRecord]) -> Result<Vec<PathBuf>> {
        self.download(packages).await
    }

    async fn update(&self) -> Result<bool> {
        self.renew().await
    }
}

impl Archive for Repositories {
    type Package = ListedPackage;

    // The dependencies flag is ignored: the definition names each of a kernel's RPM packages.
    async fn search(&self, search: &Search<'_>, _: bool) -> Result<Packages<ListedPackage>> {
        self.choose(&search.names(), &search.target.release).await
    }

    async fn releases(&self, _: &Search<'_>) -> Result<Vec<String>> {
        let releases = Self::releases(self).await?;
        Ok(releases.iter().flatten().map(ToString::to_string).collect())
    }

    fn identity(listed: &ListedPackage) -> String {
        listed.package.identity()
    }

    async fn fetch(&self, packages: &[ListedPackage]) -> Result<Vec<PathBuf>> {
        self.download(packages).await
    }

    async fn update(&self) -> Result<bool> {
        self.renew().await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use farrier_local::cache::Cache;

    use super::*;
    use crate::FetchOptions;

    #[test]
    fn of_equally_near_kernels_the_newest_is_suggested() {
        let known = ["6.1.0-47-amd64", "6.1.0-57-amd64", "6.1.0-9-amd64", "6.1.0-57-cloud-amd64"];
        assert_eq!(nearest_release("6.1.0-77-amd64", known.into()), Some("6.1.0-57-amd64"));
        assert_eq!(nearest_release("6.1.0-46-amd64", known.into()), Some("6.1.0-47-amd64"));
        assert_eq!(nearest_release("5.10.0-acme", known.into()), None);
        assert_eq!(nearest_release("6.1.0-57", known.into()), Some("6.1.0-57-amd64"));
        assert_eq!(nearest_release("6.1.0-5", known.into()), None);
        let known = [
            "5.14.0-503.11.1.el9_5.x86_64",
            "5.14.0-503.11.1.el9_5.x86_64+rt",
            "5.14.0-503.15.1.el9_5.x86_64",
        ];
        assert_eq!(nearest_release("5.14.0-503.11.1.el9_5", known.into()), Some(known[0]));
        assert_eq!(nearest_release("5.14.0-503.16.1.el9_5.x86_64", known.into()), Some(known[2]));
    }

    /// An archive that lists a package but fails to fetch its file; counts the fetches.
    #[derive(Default)]
    struct Broken(AtomicUsize);

    impl Archive for Broken {
        type Package = ();

        async fn search(&self, _: &Search<'_>, _: bool) -> Result<Packages<()>> {
            Ok(Packages::Found(vec![()]))
        }

        async fn releases(&self, _: &Search<'_>) -> Result<Vec<String>> {
            Ok(Vec::new())
        }

        fn identity((): &()) -> String {
            "linux-image=6.1 sha256:1f".to_owned()
        }

        async fn fetch(&self, _: &[()]) -> Result<Vec<PathBuf>> {
            self.0.fetch_add(1, Ordering::Relaxed);
            Err(FetchError::Interrupted)
        }

        // As if the attempt took so long that the lists are outdated again.
        async fn update(&self) -> Result<bool> {
            Ok(true)
        }
    }

    #[tokio::test]
    async fn packages_are_asked_for_twice_at_most() {
        let dir = tempfile::tempdir().unwrap();
        let cache = Cache::open(dir.path().to_owned()).unwrap();
        let fetcher = Fetcher::new(cache, FetchOptions::default());
        let target = KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0-47-amd64".parse().unwrap(),
            arch: Architecture::Amd64,
        };
        let search = Search {
            fetcher: &fetcher,
            target: &target,
            kind: "headers",
            format: "1",
            from: Location::Apt(AptSuites::default(), Vec::new()),
            with_dependencies: false,
            hint: "",
        };
        let archive = Broken::default();
        let outcome = search.fetch_tree(&archive, |_| Ok(())).await;
        assert!(matches!(outcome, Err(FetchError::Interrupted)), "{outcome:?}");
        assert_eq!(archive.0.into_inner(), 2);
    }

    #[test]
    fn what_an_older_farrier_found_counts() {
        let found: TreeRecord =
            serde_json::from_str(r#"{"key": "1f", "origin": ["linux-image=6.1"]}"#).unwrap();
        assert_eq!(
            (found.key.as_str(), found.origin.as_slice()),
            ("1f", &["linux-image=6.1".to_owned()][..])
        );
        assert_eq!((found.release.as_str(), found.arch), ("", None), "older records have no release");
    }
}
