//! Reads the previous bundle that a delta extends: the bundle's file, or the output of `bundle inspect -o json`.

use std::{io::Read as _, path::Path};

use farrier_core::image::Digest;
use fs_err as fs;

use super::{
    BundleError,
    index::{BundleIndex, MAX_INDEX},
    read::Bundle,
};

/// Contents of the previous bundle.
#[derive(Clone, Debug)]
pub struct PreviousBundle {
    /// ID of the bundle.
    pub id: Digest,
    pub index: BundleIndex,
}

impl PreviousBundle {
    /// Reads the head of a bundle, or the JSON of its index.
    pub fn read(path: &Path) -> Result<Self, BundleError> {
        let refuse = |reason: String| BundleError::NoPreviousBundle(path.to_owned(), reason);
        let mut file = fs::File::open(path).map_err(|error| refuse(error.to_string()))?;
        let mut start = [0];
        let count = file.read(&mut start).map_err(|error| refuse(error.to_string()))?;
        if count == 0 || start != *b"{" {
            let bundle = Bundle::open(path)?;
            return Ok(Self { id: bundle.id().clone(), index: bundle.index().clone() });
        }
        let mut text = start.to_vec();
        file.take(MAX_INDEX).read_to_end(&mut text).map_err(|error| refuse(error.to_string()))?;
        // The output of `inspect` also has the ID next to the index's fields; it is recomputed here.
        let index: BundleIndex = serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
        if let Some(reason) = index.find_problem() {
            return Err(refuse(reason));
        }
        let bytes = index.to_bytes().map_err(|error| refuse(error.to_string()))?;
        Ok(Self { id: Digest::of(&bytes), index })
    }
}
