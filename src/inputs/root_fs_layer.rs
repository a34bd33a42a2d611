//! Adapter: a root file system's entry of the cache: a layer, and its record.

use std::{
    io,
    path::{Path, PathBuf},
};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::{
    image::Digest,
    inputs::Result,
    kernel::Architecture,
    oci::annotations,
    store::{StoreError, StoredInput},
};

/// The layer's name in the entry.
pub const FILE: &str = "layer.tar.gz";
const RECORD: &str = "layer.json";

/// A root file system, as one gzip-compressed layer.
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

/// Digests as 64 hexadecimal digits.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    digest: String,
    diff_id: String,
    size: u64,
}

/// The root file system in a finished entry.
pub fn read(entry: &Path, arch: Architecture) -> Result<RootFs> {
    let path = entry.join(RECORD);
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", path.display()));
    let Record { digest, diff_id, size } =
        serde_json::from_slice(&fs::read(&path)?).map_err(|_| damaged())?;
    let [digest, diff_id] =
        [digest, diff_id].map(|hex| format!("sha256:{hex}").parse().map_err(|_| damaged()));
    Ok(RootFs { layer: entry.join(FILE), digest: digest?, diff_id: diff_id?, size, arch })
}

/// Records what the layer in an entry is.
pub fn record(entry: &Path, digest: &Digest, diff_id: &Digest, size: u64) -> Result<()> {
    let [digest, diff_id] = [digest, diff_id].map(|digest| digest.hex().to_owned());
    let text = serde_json::to_vec(&Record { digest, diff_id, size }).map_err(io::Error::from)?;
    Ok(fs::write(entry.join(RECORD), text)?)
}

/// The same for a layer that came from the store.
pub fn record_stored(entry: &Path, stored: &StoredInput) -> Result<()> {
    let wrong = || {
        StoreError::NotAnArtifact(
            format!("{}@{}", stored.repository, stored.digest),
            format!("its {} is no digest", annotations::DIFF_ID),
        )
    };
    let diff_id = stored.note(annotations::DIFF_ID)?.parse().map_err(|_| wrong())?;
    record(entry, &stored.layer.digest, &diff_id, stored.layer.size)
}
