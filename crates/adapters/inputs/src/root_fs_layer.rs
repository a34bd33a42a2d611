//! The cache entry of a root file system, which holds one layer and a record of its digests and size.

use std::{
    io,
    path::{Path, PathBuf},
};

use farrier_core::{facts::annotations, image::Digest, kernel::Architecture};
use farrier_store::{StoreError, StoredInput};
use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::Result;

/// File name of the layer in a cache entry.
pub const FILE: &str = "layer.tar.gz";
const RECORD: &str = "layer.json";

/// A root file system as one gzip-compressed layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootFs {
    /// Path of the `.tar.gz` in the cache.
    pub layer: PathBuf,
    /// Digest of the layer.
    pub digest: Digest,
    /// Digest of the uncompressed tar.
    pub diff_id: Digest,
    /// Size of the layer in bytes.
    pub size: u64,
    /// Processor architecture.
    pub arch: Architecture,
}

/// Content of [`RECORD`]. Digests are 64 hexadecimal digits, without `sha256:`.
#[derive(Debug, Serialize, Deserialize)]
struct LayerRecord {
    digest: String,
    diff_id: String,
    size: u64,
}

/// Reads the root file system from a complete cache entry.
pub fn read(entry: &Path, arch: Architecture) -> Result<RootFs> {
    let path = entry.join(RECORD);
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", path.display()));
    let LayerRecord { digest, diff_id, size } =
        serde_json::from_slice(&fs::read(&path)?).map_err(|_| damaged())?;
    let [digest, diff_id] =
        [digest, diff_id].map(|hex| format!("sha256:{hex}").parse().map_err(|_| damaged()));
    Ok(RootFs { layer: entry.join(FILE), digest: digest?, diff_id: diff_id?, size, arch })
}

/// Whether a cache entry has a readable record and a layer of the recorded size.
pub fn is_intact(entry: &Path) -> bool {
    // The record is the same for all architectures.
    read(entry, Architecture::Amd64)
        .is_ok_and(|root_fs| fs::metadata(root_fs.layer).is_ok_and(|layer| layer.len() == root_fs.size))
}

/// Writes the layer's digests and size to a cache entry.
pub fn record(entry: &Path, digest: &Digest, diff_id: &Digest, size: u64) -> Result<()> {
    let [digest, diff_id] = [digest, diff_id].map(|digest| digest.hex().to_owned());
    let text = serde_json::to_vec(&LayerRecord { digest, diff_id, size }).map_err(io::Error::from)?;
    Ok(fs::write(entry.join(RECORD), text)?)
}

/// Writes the digests and size of a layer from the store to a cache entry.
pub fn record_stored(entry: &Path, stored: &StoredInput) -> Result<()> {
    let invalid = || {
        StoreError::NotAnArtifact(
            format!("{}@{}", stored.repository, stored.digest),
            format!("its {} is not a digest", annotations::DIFF_ID),
        )
    };
    let diff_id = stored.annotation(annotations::DIFF_ID)?.parse().map_err(|_| invalid())?;
    record(entry, &stored.layer.digest, &diff_id, stored.layer.size)
}
