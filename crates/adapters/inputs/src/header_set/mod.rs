//! Header sets from distribution packages, from published files and images, and from imports.

pub mod import;
mod layout;
mod published;
mod stored;

use std::path::{Path, PathBuf};

use farrier_core::{
    image::Digest,
    kernel::{
        AptSuites, Architecture, Compiler, FurtherRpmPackages, HeaderSource, HeaderText, KernelRelease,
        KernelTarget, TrackedSuites,
    },
};
use farrier_local::{blocking::stoppable, cache::Cache};
use farrier_store::StoreError;
use kmod::KernelFacts;
use published::Published;
pub use stored::ListedHeaders;

use super::{
    FetchError, Fetcher, Lookup, Result, TREE,
    apt::{AptArchive, control},
    header_tree::{TreeError, read_header, read_header_set},
    kernel_packages::{Location, Search, TreeRecord},
    rpm::{self, Repositories},
};

/// Format version of the unpacked tree. Change it when the same packages or the same file give a different tree.
const FORMAT: &str = "header-set-1";
/// Kind of the cache entries.
const KIND: &str = "headers";
/// Name prefix of Debian header packages; the release follows.
const PACKAGE: &str = "linux-headers-";

/// One kernel's build tree, unpacked in the cache.
#[derive(Clone, Debug)]
pub struct HeaderSet {
    /// The tree, rooted at `/`: `usr/src/...`, `usr/lib/modules/<release>/build`. It has no `lib` directory, so that it fits over
    /// a root file system in which `/lib` is a symbolic link.
    pub root: PathBuf,
    /// Facts that the check needs.
    pub facts: KernelFacts,
    /// Parsed `CONFIG_CC_VERSION_TEXT`; `None` if the tree does not have it.
    pub compiler: Option<Compiler>,
    /// Packages and versions, or file and digest, for provenance.
    pub origin: Vec<String>,
    /// Key of the entry in the cache.
    pub key: String,
    /// Contribution to input hashes besides the definition and the release; `None` if those two determine the content. Always
    /// `None` for sets that are only listed.
    pub identity: Option<String>,
    /// Content digest of a set that was imported or comes from the store.
    pub content: Option<Digest>,
    /// Content digest if neither a signature nor a package archive authenticates the content. Input hashes then include it.
    pub unverified: Option<Digest>,
}

/// Identity of headers, known before they are fetched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderIdentity {
    /// See [`HeaderSet::identity`].
    pub identity: Option<String>,
    /// See [`HeaderSet::unverified`].
    pub unverified: Option<Digest>,
    /// Compiler that built the kernel, if user-provided headers state it.
    pub compiler: Option<Compiler>,
    /// Reason and remedy if the stored header set is refused. `identity` is then an unverified claim.
    pub refused: Option<String>,
    /// Published file or image that the kernel family names but that does not exist.
    pub missing: Option<String>,
}

/// Result of a search for headers.
pub type HeaderLookup = Lookup<Box<HeaderSet>>;

/// Access to header sets.
#[derive(Clone, Copy)]
pub struct Headers<'a>(pub(super) &'a Fetcher);

impl<'a> Headers<'a> {
    /// Finds the target's headers: imported ones first, then those from the family's own source.
    pub async fn find(self, source: &HeaderSource, target: &KernelTarget) -> Result<HeaderLookup> {
        match self.imported(target).await? {
            Some(imported) => self.load_imported(&imported, target).await,
            None => self.find_upstream(source, target).await,
        }
    }

    /// Finds the target's headers in the cache or the family's own source, without a request to the store.
    async fn find_without_store(self, source: &HeaderSource, target: &KernelTarget) -> Result<HeaderLookup> {
        match self.imported_here(&target.release, target.arch)? {
            Some(imported) => self.load_imported(&imported, target).await,
            None => self.find_upstream(source, target).await,
        }
    }

