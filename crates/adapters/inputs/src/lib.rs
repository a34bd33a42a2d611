//! Fetches the inputs of builds (header sets, sources, kernel images, root file systems) into the cache, for the build pipeline.
//!
//! Each fetch returns a complete and verified path inside the [cache](farrier_local::cache::Cache), with an identity that changes exactly
//! when the content does. Each kind of input has a module: [`header_set`], [`source`], [`root_fs`], [`kernel_image`],
//! [`host_tree`]. The module [`upstream`] only checks whether upstream hosts can be reached.
#![forbid(unsafe_code)]

pub mod apt;
mod checksum;
mod digest;
mod dkms_conf;
mod download;
mod error;
mod files;
pub mod git;
pub mod header_set;
mod header_tree;
pub mod host_tree;
pub mod kernel_image;
mod kernel_packages;
mod openpgp;
mod package_reader;
pub mod process;
pub mod root_fs;
pub mod root_fs_layer;
pub mod rpm;
pub mod source;
mod source_layout;
pub mod stored;
mod suspects;
pub mod upstream;

use std::{
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
    time::Duration,
};

pub use dkms_conf::dkms_conf_warnings;
pub use error::{FetchError, Result};
use farrier_core::{
    image::{Digest, checked::LocalPath},
    kernel::KernelTarget,
};
use farrier_local::{
    archive::{self, Options},
    blocking::stoppable,
    cache::{Cache, Scratch},
    files::if_there,
};
use farrier_net::Net;
use farrier_store::{
    Store,
    registry::{Keyring, RegistryOptions, RemoteRegistry},
};
use fs_err as fs;
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
pub use openpgp::key_expiries;
pub use package_reader::PackageReader;
pub use root_fs::{PackageRoot, RootFileSystems, RpmRoot};
pub use root_fs_layer::RootFs;
pub use source::{FetchedSource, SourceIdentity, Sources};
pub use stored::{StoredUnder, content_tag, minimal_tag, source_tag};

/// Result of a search.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Lookup<T> {
    /// Found, in the cache or in the location that the definition names.
    Found(T),
    /// Not found, which is not an error.
    Missing {
        /// The packages or file that were looked for, and where.
        looked_for: String,
        /// Remedy.
        hint: String,
    },
}

impl<T> Lookup<T> {
    /// Converts a found value; a missing one stays missing.
    pub fn map<U>(self, make: impl FnOnce(T) -> U) -> Lookup<U> {
        match self {
            Self::Found(found) => Lookup::Found(make(found)),
            Self::Missing { looked_for, hint } => Lookup::Missing { looked_for, hint },
        }
    }
}

/// Options of a [`Fetcher`].
#[derive(Clone, Debug)]
pub struct FetchOptions {
    /// Maximum age of package lists before they are refreshed.
    pub refresh: Duration,
    /// Directory of the host's apt configuration, whose sources and keyrings are the default.
    pub apt_dir: PathBuf,
}

impl Default for FetchOptions {
    fn default() -> Self {
        Self { refresh: Duration::from_hours(1), apt_dir: PathBuf::from("/etc/apt") }
    }
}

