//! Tracks which entries are in use across all farrier processes that share the cache.
//!
//! Each user keeps a note of its entries, locked while the user lives. A gate lock keeps users from taking an entry into use
//! while entries are moved away: users hold it shared, and an evicting farrier holds it exclusively for a moment.

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
    own: Mutex<Option<Own>>,
}

#[derive(Debug)]
struct Own {
    note: Note,
    entries: HashSet<String>,
}

impl Uses {
    pub(super) fn in_directory(directory: PathBuf) -> Self {
        Self { notes: Notes::in_directory(directory.clone()), directory, own: Mutex::default() }
    }

    /// Returns a separate user of the same cache.
    pub(super) fn another(&self) -> Self {
        Self::in_directory(self.directory.clone())
    }

    /// Marks an entry as in use. An entry that exists after this call is not evicted.
    pub(super) fn add(&self, entry: &str) -> io::Result<()> {
        let mut own = self.own.lock();
        let own = match &mut *own {
            Some(own) => own,
            none => none.insert(Own {
                note: self.notes.begin(&format!("{:016x}", fastrand::u64(..)))?,
                entries: HashSet::new(),
            }),
        };
        if own.entries.contains(entry) {
            return Ok(());
        }
        let gate = self.gate()?;
        gate.lock_shared()?;
        own.note.say(entry)?;
        own.entries.insert(entry.to_owned());
        Ok(())
    }

    /// Returns all entries in use by any user. While the returned gate is held, no further entry is taken into use.
    pub(super) fn closed(&self) -> io::Result<(HashSet<String>, File)> {
        let gate = self.gate()?;
        gate.lock()?;
        Ok((self.all()?, gate))
    }

    /// Returns all entries currently in use by any user.
    pub(super) fn all(&self) -> io::Result<HashSet<String>> {
        private_directory(&self.directory)?;
        Ok(self.notes.said()?.iter().flat_map(|said| said.lines()).map(str::to_owned).collect())
    }

    /// Removes the notes of killed processes.
    pub(super) fn forget_dead(&self) {
        self.notes.dead().into_iter().for_each(|(_, note)| note.forget());
    }

    fn gate(&self) -> io::Result<File> {
        private_directory(&self.directory)?;
        File::options().create(true).truncate(false).write(true).open(self.directory.join(".gate"))
    }
}

impl Drop for Uses {
    fn drop(&mut self) {
        if let Some(own) = self.own.lock().take() {
            own.note.forget();
        }
    }
}
