//! Adapter: directories of single builds, which go with their owner.

use std::{
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use fs_err::{self as fs, File};
use tempfile::NamedTempFile;
use walkdir::WalkDir;

/// A directory of one build, see [`Cache::scratch`](super::Cache::scratch).
#[derive(Debug)]
pub struct Scratch {
    directory: PathBuf,
    lock_path: PathBuf,
    _lock: std::fs::File,
}

impl Scratch {
    /// An empty one. Those of farriers that were killed are removed first: their lock is free.
    pub(super) fn below(parent: &Path) -> io::Result<Self> {
        fs::create_dir_all(parent)?;
        remove_dead(parent)?;
        // It gets the name by which others look for it only when it is locked.
        let new = NamedTempFile::with_prefix_in(".new-", parent)?;
        new.as_file().lock()?;
        let unique = new.path().file_name().unwrap_or_default().to_string_lossy().replace(".new-", "build-");
        let lock_path = parent.join(format!("{unique}.lock"));
        let lock = new.persist(&lock_path).map_err(io::Error::from)?;
        let directory = lock_path.with_extension("d");
        let scratch = Self { directory, lock_path, _lock: lock };
        fs::create_dir(&scratch.directory)?;
        Ok(scratch)
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.directory
    }
}

/// Removes those whose owner is gone. Each has its lock before it is made, and until it is removed.
pub(super) fn remove_dead(parent: &Path) -> io::Result<()> {
    for entry in fs::read_dir(parent)?.flatten() {
        let path = entry.path();
        let is_dead = match path.extension().and_then(|extension| extension.to_str()) {
            Some("lock") => File::open(&path).is_ok_and(|file| file.try_lock().is_ok()),
            Some("d") => !path.with_extension("lock").exists(),
            _ => false,
        };
        if is_dead {
            // Another farrier may be at the same; what is left is removed next time.
            let _ = remove_tree(&path.with_extension("d"));
            let _ = fs::remove_file(path.with_extension("lock"));
        }
    }
    Ok(())
}

/// Removes a directory that a build wrote to, where directories may deny themselves to their owner.
fn remove_tree(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        other => return other,
    }
    // Each is opened after it was made to be: a walk opens a directory when it is asked for the next entry.
    for entry in WalkDir::new(directory) {
        let entry = entry?;
        if entry.file_type().is_dir() {
            fs::set_permissions(entry.path(), Permissions::from_mode(0o700))?;
        }
    }
    fs::remove_dir_all(directory)
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.directory) {
            tracing::warn!(path = %self.directory.display(), %error, "a build's directory was not removed");
        }
        let _ = fs::remove_file(&self.lock_path);
    }
}
