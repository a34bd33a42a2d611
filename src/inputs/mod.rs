//! Adapter: fetches header sets, sources and root file systems into the cache.
//!
//! What it hands out is a path inside the [cache](crate::cache::Cache), complete and verified, together
//! with an identity that changes exactly when the content does. Each kind of input has a module: [`header_set`],
//! [`source`], [`root_fs`], [`kernel_image`], [`host_tree`]; [`upstream`] only asks whether there is something to fetch from.

pub mod apt;
mod checksum;
mod digest;
mod download;
mod error;
mod files;
pub mod header_set;
mod header_tree;
pub mod host_tree;
pub mod kernel_image;
mod kernel_packages;
mod openpgp;
pub(crate) mod process;
pub mod root_fs;
pub(crate) mod root_fs_layer;
pub mod rpm;
pub mod source;
pub mod stored;
mod suspects;
pub mod upstream;

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
    time::Duration,
};

pub use error::{FetchError, Result};
pub use header_set::{
    HeaderIdentity, HeaderLookup, HeaderSet, Headers, ListedHeaders,
    import::{HeaderImport, ImportSource, ImportedHeaders, Outcome, PackedHeaders},
};
pub use header_tree::{TreeError, find_build, read_header_set};
pub use host_tree::{
    HostTree, HostTreeLookup,
    collect::{Collected, Collection, collect},
};
pub use kernel_image::{KernelImage, KernelImageLookup, KernelImages, host::read_host};
pub use openpgp::key_ends;
pub use root_fs::{PackageRoot, RootFileSystems, RpmRoot};
pub use root_fs_layer::RootFs;
pub use source::{FetchedSource, SourceIdentity, Sources};
pub use stored::{LATEST, StoredUnder, content_tag, minimal_tag, source_tag};

use crate::{
    archive::{self, Options},
    blocking::stoppable,
    cache::{Cache, Scratch},
    kernel::KernelTarget,
    net::Net,
    registry::{Keyring, RegistryOptions, RemoteRegistry},
    store::Store,
};

/// What became of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup<T> {
    /// It is in the cache, or where the definition says.
    Found(T),
    /// There is none, which is a finding and not a fault.
    Missing {
        /// The packages or file that were looked for, and where.
        looked_for: String,
        /// What to do.
        hint: String,
    },
}

impl<T> Lookup<T> {
    /// Makes another thing of what was found; what is missing stays missing.
    pub(crate) fn map<U>(self, make: impl FnOnce(T) -> U) -> Lookup<U> {
        match self {
            Self::Found(found) => Lookup::Found(make(found)),
            Self::Missing { looked_for, hint } => Lookup::Missing { looked_for, hint },
        }
    }
}

/// How a [`Fetcher`] works.
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Package lists older than this are fetched again before they are believed.
    pub refresh: Duration,
    /// The directory of the host's apt configuration, whose sources and keyrings are the default.
    pub apt_dir: PathBuf,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self { refresh: Duration::from_hours(1), apt_dir: PathBuf::from("/etc/apt") }
    }
}

/// Fetches into the cache. Every method can be dropped in the middle: its child processes are ended and
/// its temporary files removed. A clone shares the connections.
#[derive(Clone, Debug)]
pub struct Fetcher {
    cache: Cache,
    options: FetchOptions,
    net: Net,
    credentials: Keyring,
    store: Option<Store>,
    root: PathBuf,
}

impl Fetcher {
    /// A fetcher that keeps what it fetches in `cache`.
    pub fn new(cache: Cache, options: FetchOptions) -> Self {
        let (net, credentials, root) = (Net::default(), Keyring::default(), PathBuf::new());
        Self { cache, options, net, credentials, store: None, root }
    }

    /// The same, for one piece of work: what it takes out of the cache is in use until it is dropped, and no longer.
    #[must_use]
    pub fn in_use(&self) -> Self {
        Self { cache: self.cache.in_use(), ..self.clone() }
    }

    /// Where it keeps what it fetches.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// The same on the network of a site.
    #[must_use]
    pub fn with_net(self, net: Net) -> Self {
        Self { net, ..self }
    }

    /// How hosts are reached, and which may be.
    pub fn net(&self) -> &Net {
        &self.net
    }

    /// The same with credentials of registries that images with headers are in.
    #[must_use]
    pub fn with_credentials(self, credentials: Keyring) -> Self {
        Self { credentials, ..self }
    }

    /// Registries, as the site reaches them.
    fn registries(&self) -> RemoteRegistry {
        let (credentials, net) = (self.credentials.clone(), self.net.clone());
        RemoteRegistry::new("registries".to_owned(), &RegistryOptions { credentials, net })
    }

