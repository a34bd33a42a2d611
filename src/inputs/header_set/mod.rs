//! Adapter: header sets from packages and from files that the user brings.

pub mod import;
mod layout;
mod published;
mod stored;

use std::path::{Path, PathBuf};

use published::Published;
pub use stored::ListedHeaders;

use super::{
    CARRY, FetchError, Fetcher, Lookup, Result, TREE,
    apt::{AptArchive, control},
    header_tree::{read_header, read_header_set},
    kernel_packages::{Found, Place, Search},
    rpm::{self, Repositories},
};
use crate::{
    blocking::stoppable,
    cache::Cache,
    image::Digest,
    kernel::{
        AptHeaders, AptSuites, Architecture, Compiler, FurtherRpmPackages, HeaderSource, HeaderText,
        KernelRelease, KernelTarget, RpmPackages, TrackedSuites,
    },
    kmod::KernelFacts,
    store::StoreError,
};

/// Changes when the same packages or file are laid out differently.
const FORMAT: &str = "header-set-1";
/// The kind of the cache's entries.
const KIND: &str = "headers";
/// What header packages are called before the release.
const PACKAGE: &str = "linux-headers-";

/// One kernel's build tree, unpacked in the cache.
#[derive(Clone, Debug)]
pub struct HeaderSet {
    /// The tree, rooted at `/`: `usr/src/...`, `usr/lib/modules/<release>/build`. It has no `lib` of its
    /// own, so that it can be put over a root file system in which `/lib` is a symbolic link.
    pub root: PathBuf,
    /// What the check needs to know.
    pub facts: KernelFacts,
    /// `CONFIG_CC_VERSION_TEXT`, parsed; `None` where the tree has none.
    pub compiler: Option<Compiler>,
    /// Packages and versions, or file and digest: for provenance.
    pub origin: Vec<String>,
    /// Its entry in the cache.
    pub key: String,
    /// What goes into input hashes beyond the definition and the release; `None` where these say it all. Sets that are
    /// only listed have none.
    pub identity: Option<String>,
    /// Digest of the content of a set that was imported or comes from the store.
    pub content: Option<Digest>,
    /// The same where no key and no archive vouches for it: then it counts in input hashes.
    pub unverified: Option<Digest>,
}

/// What headers are, before they are fetched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeaderIdentity {
    /// As [`HeaderSet::identity`].
    pub identity: Option<String>,
    /// As [`HeaderSet::unverified`].
    pub unverified: Option<Digest>,
    /// What built the kernel, of headers that the user brings, where they say so.
    pub compiler: Option<Compiler>,
    /// Why nothing can be built with what the store has, whose identity is only said; and what to do.
    pub refused: Option<String>,
    /// The file of a family's that is not there: then there are no headers.
    pub missing: Option<String>,
}

/// What became of a search for headers.
pub type HeaderLookup = Lookup<Box<HeaderSet>>;

/// Header sets.
#[derive(Clone, Copy)]
pub struct Headers<'a>(pub(super) &'a Fetcher);

impl<'a> Headers<'a> {
    /// Looks for the target's headers: imported ones first, else from the family's own source.
    pub async fn find(self, source: &HeaderSource, target: &KernelTarget) -> Result<HeaderLookup> {
        match self.imported(target).await? {
            Some(imported) => self.load_imported(&imported, target).await,
            None => self.find_in(source, target).await,
        }
    }

    /// The same without the store.
    async fn find_here(self, source: &HeaderSource, target: &KernelTarget) -> Result<HeaderLookup> {
        match self.imported_here(&target.release, target.arch)? {
            Some(imported) => self.load_imported(&imported, target).await,
            None => self.find_in(source, target).await,
        }
    }

    async fn find_in(self, source: &HeaderSource, target: &KernelTarget) -> Result<HeaderLookup> {
        let KernelTarget { release, arch, .. } = target;
        let what = || format!("headers of {release} ({arch})");
        let lookup = match source {
            HeaderSource::Apt(apt) => {
                let found = self.in_packages(apt, target).await;
                self.0.unless_kept(found, what, CARRY)?.map(|found| (found, None))
            }
            HeaderSource::Rpm(rpm) => {
                let found = self.in_rpms(rpm, target).await;
                self.0.unless_kept(found, what, CARRY)?.map(|found| (found, None))
            }
            HeaderSource::Tarball(_) | HeaderSource::Oci(_) | HeaderSource::Url(_) => {
                Box::pin(self.take_published(source, target)).await?
            }
        };
        match lookup {
            Lookup::Found((found, identity)) => self.load(found, identity, target).await,
            Lookup::Missing { looked_for, hint } => {
                Ok(Lookup::Missing { looked_for, hint: or_import(&hint, release) })
            }
        }
    }

