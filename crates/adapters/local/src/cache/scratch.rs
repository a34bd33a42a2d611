//! Per-build scratch directories, removed when dropped.

use std::{
    io,
    path::{Path, PathBuf},
};

use fs_err::{self as fs, File};
use tempfile::NamedTempFile;

use super::quarantine::Quarantine;
use crate::files::private_directory;

/// A scratch directory of one build; see [`Cache::scratch`](super::Cache::scratch).
#[derive(Debug)]
pub struct Scratch {
    directory: PathBuf,
    lock_path: PathBuf,
    quarantine: Quarantine,
    _lock: std::fs::File,
}

impl Scratch {
    /// Creates an empty scratch directory. First removes the directories of killed farrier processes, whose locks are free.
    pub(super) fn create_in(parent: &Path, quarantine: Quarantine) -> io::Result<Self> {
        private_directory(parent)?;
        remove_abandoned(parent, &quarantine)?;
        // Lock the file before it gets the name by which other farrier processes look for it.
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

    /// Returns the path of the directory.
    pub fn path(&self) -> &Path {
        &self.directory
    }
}

/// Removes the scratch directories of processes that have ended. A process holds the lock of its directory from before the
/// creation until after the removal of the directory.
pub(super) fn remove_abandoned(parent: &Path, quarantine: &Quarantine) -> io::Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        let path = entry.path();
        let is_abandoned = match path.extension().and_then(|extension| extension.to_str()) {
            Some("lock") => File::open(&path).is_ok_and(|file| file.try_lock().is_ok()),
            Some("d") => !path.with_extension("lock").exists(),
            _ => false,
        };
        if is_abandoned {
            // Another farrier process may be removing the same directory. Leftovers are removed next time.
            let _ = quarantine.remove(&path.with_extension("d"));
            let _ = fs::remove_file(path.with_extension("lock"));
        }
    }
    Ok(())
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The quarantine logs what could not be removed.
        let _ = self.quarantine.remove(&self.directory);
        let _ = fs::remove_file(&self.lock_path);
    }
}

/// A directory that is removed on drop, unless it is kept.
#[derive(Debug)]
pub(super) struct Temporary(Option<PathBuf>, Quarantine);

impl Temporary {
    pub(super) fn new(directory: PathBuf, quarantine: Quarantine) -> Self {
        Self(Some(directory), quarantine)
    }

    /// Returns the path of the directory.
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
            // The quarantine logs what could not be removed.
            let _ = self.1.remove(directory);
        }
    }
}
