//! Adapter: notes of runs that may end without having been able to say so: builds, and what an engine makes for one.
//!
//! A run is noted before it begins, and the note goes when its outcome is known and nothing of it is left. It is locked for as
//! long as the run lives: a note that is not locked is one of a run whose farrier was killed, or whose engine died before it
//! was cleaned up.

use std::{
    fs::TryLockError,
    io::{Read as _, Write as _},
    path::PathBuf,
};

use fs_err::{self as fs, File};
use tempfile::NamedTempFile;

/// A directory of notes.
#[derive(Clone, Debug)]
pub(crate) struct Notes(PathBuf);

/// One run's note.
#[derive(Debug)]
pub(crate) struct Note {
    path: PathBuf,
    locked: File,
}

impl Notes {
    /// Those in a directory, which is made with the first one.
    pub(crate) fn in_directory(directory: PathBuf) -> Self {
        Self(directory)
    }

    /// Notes that a run of this name begins.
    pub(crate) fn begin(&self, run: &str) -> std::io::Result<Note> {
        fs::create_dir_all(&self.0)?;
        // It gets its name when it is locked: before, another farrier might take the run for a dead one.
        let new = NamedTempFile::with_prefix_in(".new-", &self.0)?;
        new.as_file().lock()?;
        let path = self.0.join(run);
        let lock = File::from_parts(new.persist(&path)?, &path);
        Ok(Note { path, locked: lock })
    }

    /// The runs that live, each with its open note, in no order. Reading it needs its name no more, which may be gone by now.
    pub(crate) fn living(&self) -> std::io::Result<impl Iterator<Item = (String, File)>> {
        let living = |entry: fs::DirEntry| {
            let (run, file) = (entry.file_name().into_string().ok()?, File::open(entry.path()).ok()?);
            // One that is gone, or not locked, is over.
            matches!(file.try_lock(), Err(TryLockError::WouldBlock)).then_some((run, file))
        };
        Ok(fs::read_dir(&self.0)?.flatten().filter(is_note).filter_map(living))
    }

    /// What they have said of themselves.
    pub(crate) fn said(&self) -> std::io::Result<Vec<String>> {
        let read = |(_, mut file): (String, File)| {
            let mut text = String::new();
            file.read_to_string(&mut text).map(|_| text)
        };
        self.living()?.map(read).collect()
    }

    /// The runs that are over and were not forgotten, each with its note, which is the caller's now.
    pub(crate) fn dead(&self) -> Vec<(String, Note)> {
        let Ok(entries) = fs::read_dir(&self.0) else { return Vec::new() };
        let dead = entries.flatten().filter(is_note).filter_map(|entry| {
            let (path, run) = (entry.path(), entry.file_name().into_string().ok()?);
            let lock = File::open(&path).ok()?;
            lock.try_lock().ok()?;
            Some((run, Note { path, locked: lock }))
        });
        dead.collect()
    }
}

/// Others are being made.
fn is_note(entry: &fs::DirEntry) -> bool {
    !entry.file_name().as_encoded_bytes().starts_with(b".")
}

impl Note {
    /// Adds a line to what the run says of itself.
    pub(crate) fn say(&mut self, line: &str) -> std::io::Result<()> {
        self.locked.write_all(format!("{line}\n").as_bytes())
    }

    /// The run's outcome is known, and nothing of it is left.
    pub(crate) fn forget(self) {
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
        let notes = Notes::in_directory(directory.path().join("notes"));
        assert!(notes.dead().is_empty());
        let alive = notes.begin("alive").unwrap();
        assert_eq!(notes.living().unwrap().map(|(run, _)| run).collect::<Vec<_>>(), ["alive"]);
        drop(notes.begin("dead").unwrap());
        notes.begin("done").unwrap().forget();
        let (name, note) = notes.dead().pop().unwrap();
        assert_eq!((name.as_str(), notes.dead().len()), ("dead", 0), "it is taken by one alone");
        note.forget();
        drop(alive);
        assert_eq!(notes.dead().len(), 1);
    }
}
