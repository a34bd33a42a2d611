//! Adapter: the previous bundle that a delta adds to: the bundle, or what `bundle inspect -o json` printed of it.

use std::{io::Read as _, path::Path};

use fs_err as fs;

use super::{
    BundleError,
    index::{Base, BundleIndex, MAX_INDEX},
    read::Bundle,
};
use crate::image::Digest;

/// What a previous bundle held.
#[derive(Clone, Debug)]
pub struct Since {
    /// Its identity.
    pub id: Digest,
    /// Its index.
    pub index: BundleIndex,
}

impl Since {
    /// Reads a bundle's head, or its index.
    pub fn read(path: &Path) -> Result<Self, BundleError> {
        let refuse = |reason: String| BundleError::Since(path.to_owned(), reason);
        let mut file = fs::File::open(path).map_err(|error| refuse(error.to_string()))?;
        let mut start = [0];
        let count = file.read(&mut start).map_err(|error| refuse(error.to_string()))?;
        if count == 0 || start != *b"{" {
            let bundle = Bundle::open(path)?;
            return Ok(Self { id: bundle.id().clone(), index: bundle.index().clone() });
        }
        let mut text = start.to_vec();
        file.take(MAX_INDEX).read_to_end(&mut text).map_err(|error| refuse(error.to_string()))?;
        // What `inspect` prints has the identity beside the index's own fields; it is computed here.
        let index: BundleIndex = serde_json::from_slice(&text).map_err(|error| refuse(error.to_string()))?;
        if let Some(reason) = index.contradiction() {
            return Err(refuse(reason));
        }
        let bytes = index.to_bytes().map_err(|error| refuse(error.to_string()))?;
        Ok(Self { id: Digest::of(&bytes), index })
    }

    pub(super) fn base(&self) -> Base {
        Base { id: self.id.clone(), from: self.index.from.clone() }
    }
}
