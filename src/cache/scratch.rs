//! Adapter: directories of single builds, which go with their owner.

use std::{
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use fs_err::{self as fs, File};
use tempfile::NamedTempFile;

use crate::files::private_directory;

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
        private_directory(parent)?;
        remove_dead(parent)?;
        // It gets the name by which others look for it only when it is locked.
        let new = NamedTempFile::with_prefix_in(".new-", parent)?;
        new.as_file().lock()?;
        let unique = new.path().file_name().unwrap_or_default().to_string_lossy().replace(".new-", "build-");
        let lock_path = parent.join(format!("{unique}.lock"));
        let lock = new.persist(&lock_path).map_err(io::Error::from)?;
        let directory = lock_path.with_extension("d");
        let scratch = Self { directory, lock_path, _lock: lock };
        private_directory(&scratch.directory)?;
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
pub(crate) fn remove_tree(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
            open_up(directory)?;
            fs::remove_dir_all(directory)
        }
        other => other,
    }
}

fn open_up(directory: &Path) -> io::Result<()> {
    fs::set_permissions(directory, Permissions::from_mode(0o700))?;
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_up(&entry.path())?;
        }
    }
    Ok(())
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.directory) {
            tracing::warn!(path = %self.directory.display(), %error, "a build's directory was not removed");
        }
        let _ = fs::remove_file(&self.lock_path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_denies_itself_is_opened_and_links_are_not_followed() {
        let outside = tempfile::tempdir().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let before = mode(outside.path());
        let tree = tempfile::tempdir().unwrap();
        let (outer, inner) = (tree.path().join("outer"), tree.path().join("outer/inner"));
        fs::create_dir_all(&inner).unwrap();
        fs_err::os::unix::fs::symlink(outside.path(), outer.join("link")).unwrap();
        for directory in [&inner, &outer] {
            fs::set_permissions(directory, Permissions::from_mode(0o000)).unwrap();
        }
        open_up(tree.path()).unwrap();
        assert_eq!((mode(&outer), mode(&inner), mode(outside.path())), (0o700, 0o700, before));
        remove_tree(&outer).unwrap();
        assert!(!outer.exists() && outside.path().exists());
    }
}