    /// The same for definitions of this directory, in which their relative paths start.
    #[must_use]
    pub fn with_definitions(self, root: PathBuf) -> Self {
        Self { root, ..self }
    }

    /// The same with a store, in which inputs are kept beside the images.
    #[must_use]
    pub fn with_store(self, store: Store) -> Self {
        Self { store: Some(store), ..self }
    }

    /// Is only what the store and this machine have used, without asking upstream for something newer?
    pub fn is_offline(&self) -> bool {
        self.net.is_offline()
    }

    /// Where inputs are kept beside the images.
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// Header sets.
    pub fn headers(&self) -> Headers<'_> {
        Headers(self)
    }

    /// A directory of the cache that goes away when it is dropped.
    ///
    /// # Errors
    /// The cache directory cannot be written.
    pub fn scratch(&self) -> Result<Scratch> {
        Ok(self.cache.scratch()?)
    }

    /// Sources of driver images.
    pub fn sources(&self) -> Sources<'_> {
        Sources(self)
    }

    /// Toolchains and runtime bases.
    pub fn root_fs(&self) -> RootFileSystems<'_> {
        RootFileSystems(self)
    }

    /// Kernel images, with the kernel's own modules.
    pub fn kernel_images(&self) -> KernelImages<'_> {
        KernelImages(self)
    }

    /// With `--offline`, an error of the network becomes one that names what was never kept.
    fn unless_kept<T>(
        &self,
        outcome: Result<T>,
        what: impl FnOnce() -> String,
        hint: &'static str,
    ) -> Result<T> {
        outcome.map_err(|error| {
            if self.is_offline() && self.store.is_some() && error.is_upstream() {
                FetchError::NotKept { what: what(), hint, source: Box::new(error) }
            } else {
                error
            }
        })
    }

    /// The digest of a file or tree that the user keeps.
    async fn digest_of(&self, path: &Path) -> Result<digest::Known> {
        let (cache, path) = (self.cache.clone(), path.to_owned());
        stoppable(move |stop| digest::remembered(&cache, &path, stop)).await
    }
}

/// What to do about something that the store lacks.
const CARRY: &str = "where the network is, `farrier mirror --kernel RELEASE --registry REGISTRY` puts it into a \
                                registry's store, and `farrier bundle` carries it here; or name a mirror that has it, and its \
                                host, in site.yaml";

/// Lists of packages younger than this are believed when a package is not in them.
const YOUNG: Duration = Duration::from_mins(3);

/// The tree's name in a cache entry. It has a mode of its own: the entry's is private.
const TREE: &str = "tree";

/// Unpacks an archive; `what` names it in errors.
fn unpack(stop: &AtomicBool, archive: &Path, dest: &Path, what: &str) -> Result<()> {
    archive::unpack_file(archive, dest, &Options { stop, ..Options::default() })
        .map_err(|source| FetchError::Unpack(what.to_owned(), source))
}

/// `{{release}}` is the one variable that names of a kernel's packages and files have. The release is a
/// checked type: it holds no separator.
fn with_release(text: &str, target: &KernelTarget) -> String {
    text.replace("{{release}}", target.release.as_str()).replace("{{ release }}", target.release.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::Architecture;

    /// The loop runs fetches as tasks of their own.
    #[test]
    fn every_fetch_can_be_a_task() {
        fn is_send<T: Send>(_: T) {}
        let dir = tempfile::tempdir().unwrap();
        let fetcher = Fetcher::new(Cache::open(dir.path().to_owned()).unwrap(), FetchOptions::default());
        let spec: crate::image::SourceSpec =
            serde_json::from_str(r#"{"name": "x", "from": {"path": {"path": "x"}}}"#).unwrap();
        let headers = crate::kernel::HeaderSource::Tarball(crate::kernel::TarballHeaders {
            path: "x".parse().unwrap(),
        });
        let target = crate::kernel::KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0".parse().unwrap(),
            arch: Architecture::Amd64,
        };
        let bootstrap =
            PackageRoot::Toolchain(serde_json::from_str(r#"{"suite": "x", "include": []}"#).unwrap());
        is_send(fetcher.sources().fetch(&spec));
        is_send(fetcher.sources().identity(&spec));
        is_send(fetcher.headers().find(&headers, &target));
        is_send(fetcher.root_fs().bootstrap(&bootstrap, Architecture::Amd64));
        let minimal: crate::image::MinimalSpec = serde_json::from_str(r#"{"suites": ["x"]}"#).unwrap();
        is_send(fetcher.root_fs().minimal(&minimal, Architecture::Amd64));
    }
}