    async fn find_upstream(self, source: &HeaderSource, target: &KernelTarget) -> Result<HeaderLookup> {
        let KernelTarget { release, arch, .. } = target;
        let describe = || format!("headers of {release} ({arch})");
        let lookup = match self.package_search(source, target) {
            Some(search) => {
                let found = fetch_packages(&search).await;
                self.0.explain_if_offline(found, describe)?.map(|found| (found, None))
            }
            None => Box::pin(self.fetch_published(source, target)).await?,
        };
        match lookup {
            Lookup::Found((found, identity)) => self.load(found, identity, target).await,
            Lookup::Missing { looked_for, hint } => {
                Ok(Lookup::Missing { looked_for, hint: append_import_hint(&hint, release) })
            }
        }
    }

    /// Returns the identity of the target's headers: the digest of an import, of a user-provided file, or of a published image or
    /// file. With the definition and the release, the identity determines the content. Packages have no identity, because the
    /// release determines their content (decision 0002).
    pub async fn identity(self, source: &HeaderSource, target: &KernelTarget) -> Result<HeaderIdentity> {
        let imported = match self.imported(target).await {
            Err(FetchError::Store(error @ StoreError::Untrusted(..))) => {
                return self.refused(target, &error).await;
            }
            found => found?,
        };
        if let Some(imported) = imported {
            let unverified = imported.unverified();
            return Ok(HeaderIdentity {
                identity: imported.identity,
                unverified,
                compiler: imported.compiler.as_deref().and_then(Compiler::from_name),
                ..HeaderIdentity::default()
            });
        }
        let none = HeaderIdentity::default();
        Ok(match self.published(source, target).await? {
            Some(Lookup::Found(Published { digest, .. })) => {
                let compiler = match source {
                    // Ignore a faulty tarball here: the build reports the fault.
                    HeaderSource::Tarball(_) => match self.find_without_store(source, target).await {
                        Ok(Lookup::Found(set)) => set.compiler,
                        Ok(Lookup::Missing { .. }) => None,
                        Err(error) if error.is_usage() && !matches!(error, FetchError::Net(_)) => None,
                        Err(error) => return Err(error),
                    },
                    _ => None,
                };
                HeaderIdentity { identity: Some(digest), compiler, ..none }
            }
            Some(Lookup::Missing { looked_for, .. }) => HeaderIdentity { missing: Some(looked_for), ..none },
            None => none,
        })
    }

    /// Looks for the published headers of a kernel. Returns `None` for headers from packages.
    async fn published(
        self,
        source: &HeaderSource,
        target: &KernelTarget,
    ) -> Result<Option<Lookup<Published>>> {
        let describe = || format!("headers of {} ({})", target.release, target.arch);
        self.0.explain_if_offline(published::look_up(self.0, source, target).await, describe)
    }

    /// Returns the header sets in the cache, sorted by release. Skips unreadable sets.
    pub async fn in_cache(self) -> Result<Vec<HeaderSet>> {
        let cache = self.0.cache.clone();
        stoppable(move |_| {
            let mut sets = Vec::new();
            for found in cache.records::<TreeRecord>(KIND)? {
                let (Ok(release), Some(arch)) = (found.release.parse(), found.arch) else { continue };
                // Read the entry without marking it as in use.
                match read(&cache, found, &release, arch) {
                    Ok(set) => sets.push(set),
                    Err(FetchError::Tree(_)) => {}
                    Err(error) => return Err(error),
                }
            }
            sets.sort_by(|a, b| (&a.facts.release, &a.key).cmp(&(&b.facts.release, &b.key)));
            sets.dedup_by(|a, b| a.key == b.key);
            Ok(sets)
        })
        .await
    }

