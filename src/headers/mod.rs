//! Adapter: fetches header sets, sources and root file systems into the cache.
//!
//! What it hands out is a path inside the [cache](crate::cache::Cache), complete and verified, together
//! with an identity that changes exactly when the content does.

pub mod apt;
mod blocking;
mod bootstrap;
mod brought;
mod collect;
mod copy;
mod digest;
mod download;
mod error;
mod header_set;
mod host;
mod host_tree;
mod import;
mod kernel_image;
mod layout;
mod minimal;
mod process;
mod source;
mod stored;
mod stored_headers;
mod tracked;
pub mod tree;

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
    time::Duration,
};

pub use bootstrap::bootstrap_key;
pub use brought::ListedHeaders;
pub use collect::{CollectError, Collected, Collection, collect};
pub use error::FetchError;
pub use host::{HostError, read_host};
pub use host_tree::{HostTree, HostTreeError, HostTreeLookup};
pub use import::{HeaderImport, ImportError, ImportSource, ImportedHeaders, Outcome};
pub use kernel_image::{KernelImage, KernelImageError, KernelImageLookup};
pub use stored::{Kept, LATEST, content_tag, minimal_tag, source_tag};
pub use stored_headers::KeptHeaders;
pub use tree::{TreeError, read_header_set};

use crate::{
    archive::{self, Limits},
    cache::Cache,
    image::Digest,
    kernel::{Architecture, Compiler},
    kmod::KernelFacts,
    net::Net,
    store::Store,
};

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
    /// Hash over the content's names, versions and digests; goes into the input hash.
    pub identity: String,
}

/// What became of a search for headers.
#[derive(Clone, Debug)]
pub enum HeaderLookup {
    /// They are in the cache.
    Found(Box<HeaderSet>),
    /// There are none, which is a finding and not a fault.
    Missing {
        /// The packages or file that were looked for, and where.
        looked_for: String,
        /// What to do.
        hint: String,
    },
}

/// A fetched source, unpacked in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchedSource {
    /// The tree that goes to `sources/<name>/`.
    pub root: PathBuf,
    /// What it is, for provenance: `package=version sha256:...`.
    pub origin: String,
}

/// What a source is, known without fetching all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceIdentity {
    /// Goes into the input hash: the content's digest, and the `unpack` and `subdir` of the definition.
    pub identity: String,
    /// The upstream part of the package's version, for `apt` sources.
    pub version: Option<String>,
}

/// A root file system made with mmdebstrap, as one gzip-compressed layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootFs {
    /// `.tar.gz` in the cache.
    pub layer: PathBuf,
    /// Its digest.
    pub digest: Digest,
    /// Digest of the uncompressed tar.
    pub diff_id: Digest,
    /// Bytes of `layer`.
    pub size: u64,
    /// Its architecture.
    pub arch: Architecture,
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
    store: Option<Store>,
}

impl Fetcher {
    /// A fetcher that keeps what it fetches in `cache`.
    pub fn new(cache: Cache, options: FetchOptions) -> Self {
        Self { cache, options, net: Net::default(), store: None }
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

    /// The same with a place where what it needs may be kept beside the images.
    #[must_use]
    pub fn with_store(self, store: Store) -> Self {
        Self { store: Some(store), ..self }
    }

    /// Does what a definition came to where it was kept in the store count, without asking upstream for something newer?
    pub fn is_offline(&self) -> bool {
        self.net.is_offline()
    }

    /// Where what it needs may be kept beside the images.
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }
}

/// Unpacks an archive; `what` names it in errors.
fn unpack(stop: &AtomicBool, archive: &Path, dest: &Path, what: &str) -> Result<(), FetchError> {
    archive::unpack_file_unless(stop, archive, dest, &Limits::default())
        .map_err(|source| FetchError::Unpack { what: what.to_owned(), source })
}

fn io_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FetchError {
    move |source| FetchError::Io { action, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The loop runs fetches as tasks of their own.
    #[test]
    fn every_fetch_can_be_a_task() {
        fn is_send<T: Send>(_: T) {}
        let dir = tempfile::tempdir().unwrap();
        let fetcher = Fetcher::new(Cache::open(dir.path().to_owned()).unwrap(), FetchOptions::default());
        let spec: crate::image::SourceSpec =
            serde_json::from_str(r#"{"name": "x", "from": {"path": {"path": "x"}}}"#).unwrap();
        let headers =
            crate::kernel::HeaderSource::Tarball(crate::kernel::TarballHeaders { path: "x".into() });
        let target = crate::kernel::KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0".parse().unwrap(),
            arch: Architecture::Amd64,
        };
        let bootstrap: crate::kernel::BootstrapSpec =
            serde_json::from_str(r#"{"suite": "x", "include": []}"#).unwrap();
        is_send(fetcher.source(&spec, dir.path()));
        is_send(fetcher.source_identity(&spec, dir.path()));
        is_send(fetcher.header_set(&headers, dir.path(), &target));
        is_send(fetcher.bootstrap(&bootstrap, Architecture::Amd64));
        let minimal: crate::image::MinimalSpec = serde_json::from_str(r#"{"suites": ["x"]}"#).unwrap();
        is_send(fetcher.minimal(&minimal, Architecture::Amd64));
    }
}