    /// What decides the content of the target's headers beyond the definition and the release: the digest
    /// of what was imported, of the file that the user brings, or of the image or file that is published. Nothing for packages,
    /// whose release says it all (decision 0002). Where there is no file or image yet, nothing can be built.
    pub async fn identity(self, source: &HeaderSource, target: &KernelTarget) -> Result<HeaderIdentity> {
        let imported = match self.imported(target).await {
            Err(FetchError::Store(refused @ StoreError::Untrusted(..))) => {
                return self.refused(target, &refused).await;
            }
            found => found?,
        };
        if let Some(imported) = imported {
            let unverified = imported.unverified();
            return Ok(HeaderIdentity {
                identity: imported.identity,
                unverified,
                compiler: imported.compiler.as_deref().and_then(Compiler::named),
                ..HeaderIdentity::default()
            });
        }
        let none = HeaderIdentity::default();
        Ok(match self.published(source, target).await? {
            Some(Lookup::Found(Published { digest, .. })) => {
                let compiler = match source {
                    // What is wrong with it is told where it is used.
                    HeaderSource::Tarball(_) => match self.find_here(source, target).await {
                        Ok(Lookup::Found(set)) => set.compiler,
                        Ok(Lookup::Missing { .. })
                        | Err(FetchError::Tree(_) | FetchError::Unusable { .. }) => None,
                        Err(error) if !matches!(error, FetchError::Unpack(..)) || !error.is_usage() => {
                            return Err(error);
                        }
                        Err(_) => None,
                    },
                    _ => None,
                };
                HeaderIdentity { identity: Some(digest), compiler, ..none }
            }
            Some(Lookup::Missing { looked_for, .. }) => HeaderIdentity { missing: Some(looked_for), ..none },
            None => none,
        })
    }

    /// What there is of a kernel's headers at this moment, where they are no packages.
    async fn published(
        self,
        source: &HeaderSource,
        target: &KernelTarget,
    ) -> Result<Option<Lookup<Published>>> {
        let what = || format!("headers of {} ({})", target.release, target.arch);
        self.0.unless_kept(published::look(self.0, source, target).await, what, CARRY)
    }

