//! Adapter: remembers permanent failures by input hash, so that they are not tried again until an input
//! changes. They are kept in the cache: losing them costs one more attempt, nothing else.

use std::{collections::BTreeMap, path::PathBuf};

use crate::{
    cache::{Cache, CacheError},
    image::InputHash,
    plan::Failure,
};

/// The record of permanent failures.
#[derive(Clone, Debug)]
pub struct Failures {
    cache: Cache,
}

const KIND: &str = "failures";

impl Failures {
    /// The failures in this cache.
    pub fn new(cache: &Cache) -> Self {
        Self { cache: cache.clone() }
    }

    /// Those of the given inputs.
    pub fn look_up(
        &self,
        hashes: impl IntoIterator<Item = InputHash>,
    ) -> Result<BTreeMap<InputHash, Failure>, CacheError> {
        let mut found = BTreeMap::new();
        for hash in hashes {
            if let Some(failure) = self.cache.read_record::<Failure>(KIND, &hash.to_string())? {
                found.insert(hash, failure);
            }
        }
        Ok(found)
    }

    /// Remembers one.
    pub fn remember(&self, hash: InputHash, failure: &Failure) -> Result<(), CacheError> {
        self.cache.write_record(KIND, &hash.to_string(), failure)
    }

    /// Forgets one, after a success.
    pub fn forget(&self, hash: InputHash) -> Result<(), CacheError> {
        self.cache.remove_record(KIND, &hash.to_string())
    }

    /// Where the log of a build goes.
    pub fn log_path(&self, image: &str, release: &str, hash: InputHash) -> PathBuf {
        self.cache.root().join("logs").join(format!("{image}-{release}-{}.log", hash.short()))
    }
}
