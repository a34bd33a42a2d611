//! Adapter: which entries are in use, known to every farrier that has the same cache.
//!
//! Whoever uses entries has a note of them, which is locked for as long as it lives. A gate keeps an entry from being taken
//! into use while entries are moved away: users pass it side by side, and who removes has it alone, for a moment.

use std::{collections::HashSet, io, path::PathBuf};

use fs_err::File;
use parking_lot::Mutex;

use crate::{
    files::private_directory,
    run_notes::{Note, Notes},
};

/// What one user of the cache uses. It is free again when this is dropped, or the process killed.
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

    /// A user of its own beside this one.
    pub(super) fn another(&self) -> Self {
        Self::in_directory(self.directory.clone())
    }

    /// From now on the entry is not removed: if it is there afterwards, it stays.
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

    /// What anybody uses, and no entry is taken into use while the gate is held.
    pub(super) fn closed(&self) -> io::Result<(HashSet<String>, File)> {
        let gate = self.gate()?;
        gate.lock()?;
        Ok((self.all()?, gate))
    }

    /// What anybody uses at this moment.
    pub(super) fn all(&self) -> io::Result<HashSet<String>> {
        private_directory(&self.directory)?;
        Ok(self.notes.said()?.iter().flat_map(|said| said.lines()).map(str::to_owned).collect())
    }

    /// Forgets the notes of those that were killed.
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
