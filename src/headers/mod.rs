//! Adapter: fetches header sets, sources and root file systems into the cache.

use std::path::PathBuf;

use crate::{
    image::Digest,
    kernel::{Architecture, Compiler},
    kmod::KernelFacts,
};

/// One kernel's build tree, unpacked in the cache.
#[derive(Clone, Debug)]
pub struct HeaderSet {
    /// The tree, rooted at `/`: `usr/src/...`, `lib/modules/<release>/build`. It holds no `lib` symlink.
    pub root: PathBuf,
    /// What the check needs to know.
    pub facts: KernelFacts,
    /// `CONFIG_CC_VERSION_TEXT`, parsed; `None` where the tree has none.
    pub compiler: Option<Compiler>,
    /// Packages and versions, or file and digest: for provenance.
    pub origin: Vec<String>,
}

/// A fetched source, unpacked in the cache.
#[derive(Clone, Debug)]
pub struct FetchedSource {
    /// The tree that goes to `sources/<name>/`.
    pub root: PathBuf,
    /// What it is, for provenance: `package=version sha256:...`.
    pub origin: String,
}

/// What a source is, known without fetching all of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SourceIdentity {
    /// Goes into the input hash.
    pub identity: String,
    /// The package's version, for `apt` sources.
    pub version: Option<String>,
}

/// A root file system made with mmdebstrap, as one gzip-compressed layer.
#[derive(Clone, Debug)]
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
