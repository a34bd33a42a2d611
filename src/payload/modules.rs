//! Adapter: finds and opens the modules of a payload directory.

use std::path::{Path, PathBuf};

use crate::kmod::PayloadModule;

/// A payload that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("{action} {path}")]
pub struct PayloadError {
    /// What was done.
    pub action: &'static str,
    /// To what.
    pub path: PathBuf,
    /// The system's answer.
    #[source]
    pub source: std::io::Error,
}

/// All modules below the directory.
pub fn read_modules(payload: &Path) -> Result<Vec<PayloadModule>, PayloadError> {
    let _ = payload;
    Ok(Vec::new())
}
