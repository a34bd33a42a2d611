//! Adapter: directories of single builds, which go with their owner.

use std::{
    io,
    path::{Path, PathBuf},
};

use fs_err::{self as fs, File};
use tempfile::NamedTempFile;

use super::quarantine::Quarantine;
use crate::files::private_directory;

/// A directory of one build, see [`Cache::scratch`](super::Cache::scratch).
#[derive(Debug)]
pub struct Scratch {
    directory: PathBuf,
    lock_path: PathBuf,
    quarantine: Quarantine,
    _lock: std::fs::File,
}

impl Scratch {
    /// An empty one. Those of farriers that were killed are removed first: their lock is free.
    pub(super) fn below(parent: &Path, quarantine: Quarantine) -> io::Result<Self> {
        private_directory(parent)?;
        remove_dead(parent, &quarantine)?;
        // It gets the name by which others look for it only when it is locked.
        let new = NamedTempFile::with_prefix_in(".new-", parent)?;
        new.as_file().lock()?;
        let unique = new.path().file_name().unwrap_or_default().to_string_lossy().replace(".new-", "build-");
        let lock_path = parent.join(format!("{unique}.lock"));
        let lock = new.persist(&lock_path).map_err(io::Error::from)?;
        let directory = lock_path.with_extension("d");
        let scratch = Self { directory, lock_path, quarantine, _lock: lock };
        private_directory(&scratch.directory)?;
        Ok(scratch)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.directory
    }
}

/// Removes those whose owner is gone. Each has its lock before it is made, and until it is removed.
pub(super) fn remove_dead(parent: &Path, quarantine: &Quarantine) -> io::Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        let path = entry.path();
        let is_dead = match path.extension().and_then(|extension| extension.to_str()) {
            Some("lock") => File::open(&path).is_ok_and(|file| file.try_lock().is_ok()),
            Some("d") => !path.with_extension("lock").exists(),
            _ => false,
        };
        if is_dead {
            // Another farrier may be at the same; what is left is removed next time.
            let _ = quarantine.remove(&path.with_extension("d"));
            let _ = fs::remove_file(path.with_extension("lock"));
        }
    }
    Ok(())
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The quarantine tells of what stays.
        let _ = self.quarantine.remove(&self.directory);
        let _ = fs::remove_file(&self.lock_path);
    }
}

/// A directory that is removed when this is dropped, unless it is kept.
#[derive(Debug)]
pub(super) struct Temporary(Option<PathBuf>, Quarantine);

impl Temporary {
    pub(super) fn new(directory: PathBuf, quarantine: Quarantine) -> Self {
        Self(Some(directory), quarantine)
    }

    /// Where it is.
    pub(super) fn path(&self) -> &Path {
        self.0.as_deref().unwrap_or(Path::new(""))
    }

    /// Leaves the directory to the caller.
    pub(super) fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        if let Some(directory) = &self.0 {
            // The quarantine tells of what stays.
            let _ = self.1.remove(directory);
        }
    }
}
