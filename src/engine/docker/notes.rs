//! Adapter: notes of the runs that a daemon may still hold something of.
//!
//! A run is noted before it begins, and the note goes when nothing of it is left. It is locked for as long as the run lives:
//! a note that is not is one of a run whose farrier was killed, or whose engine died before it was cleaned up.

use std::path::{Path, PathBuf};

use fs_err::{self as fs, File};
use tempfile::NamedTempFile;

use crate::image::Digest;

/// The directory of one daemon's notes.
#[derive(Clone, Debug)]
pub(super) struct Notes(PathBuf);

/// One run's note.
#[derive(Debug)]
pub(super) struct Note {
    path: PathBuf,
    _lock: File,
}

impl Notes {
    /// Those on the daemon at an address, below the directory for all of them.
    pub(super) fn of(directory: &Path, address: &str) -> Self {
        Self(directory.join(&Digest::of(address.as_bytes()).hex()[..16]))
    }

    /// Notes that a run of this name begins.
    pub(super) fn begin(&self, run: &str) -> std::io::Result<Note> {
        fs::create_dir_all(&self.0)?;
        // It gets its name when it is locked: before, another farrier might take the run for a dead one.
        let new = NamedTempFile::with_prefix_in(".new-", &self.0)?;
        new.as_file().lock()?;
        let path = self.0.join(run);
        let lock = File::from_parts(new.persist(&path)?, &path);
        Ok(Note { path, _lock: lock })
    }

    /// The runs that are over and may have left something, each with its note, which is this process's now.
    pub(super) fn dead(&self) -> Vec<(String, Note)> {
        let Ok(entries) = fs::read_dir(&self.0) else { return Vec::new() };
        let dead = entries.flatten().filter_map(|entry| {
            let (path, run) = (entry.path(), entry.file_name().into_string().ok()?);
            let lock = File::open(&path).ok().filter(|_| !run.starts_with('.'))?;
            lock.try_lock().ok()?;
            Some((run, Note { path, _lock: lock }))
        });
        dead.collect()
    }
}

impl Note {
    /// Nothing of the run is left.
    pub(super) fn forget(self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "a run's note stays; it is looked at again");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_runs_that_are_over_are_dead() {
        let directory = tempfile::tempdir().unwrap();
        let notes = Notes::of(directory.path(), "unix:///a.sock");
        assert!(notes.dead().is_empty());
        let alive = notes.begin("alive").unwrap();
        drop(notes.begin("dead").unwrap());
        notes.begin("done").unwrap().forget();
        let (name, note) = notes.dead().pop().unwrap();
        assert_eq!((name.as_str(), notes.dead().len()), ("dead", 0), "it is taken by one alone");
        note.forget();
        drop(alive);
        assert_eq!(notes.dead().len(), 1);
        // Another daemon is another matter.
        assert!(Notes::of(directory.path(), "unix:///b.sock").dead().is_empty());
    }
}