    /// Returns the releases for which the suites have packages `linux-headers-<release>`, in no particular order. Archive,
    /// components and keyring are taken from `headers` if it names them.
    pub async fn releases(
        self,
        headers: &HeaderSource,
        tracked: &TrackedSuites,
        arch: Architecture,
    ) -> Result<Vec<KernelRelease>> {
        let defaults = match headers {
            HeaderSource::Apt(apt) => apt.apt_suites(),
            _ => AptSuites::default(),
        };
        let suites = AptSuites { suites: tracked.suites.to_vec(), ..defaults };
        let names = AptArchive::open(self.0, &suites, arch).await?.names(PACKAGE).await?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(PACKAGE)?.parse().ok()).collect())
    }

    /// Returns, for each repository, the kernels that it has packages for, in no particular order. The inner `Err` names what is
    /// missing if the family has no repositories. The release in `platform` is ignored.
    pub async fn rpm_releases(
        self,
        headers: &HeaderSource,
        tracked: &FurtherRpmPackages,
        platform: &KernelTarget,
    ) -> Result<Result<Vec<Vec<KernelRelease>>, String>> {
        let Some(archive) = tracked.archive(headers.rpm_archive()) else {
            return Ok(Err("repositories in the family".to_owned()));
        };
        match Repositories::open(
            self.0,
            archive,
            (&platform.repository_version(), platform.arch),
            &tracked.packages,
        )? {
            Ok(repositories) => Ok(Ok(repositories.releases().await?)),
            Err(missing) => Ok(Err(missing)),
        }
    }

    /// Checks whether headers exist for the kernel, and returns the kernel's compiler if it is already known. Packages are only
    /// looked up by name. Neither packages nor stored header sets are fetched.
    pub async fn look(
        self,
        source: &HeaderSource,
        target: &KernelTarget,
    ) -> Result<Lookup<Option<Compiler>>> {
        if let Some(stored) = self.in_store_for(target).await? {
            return Ok(Lookup::Found(stored::compiler_of(&stored)));
        }
        if self.imported_here(&target.release, target.arch)?.is_none() {
            if matches!(source, HeaderSource::Oci(_) | HeaderSource::Url(_))
                && let Some(published) = self.published(source, target).await?
            {
                return Ok(published.map(|_| None));
            }
            if let Some(search) = self.package_search(source, target) {
                if let Some(missing) = invalid_package_name(&search) {
                    return Ok(missing);
                }
                if search.known()?.is_none() {
                    return search.look_up_in_archive().await;
                }
            }
        }
        Ok(self.find_without_store(source, target).await?.map(|set| set.compiler))
    }

    /// Returns, for each of the texts, whether the kernel's headers contain it.
    pub async fn contain_texts(
        self,
        source: &HeaderSource,
        target: &KernelTarget,
        texts: &[HeaderText],
    ) -> Result<Lookup<Vec<bool>>> {
        let set = match self.find(source, target).await? {
            Lookup::Found(set) => set,
            Lookup::Missing { looked_for, hint } => return Ok(Lookup::Missing { looked_for, hint }),
        };
        let (release, texts) = (target.release.clone(), texts.to_vec());
        let contained = stoppable(move |_| {
            let contains = |text: &HeaderText| {
                let found = read_header(&set.root, &release, &text.header).map_err(TreeError::Io)?;
                Ok::<_, FetchError>(found.is_some_and(|found| text.is_match(&found)))
            };
            texts.iter().map(contains).collect::<Result<Vec<_>, _>>()
        });
        Ok(Lookup::Found(contained.await?))
    }

    /// Returns the search for headers in packages; `None` for headers that are not packages.
    fn package_search(self, source: &'a HeaderSource, target: &'a KernelTarget) -> Option<Search<'a>> {
        let (from, with_dependencies, hint) = match source {
            HeaderSource::Apt(apt) => {
                let names = apt.packages.iter().map(|name| vec![name.to_string()]).collect();
                let hint =
                    "add the suite that has it to the family's `suites`, or provide the headers as a tarball";
                (Location::Apt(apt.apt_suites(), names), true, hint)
            }
            HeaderSource::Rpm(rpm) => (Location::Rpm(&rpm.from, &rpm.packages), false, rpm::HINT),
            HeaderSource::Tarball(_) | HeaderSource::Oci(_) | HeaderSource::Url(_) => return None,
        };
        let (fetcher, kind, format) = (self.0, KIND, FORMAT);
        Some(Search { fetcher, target, kind, format, from, with_dependencies, hint })
    }

    /// Returns the published header set with its digest.
    async fn fetch_published(
        self,
        source: &HeaderSource,
        target: &KernelTarget,
    ) -> Result<Lookup<(TreeRecord, Option<String>)>> {
        let describe = || format!("headers of {} ({})", target.release, target.arch);
        Ok(match self.published(source, target).await? {
            Some(Lookup::Found(published)) => {
                let digest = published.digest.clone();
                let fetched = published::fetch(self.0, published, target).await;
                Lookup::Found((self.0.explain_if_offline(fetched, describe)?, Some(digest)))
            }
            Some(Lookup::Missing { looked_for, hint }) => Lookup::Missing { looked_for, hint },
            // Not reached: `find_upstream` fetches packages itself.
            None => Lookup::Missing { looked_for: describe(), hint: String::new() },
        })
    }

    async fn load(
        self,
        found: TreeRecord,
        identity: Option<String>,
        target: &KernelTarget,
    ) -> Result<HeaderLookup> {
        let (cache, KernelTarget { release, arch, .. }) = (self.0.cache.clone(), target.clone());
        let set = stoppable(move |_| read(&cache, found, &release, arch)).await?;
        Ok(Lookup::Found(Box::new(HeaderSet { identity, ..set })))
    }
}

