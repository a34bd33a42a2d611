//! On-disk notes about runs that may be killed before they report an outcome: builds, and an engine's objects for a build.
//!
//! farrier writes a note before its run begins, and removes the note once the run's outcome is known and all of the run's
//! objects are removed. The note is locked during the run. An unlocked note therefore belongs to a run whose farrier was
//! killed, or whose engine died before the cleanup.

use std::{
    fs::TryLockError,
    io::{Read as _, Write as _},
    path::PathBuf,
};

use fs_err::{self as fs, File};
use tempfile::NamedTempFile;

/// A directory of notes.
#[derive(Clone, Debug)]
pub struct Notes(PathBuf);

/// The note of one run, locked while this value exists.
#[derive(Debug)]
pub struct Note {
    path: PathBuf,
    locked_file: File,
}

impl Notes {
    /// Uses the notes in a directory. The first note creates the directory.
    pub fn in_directory(directory: PathBuf) -> Self {
        Self(directory)
    }

    /// Writes the note of a run that is about to begin.
    pub fn begin(&self, run: &str) -> std::io::Result<Note> {
        fs::create_dir_all(&self.0)?;
        // Give the note its name only once it is locked. Otherwise another farrier could treat the run as abandoned.
        let new = NamedTempFile::with_prefix_in(".new-", &self.0)?;
        new.as_file().lock()?;
        let path = self.0.join(run);
        let lock = File::from_parts(new.persist(&path)?, &path);
        Ok(Note { path, locked_file: lock })
    }

    /// Returns the runs that have not ended, in no particular order, each with its open note. The open file stays readable
    /// even if the note is removed.
    pub fn running(&self) -> std::io::Result<impl Iterator<Item = (String, File)>> {
        let running = |entry: fs::DirEntry| {
            let (run, file) = (entry.file_name().into_string().ok()?, File::open(entry.path()).ok()?);
            // A note that is gone or unlocked belongs to a run that has ended.
            matches!(file.try_lock(), Err(TryLockError::WouldBlock)).then_some((run, file))
        };
        Ok(fs::read_dir(&self.0)?.flatten().filter(is_note).filter_map(running))
    }

    /// Returns the texts of the notes of all runs that have not ended.
    pub(crate) fn texts_of_running(&self) -> std::io::Result<Vec<String>> {
        let read = |(_, mut file): (String, File)| {
            let mut text = String::new();
            file.read_to_string(&mut text).map(|_| text)
        };
        self.running()?.map(read).collect()
    }

    /// Returns the runs that ended without removing their notes. The caller takes over each note and its lock.
    pub fn abandoned(&self) -> Vec<(String, Note)> {
        let Ok(entries) = fs::read_dir(&self.0) else { return Vec::new() };
        let abandoned = entries.flatten().filter(is_note).filter_map(|entry| {
            let (path, run) = (entry.path(), entry.file_name().into_string().ok()?);
            let lock = File::open(&path).ok()?;
            lock.try_lock().ok()?;
            Some((run, Note { path, locked_file: lock }))
        });
        abandoned.collect()
    }
}

/// Whether a directory entry is a note. A note that is still being created has a name with a leading dot.
fn is_note(entry: &fs::DirEntry) -> bool {
    !entry.file_name().as_encoded_bytes().starts_with(b".")
}

impl Note {
    /// Appends a line to the note.
    pub(crate) fn append_line(&mut self, line: &str) -> std::io::Result<()> {
        self.locked_file.write_all(format!("{line}\n").as_bytes())
    }

    /// Removes the note, once the run's outcome is known and all of the run's objects are removed.
    pub fn remove(self) {
        if let Err(error) = fs::remove_file(&self.path) {
            tracing::debug!(path = %self.path.display(), %error, "a run's note could not be removed; farrier reads it again later");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_an_outcome_is_abandoned_once_its_process_ends() {
        let directory = tempfile::tempdir().unwrap();
        let notes = Notes::in_directory(directory.path().join("notes"));
        assert!(notes.abandoned().is_empty());
        let alive = notes.begin("alive").unwrap();
        assert_eq!(notes.running().unwrap().map(|(run, _)| run).collect::<Vec<_>>(), ["alive"]);
        drop(notes.begin("dead").unwrap());
        notes.begin("done").unwrap().remove();
        let (name, note) = notes.abandoned().pop().unwrap();
        assert_eq!(
            (name.as_str(), notes.abandoned().len()),
            ("dead", 0),
            "only one caller takes over a note"
        );
        note.remove();
        drop(alive);
        assert_eq!(notes.abandoned().len(), 1);
    }
}
