//! Adapter: fetches header sets, sources and root file systems into the cache.
//!
//! What it hands out is a path inside the [cache](crate::cache::Cache), complete and verified, together
//! with an identity that changes exactly when the content does.

mod error;
mod tree;

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

pub use error::FetchError;
pub use tree::{TreeError, read_header_set};

use crate::{
    cache::Cache,
    image::{Digest, SourceSpec},
    kernel::{Architecture, BootstrapSpec, Compiler, HeaderSource, KernelTarget},
    kmod::KernelFacts,
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
        Self { refresh: Duration::from_secs(3600), apt_dir: PathBuf::from("/etc/apt") }
    }
}

/// Fetches into the cache. Every method can be dropped in the middle: its child processes are ended and
/// its temporary files removed.
#[derive(Clone, Debug)]
pub struct Fetcher {
    cache: Cache,
    options: FetchOptions,
}

impl Fetcher {
    /// A fetcher that keeps what it fetches in `cache`.
    pub fn new(cache: Cache, options: FetchOptions) -> Self {
        Self { cache, options }
    }

    /// Looks for the target's headers, relative paths starting at `root` (the definitions directory).
    pub async fn header_set(
        &self,
        source: &HeaderSource,
        root: &Path,
        target: &KernelTarget,
    ) -> Result<HeaderLookup, FetchError> {
        let _ = (source, root, target, &self.cache, &self.options);
        todo!("headers")
    }

    /// What the source is at this moment, relative paths starting at `root`. Downloads no source.
    pub async fn source_identity(
        &self,
        spec: &SourceSpec,
        root: &Path,
    ) -> Result<SourceIdentity, FetchError> {
        let _ = (spec, root);
        todo!("headers")
    }

    /// Fetches and unpacks the source, relative paths starting at `root`.
    pub async fn source(&self, spec: &SourceSpec, root: &Path) -> Result<FetchedSource, FetchError> {
        let _ = (spec, root);
        todo!("headers")
    }

    /// Makes the root file system, or finds it made.
    pub async fn bootstrap(&self, spec: &BootstrapSpec, arch: Architecture) -> Result<RootFs, FetchError> {
        let _ = (spec, arch);
        todo!("headers")
    }
}

/// A hash over everything in the specification that decides what the root file system holds: 64
/// hexadecimal digits.
pub fn bootstrap_key(spec: &BootstrapSpec, arch: Architecture) -> String {
    let _ = (spec, arch);
    todo!("headers")
}