/// Fetches inputs into the cache. Dropping a method's future ends its child processes and removes its temporary files. A clone
/// shares the connections.
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
    /// Creates a fetcher that stores its inputs in `cache`.
    pub fn new(cache: Cache, options: FetchOptions) -> Self {
        let (net, credentials, root) = (Net::default(), Keyring::default(), PathBuf::new());
        Self { cache, options, net, credentials, store: None, root }
    }

    /// Returns a fetcher for one task. The cache entries that the task uses are protected from eviction until this fetcher is
    /// dropped.
    #[must_use]
    pub fn in_use(&self) -> Self {
        Self { cache: self.cache.in_use(), ..self.clone() }
    }

    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// Sets the site's network configuration.
    #[must_use]
    pub fn with_net(self, net: Net) -> Self {
        Self { net, ..self }
    }

    /// Returns the network configuration: how hosts are reached, and which are allowed.
    pub fn net(&self) -> &Net {
        &self.net
    }

    /// Sets the credentials for registries with header images.
    #[must_use]
    pub fn with_credentials(self, credentials: Keyring) -> Self {
        Self { credentials, ..self }
    }

    /// Returns a client for registries, with the site's network configuration.
    fn registries(&self) -> RemoteRegistry {
        let (credentials, net) = (self.credentials.clone(), self.net.clone());
        RemoteRegistry::new("registries".to_owned(), &RegistryOptions { credentials, net })
    }

    /// Sets the definitions directory, in which relative paths start.
    #[must_use]
    pub fn with_definitions(self, root: PathBuf) -> Self {
        Self { root, ..self }
    }

    /// Sets the store of inputs, which is beside the images in the registry.
    #[must_use]
    pub fn with_store(self, store: Store) -> Self {
        Self { store: Some(store), ..self }
    }

    /// Whether only the store and this machine's cache may be used (`--offline`).
    pub fn is_offline(&self) -> bool {
        self.net.is_offline()
    }

    /// Returns the store of inputs, if there is one.
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// Returns access to header sets.
    pub fn headers(&self) -> Headers<'_> {
        Headers(self)
    }

    /// Creates a scratch directory in the cache, removed on drop.
    ///
    /// # Errors
    /// The cache directory is not writable.
    pub fn scratch(&self) -> Result<Scratch> {
        Ok(self.cache.scratch()?)
    }

    /// Returns access to the sources of driver images.
    pub fn sources(&self) -> Sources<'_> {
        Sources(self)
    }

    /// Returns access to toolchains and runtime bases.
    pub fn root_fs(&self) -> RootFileSystems<'_> {
        RootFileSystems(self)
    }

    /// Returns access to kernel images, with the kernel's own modules.
    pub fn kernel_images(&self) -> KernelImages<'_> {
        KernelImages(self)
    }

    /// With `--offline`, converts a network error into one that names the missing input.
    fn explain_if_offline<T>(&self, outcome: Result<T>, describe: impl FnOnce() -> String) -> Result<T> {
        self.explain_with_hint(outcome, describe, MIRROR_HINT)
    }

    /// Converts an error like [`Self::explain_if_offline`], with a remedy other than a mirror.
    fn explain_with_hint<T>(
        &self,
        outcome: Result<T>,
        describe: impl FnOnce() -> String,
        hint: &'static str,
    ) -> Result<T> {
        outcome.map_err(|error| {
            if self.is_offline() && self.store.is_some() && error.is_upstream() {
                FetchError::UnavailableOffline { what: describe(), hint, source: Box::new(error) }
            } else {
                error
            }
        })
    }

    /// Returns the digest of a key file, if there is one. Cache keys include this digest, because a package that one key file
    /// verified can fail with another key file.
    fn keys_digest(&self, signed_by: Option<&LocalPath>) -> Result<Option<String>> {
        let Some(file) = signed_by else { return Ok(None) };
        let keys = if_there(fs::read(self.root.join(file)))?;
        Ok(keys.map(|keys| Digest::of(&keys).to_string()))
    }

    /// Returns the digest of a user's file or tree.
    async fn digest_of(&self, path: &Path) -> Result<digest::DigestRecord> {
        let (cache, path) = (self.cache.clone(), path.to_owned());
        stoppable(move |stop| digest::digest_record(&cache, &path, stop)).await
    }

    /// Fails if a user's file or tree changed while it was copied, so that the copy may have another digest.
    async fn ensure_unchanged(&self, path: &Path, sha256: &str) -> Result<()> {
        let actual = self.digest_of(path).await?.digest;
        if actual == sha256 {
            return Ok(());
        }
        Err(FetchError::sha256(path.display().to_string(), &actual, sha256))
    }
}

/// Remedy for an input that the store lacks.
const MIRROR_HINT: &str = "on a machine with network access, run `farrier mirror --kernel RELEASE --registry \
    REGISTRY` to store it in a registry, and transfer it with `farrier bundle`; or name a mirror that has \
    it, and its host, in site.yaml";

/// Before farrier reports a package as missing, it refreshes package lists that are older than this.
const MISSING_PACKAGE_MAX_AGE: Duration = Duration::from_mins(3);

/// Name of the tree in a cache entry. The tree is a subdirectory, because its mode differs from the private mode of the entry.
const TREE: &str = "tree";

/// Unpacks an archive; `what` names the archive in errors.
fn unpack(stop: &AtomicBool, archive: &Path, dest: &Path, what: &str) -> Result<()> {
    archive::unpack_file(archive, dest, &Options { stop, ..Options::default() })
        .map_err(|source| FetchError::Unpack(what.to_owned(), source))
}

/// Replaces `{{release}}`, the only variable in the names of a kernel's packages and files. The release is a checked type without
/// path separators.
fn with_release(text: &str, target: &KernelTarget) -> String {
    text.replace("{{release}}", target.release.as_str()).replace("{{ release }}", target.release.as_str())
}

#[cfg(test)]
mod tests {
    use farrier_core::kernel::Architecture;

    use super::*;

    /// The controller runs fetches as separate tasks.
    #[test]
    fn every_fetch_can_be_a_task() {
        fn is_send<T: Send>(_: T) {}
        let dir = tempfile::tempdir().unwrap();
        let fetcher = Fetcher::new(Cache::open(dir.path().to_owned()).unwrap(), FetchOptions::default());
        let spec: farrier_core::image::SourceSpec =
            serde_json::from_str(r#"{"name": "x", "from": {"path": {"path": "x"}}}"#).unwrap();
        let headers = farrier_core::kernel::HeaderSource::Tarball(farrier_core::kernel::TarballHeaders {
            path: "x".parse().unwrap(),
        });
        let target = farrier_core::kernel::KernelTarget {
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
        let minimal: farrier_core::image::MinimalSpec = serde_json::from_str(r#"{"suites": ["x"]}"#).unwrap();
        is_send(fetcher.root_fs().minimal(&minimal, Architecture::Amd64));
    }
}
