//! The cache entry of a root file system, which holds one layer and a record of its digests and size.

use std::{
    io,
    path::{Path, PathBuf},
};

use farrier_core::facts::{annotations, media_type};
use farrier_store::StoredInput;
use fs_err as fs;
use oci::{Descriptor, Layer};
use serde::{Deserialize, Serialize};

use crate::Result;

/// File name of the layer in a cache entry.
pub const FILE: &str = "layer.tar.gz";
const RECORD: &str = "layer.json";

/// A root file system as one gzip-compressed layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootFs {
    /// Path of the `.tar.gz` in the cache.
    pub file: PathBuf,
    /// Digests and size of the file.
    pub layer: Layer,
}

/// Content of [`RECORD`]. Digests are 64 hexadecimal digits, without `sha256:`.
#[derive(Debug, Serialize, Deserialize)]
struct LayerRecord {
    digest: String,
    diff_id: String,
    size: u64,
}

/// Reads the root file system from a complete cache entry.
pub fn read(entry: &Path) -> Result<RootFs> {
    let path = entry.join(RECORD);
    let damaged = || io::Error::new(io::ErrorKind::InvalidData, format!("{} is damaged", path.display()));
    let LayerRecord { digest, diff_id, size } =
        serde_json::from_slice(&fs::read(&path)?).map_err(|_| damaged())?;
    let [digest, diff_id] =
        [digest, diff_id].map(|hex| format!("sha256:{hex}").parse().map_err(|_| damaged()));
    let layer = Layer { digest: digest?, diff_id: diff_id?, size, media_type: media_type::OCI_LAYER_GZIP };
    Ok(RootFs { file: entry.join(FILE), layer })
}

/// Whether a cache entry has a readable record and a layer of the recorded size.
pub fn is_intact(entry: &Path) -> bool {
    read(entry)
        .is_ok_and(|RootFs { file, layer }| fs::metadata(file).is_ok_and(|file| file.len() == layer.size))
}

/// Writes the layer's digests and size to a cache entry.
pub fn record(entry: &Path, layer: &Layer) -> Result<()> {
    let [digest, diff_id] = [&layer.digest, &layer.diff_id].map(|digest| digest.hex().to_owned());
    let record = LayerRecord { digest, diff_id, size: layer.size };
    let text = serde_json::to_vec(&record).map_err(io::Error::from)?;
    Ok(fs::write(entry.join(RECORD), text)?)
}

/// Writes the digests and size of a layer from the store to a cache entry.
pub fn record_stored(entry: &Path, stored: &StoredInput) -> Result<()> {
    let invalid = || stored.invalid(&format!("its {} is not a digest", annotations::DIFF_ID));
    let diff_id = stored.annotation(annotations::DIFF_ID)?.parse().map_err(|_| invalid())?;
    let Descriptor { digest, size, .. } = stored.layer.clone();
    record(entry, &Layer { digest, diff_id, size, media_type: media_type::OCI_LAYER_GZIP })
}
