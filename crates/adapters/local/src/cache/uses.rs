//! Tracks which entries are in use across all farrier processes that share the cache.
//!
//! Each user (a [`Uses`] value) has a note with the names of its entries, which is locked while the value exists. A gate
//! lock separates users from eviction: a user holds it shared to mark an entry as in use, and an evicting farrier holds
//! it exclusively to move entries away.

use std::{collections::HashSet, io, path::PathBuf};

use fs_err::File;
use parking_lot::Mutex;

use crate::{
    files::private_directory,
    run_notes::{Note, Notes},
};

/// The entries that one user of the cache is using. They are released when this value is dropped or the process is killed.
#[derive(Debug)]
pub(super) struct Uses {
    directory: PathBuf,
    notes: Notes,
    open_note: Mutex<Option<OpenNote>>,
}

#[derive(Debug)]
struct OpenNote {
    note: Note,
    entries: HashSet<String>,
}

impl Uses {
    pub(super) fn in_directory(directory: PathBuf) -> Self {
        Self { notes: Notes::in_directory(directory.clone()), directory, open_note: Mutex::default() }
    }

    /// Returns a separate user of the same cache.
    pub(super) fn another(&self) -> Self {
        Self::in_directory(self.directory.clone())
    }

    /// Marks an entry as in use. An entry that exists after this call is not evicted.
    pub(super) fn add(&self, entry: &str) -> io::Result<()> {
        let mut open_note = self.open_note.lock();
        let open_note = match &mut *open_note {
            Some(open_note) => open_note,
            empty => empty.insert(OpenNote {
                note: self.notes.begin(&format!("{:016x}", fastrand::u64(..)))?,
                entries: HashSet::new(),
            }),
        };
        if open_note.entries.contains(entry) {
            return Ok(());
        }
        let gate = self.gate()?;
        gate.lock_shared()?;
        open_note.note.append_line(entry)?;
        open_note.entries.insert(entry.to_owned());
        Ok(())
    }

    /// Returns all entries in use by any user, and the gate lock. While the lock is held, no user can mark further entries.
    pub(super) fn lock_all(&self) -> io::Result<(HashSet<String>, File)> {
        let gate = self.gate()?;
        gate.lock()?;
        Ok((self.all()?, gate))
    }

    /// Returns all entries currently in use by any user.
    pub(super) fn all(&self) -> io::Result<HashSet<String>> {
        private_directory(&self.directory)?;
        Ok(self.notes.texts_of_running()?.iter().flat_map(|text| text.lines()).map(str::to_owned).collect())
    }

    /// Removes the notes of killed processes.
    pub(super) fn remove_abandoned(&self) {
        self.notes.abandoned().into_iter().for_each(|(_, note)| note.remove());
    }

    fn gate(&self) -> io::Result<File> {
        private_directory(&self.directory)?;
        File::options().create(true).truncate(false).write(true).open(self.directory.join(".gate"))
    }
}

impl Drop for Uses {
    fn drop(&mut self) {
        if let Some(open_note) = self.open_note.lock().take() {
            open_note.note.remove();
        }
    }
}