    /// The header sets in the cache, by release. One that cannot be read any more is left out.
    pub async fn in_cache(self) -> Result<Vec<HeaderSet>> {
        let cache = self.0.cache.clone();
        stoppable(move |_| {
            let mut sets = Vec::new();
            for found in cache.records::<Found>(KIND)? {
                let (Ok(release), Some(arch)) = (found.release.parse(), found.arch) else { continue };
                // Looked at, and not used.
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

    /// The releases that packages `linux-headers-<release>` of the suites are for, in no order. Archive, components and
    /// keyring are those that `headers` names, where it names some.
    pub async fn releases(
        self,
        headers: &HeaderSource,
        tracked: &TrackedSuites,
        arch: Architecture,
    ) -> Result<Vec<KernelRelease>> {
        let known = match headers {
            HeaderSource::Apt(apt) => apt.apt_suites(),
            _ => AptSuites::default(),
        };
        let wanted = AptSuites { suites: tracked.suites.to_vec(), ..known };
        let names = AptArchive::open(self.0, &wanted, arch).await?.names(PACKAGE).await?;
        Ok(names.iter().filter_map(|name| name.strip_prefix(PACKAGE)?.parse().ok()).collect())
    }

    /// The kernels that each repository has packages of, in no order; the target's own release does not count. Where
    /// there is nothing to ask, what is missing.
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

    /// Are there headers for the kernel? With the compiler that built it, where that is known already: packages are asked for by
    /// name, and neither they nor what the store has is fetched.
    pub async fn look(
        self,
        source: &HeaderSource,
        target: &KernelTarget,
    ) -> Result<Lookup<Option<Compiler>>> {
        if let Some(stored) = self.in_store(&target.release, target.arch).await? {
            return Ok(Lookup::Found(stored::compiler_of(&stored)));
        }
        if self.imported_here(&target.release, target.arch)?.is_none() {
            let suites = match source {
                HeaderSource::Apt(apt) => apt.apt_suites(),
                _ => AptSuites::default(),
            };
            let search = match source {
                HeaderSource::Apt(apt) => Some(self.search(apt, &suites, target)),
                HeaderSource::Rpm(rpm) => Some(self.rpm_search(rpm, target)),
                HeaderSource::Tarball(_) | HeaderSource::Oci(_) | HeaderSource::Url(_) => None,
            };
            if matches!(source, HeaderSource::Oci(_) | HeaderSource::Url(_))
                && let Some(published) = self.published(source, target).await?
            {
                return Ok(published.map(|_| None));
            }
            if let Some(search) = search {
                if let Some(missing) = unnameable(&search) {
                    return Ok(missing);
                }
                if search.known()?.is_none() {
                    return search.is_there().await;
                }
            }
        }
        Ok(self.find_here(source, target).await?.map(|set| set.compiler))
    }

    /// For each of the texts: is it in the kernel's headers?
    pub async fn say(
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
        let look = move || {
            let says = |text: &HeaderText| {
                let found = read_header(&set.root, &release, &text.header)?;
                Ok::<_, FetchError>(found.is_some_and(|found| text.is_in(&found)))
            };
            texts.iter().map(says).collect::<Result<Vec<_>, _>>()
        };
        Ok(Lookup::Found(stoppable(move |_| look()).await?))
    }

    fn search(self, apt: &AptHeaders, from: &'a AptSuites, target: &'a KernelTarget) -> Search<'a> {
        Search {
            fetcher: self.0,
            target,
            kind: KIND,
            format: FORMAT,
            from: Place::Apt(from, apt.packages.iter().map(|name| vec![name.to_string()]).collect()),
            with_dependencies: true,
            hint: "add the suite that has it to the family's `suites`, or bring the headers as a tarball",
        }
    }

    fn rpm_search(self, rpm: &'a RpmPackages, target: &'a KernelTarget) -> Search<'a> {
        Search {
            fetcher: self.0,
            target,
            kind: KIND,
            format: FORMAT,
            from: Place::Rpm(&rpm.from, &rpm.packages),
            with_dependencies: false,
            hint: rpm::LACKING,
        }
    }

    async fn in_packages(self, apt: &AptHeaders, target: &KernelTarget) -> Result<Lookup<Found>> {
        let from = apt.apt_suites();
        let search = self.search(apt, &from, target);
        if let Some(missing) = unnameable(&search) {
            return Ok(missing);
        }
        let wanted = target.clone();
        let finish = move |root: &Path| {
            layout::merge_usr(root)?;
            verify(root, &wanted)
        };
        search.run(finish).await
    }

    async fn in_rpms(self, rpm: &RpmPackages, target: &KernelTarget) -> Result<Lookup<Found>> {
        let wanted = target.clone();
        let finish = move |root: &Path| {
            layout::merge_usr(root)?;
            // Where the link to the headers is in the kernel's own package.
            layout::link_build(root, &wanted.release)?;
            verify(root, &wanted)
        };
        self.rpm_search(rpm, target).run(finish).await
    }

    /// With its digest.
    async fn take_published(
        self,
        source: &HeaderSource,
        target: &KernelTarget,
    ) -> Result<Lookup<(Found, Option<String>)>> {
        let what = || format!("headers of {} ({})", target.release, target.arch);
        Ok(match self.published(source, target).await? {
            Some(Lookup::Found(published)) => {
                let digest = published.digest.clone();
                let fetched = published::fetch(self.0, published, target).await;
                Lookup::Found((self.0.unless_kept(fetched, what, CARRY)?, Some(digest)))
            }
            Some(Lookup::Missing { looked_for, hint }) => Lookup::Missing { looked_for, hint },
            // Packages have another way.
            None => Lookup::Missing { looked_for: what(), hint: String::new() },
        })
    }

    async fn load(
        self,
        found: Found,
        identity: Option<String>,
        target: &KernelTarget,
    ) -> Result<HeaderLookup> {
        let (cache, KernelTarget { release, arch, .. }) = (self.0.cache.clone(), target.clone());
        let set = stoppable(move |_| read(&cache, found, &release, arch)).await?;
        Ok(Lookup::Found(Box::new(HeaderSet { identity, ..set })))
    }
}

/// A header set of the cache.
fn read(cache: &Cache, found: Found, release: &KernelRelease, arch: Architecture) -> Result<HeaderSet> {
    let Found { release: _, arch: _, key, origin } = found;
    let root = cache.place(KIND, &key)?.join(TREE);
    let (facts, compiler) = read_header_set(&root, release, arch)?;
    let (identity, content, unverified) = (None, None, None);
    Ok(HeaderSet { root, facts, compiler, origin, key, identity, content, unverified })
}

/// The finding that no package can have a name with this release in it. RPM's names have none.
fn unnameable<T>(search: &Search<'_>) -> Option<Lookup<T>> {
    let names = match search.from {
        Place::Apt(..) => search.names(),
        Place::Rpm(..) => return None,
    };
    let name = names.iter().flatten().find(|name| !control::is_package_name(name))?;
    let hint = "no package can have this name: bring the headers as a tarball, for a family of their own";
    Some(match search.missing(name) {
        Lookup::Missing { looked_for, hint: _ } => Lookup::Missing { looked_for, hint: hint.to_owned() },
        found @ Lookup::Found(_) => found,
    })
}

/// The other ways to headers that a family's source does not have.
fn or_import(hint: &str, release: &KernelRelease) -> String {
    format!(
        "{hint}; or import them: `farrier headers import SOURCE... --kernel {release}`, or on a node that runs this kernel \
         `farrier headers collect`, both with --registry"
    )
}

/// Only what is the target's header set becomes an entry.
fn verify(root: &Path, target: &KernelTarget) -> Result<()> {
    read_header_set(root, &target.release, target.arch)?;
    Ok(())
}
