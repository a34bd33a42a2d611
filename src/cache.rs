//! Adapter: the content-addressed, disposable cache directory, safe with several farriers at once.

use std::path::{Path, PathBuf};

/// The cache: every entry is complete or absent. An entry is made in a temporary directory beside its
/// place and renamed; a lock file for each key keeps two farriers from making it twice.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// A cache directory that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{action} {path}")]
pub struct CacheError {
    /// What was done.
    pub action: &'static str,
    /// To what.
    pub path: PathBuf,
    /// The system's answer.
    #[source]
    pub source: std::io::Error,
}

impl Cache {
    /// Opens (and makes) the directory.
    pub fn open(root: PathBuf) -> Result<Self, CacheError> {
        std::fs::create_dir_all(&root).map_err(|source| CacheError {
            action: "create cache directory",
            path: root.clone(),
            source,
        })?;
        Ok(Self { root })
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }
}