/// Fetches header packages and unpacks them.
async fn fetch_packages(search: &Search<'_>) -> Result<Lookup<TreeRecord>> {
    if let Some(missing) = invalid_package_name(search) {
        return Ok(missing);
    }
    let (target, is_rpm) = (search.target.clone(), matches!(search.from, Location::Rpm(..)));
    let finish = move |root: &Path| {
        layout::merge_usr(root)?;
        if is_rpm {
            // The `build` link to the headers may be part of the kernel's own package instead of the header package.
            layout::link_build(root, &target.release)?;
        }
        verify(root, &target)
    };
    search.run(finish).await
}

/// Reads a header set in the cache.
fn read(cache: &Cache, found: TreeRecord, release: &KernelRelease, arch: Architecture) -> Result<HeaderSet> {
    let TreeRecord { release: _, arch: _, key, origin } = found;
    let root = cache.entry_path(KIND, &key)?.join(TREE);
    let (facts, compiler) = read_header_set(&root, release, arch)?;
    let (identity, content, unverified) = (None, None, None);
    Ok(HeaderSet { root, facts, compiler, origin, key, identity, content, unverified })
}

/// Returns a `Missing` result if the release gives an invalid Debian package name. RPM packages always have valid names, because
/// their names do not contain the release.
fn invalid_package_name<T>(search: &Search<'_>) -> Option<Lookup<T>> {
    let names = match search.from {
        Location::Apt(..) => search.names(),
        Location::Rpm(..) => return None,
    };
    let name = names.iter().flatten().find(|name| !control::is_package_name(name))?;
    let hint = "no package can have this name: provide the headers as a tarball, in a separate kernel family";
    Some(match search.missing(name) {
        Lookup::Missing { looked_for, hint: _ } => Lookup::Missing { looked_for, hint: hint.to_owned() },
        found @ Lookup::Found(_) => found,
    })
}

/// Appends to the hint the remedy that works for every kernel family: an import of the headers.
fn append_import_hint(hint: &str, release: &KernelRelease) -> String {
    format!(
        "{hint}; or import them: `farrier headers import SOURCE... --kernel {release}`, or on a node that runs this kernel \
         `farrier headers collect`, both with --registry"
    )
}

/// Checks that the tree is the target's header set, before the tree becomes a cache entry.
fn verify(root: &Path, target: &KernelTarget) -> Result<()> {
    read_header_set(root, &target.release, target.arch)?;
    Ok(())
}
