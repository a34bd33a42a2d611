//! Journal of a swap: one line per phase, written and synchronized before the phase begins.

use std::{
    fmt,
    fs::{File, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::FileExt as _,
    path::Path,
};

/// A phase of a swap. Each can be repeated, because a guard that was killed does not know how far it came.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Phase {
    /// Records API servers and network settings. Nothing has changed yet.
    Saving,
    /// Unloads the old modules.
    Unloading,
    /// Loads the new modules.
    Loading,
    /// Lets the network's owner configure the interfaces, and replays what is missing.
    Replaying,
    /// Waits until the recorded API servers answer.
    Confirming,
    /// The new modules stay.
    Committed,
    /// Unloads the new modules after a failure.
    UndoUnloading,
    /// Loads the old modules again.
    UndoLoading,
    /// Like [`Replaying`](Self::Replaying), with the old modules.
    UndoReplaying,
    /// Like [`Confirming`](Self::Confirming), with the old modules.
    UndoConfirming,
    /// The old modules are back, and the API servers answer.
    Undone,
    /// The API servers answer, but not all old modules are back. The failure of the entry names the loaded ones.
    PartlyUndone,
    /// No API server answers. The failure of the entry names the modules that are not back.
    Lost,
    /// Nothing was changed.
    Refused,
}

impl Phase {
    /// Phases with their names in the journal.
    pub const ALL: [(Self, &str); 14] = [
        (Self::Saving, "saving"),
        (Self::Unloading, "unloading"),
        (Self::Loading, "loading"),
        (Self::Replaying, "replaying"),
        (Self::Confirming, "confirming"),
        (Self::Committed, "committed"),
        (Self::UndoUnloading, "undo-unloading"),
        (Self::UndoLoading, "undo-loading"),
        (Self::UndoReplaying, "undo-replaying"),
        (Self::UndoConfirming, "undo-confirming"),
        (Self::Undone, "undone"),
        (Self::PartlyUndone, "partly-undone"),
        (Self::Lost, "lost"),
        (Self::Refused, "refused"),
    ];

    /// Whether the swap has ended.
    pub fn is_final(self) -> bool {
        matches!(self, Self::Committed | Self::Refused) || self.is_undo_end()
    }

    /// Whether the swap has ended with an undo, complete or not.
    pub fn is_undo_end(self) -> bool {
        matches!(self, Self::Undone | Self::PartlyUndone | Self::Lost)
    }

    /// Whether the phase is on the way to the new modules, and may have changed the node.
    pub fn is_forward(self) -> bool {
        matches!(self, Self::Unloading | Self::Loading | Self::Replaying | Self::Confirming)
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Self::ALL.iter().find(|(phase, _)| phase == self).map_or("", |(_, name)| name))
    }
}

/// Failure of a phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    /// Message for people.
    pub reason: String,
    /// Whether the same swap may succeed later, for example because a process uses a module now.
    pub transient: bool,
}

/// The start of a phase.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Seconds since the node's boot.
    pub uptime: u64,
    pub phase: Phase,
    /// Failure that led to this phase.
    pub failure: Option<Failure>,
}

impl Entry {
    /// Formats the line of the journal.
    pub fn to_line(&self) -> String {
        let Self { uptime, phase, failure } = self;
        let failure = failure.as_ref().map(|Failure { reason, transient }| {
            let kind = if *transient { "transient" } else { "lasting" };
            format!(" {kind} {}", reason.replace('\n', "; "))
        });
        format!("{uptime} {phase}{}\n", failure.unwrap_or_default())
    }

    /// Parses a line; `None` for a line of another form.
    fn parse(line: &str) -> Option<Self> {
        let mut fields = line.splitn(4, ' ');
        let uptime = fields.next()?.parse().ok()?;
        let name = fields.next()?;
        let (phase, _) = Phase::ALL.into_iter().find(|(_, other)| *other == name)?;
        let transient = match fields.next() {
            None => return Some(Self { uptime, phase, failure: None }),
            Some("transient") => true,
            Some("lasting") => false,
            Some(_) => return None,
        };
        let failure = Failure { reason: fields.next()?.to_owned(), transient };
        Some(Self { uptime, phase, failure: Some(failure) })
    }
}

/// The phases that a swap has begun, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Journal(pub Vec<Entry>);

impl Journal {
    /// Parses a journal up to the first damaged or incomplete line: a guard may have been killed while it wrote.
    pub fn parse(text: &[u8]) -> Self {
        Self::parse_prefix(text).0
    }

    /// Like [`parse`](Self::parse). Also returns the length of the parsed lines in bytes.
    fn parse_prefix(text: &[u8]) -> (Self, usize) {
        let (mut entries, mut length) = (Vec::new(), 0);
        for line in text.split_inclusive(|&byte| byte == b'\n') {
            let whole = line.strip_suffix(b"\n").and_then(|line| str::from_utf8(line).ok());
            let Some(entry) = whole.and_then(Entry::parse) else { break };
            entries.push(entry);
            length += line.len();
        }
        (Self(entries), length)
    }

    /// Returns the phase that began last.
    pub fn phase(&self) -> Option<Phase> {
        self.0.last().map(|entry| entry.phase)
    }

    /// Returns the failure that made the guard undo or refuse the swap. Later failures are its consequences.
    pub fn failure(&self) -> Option<&Failure> {
        self.0.iter().find_map(|entry| entry.failure.as_ref())
    }

    /// Returns the failure of the last entry. Of a final phase, it states how the node differs from before the swap.
    pub fn last_failure(&self) -> Option<&Failure> {
        self.0.last().and_then(|entry| entry.failure.as_ref())
    }

    /// Returns the time at which a phase first began, in seconds since the node's boot.
    pub fn start_of(&self, phase: Phase) -> Option<u64> {
        self.0.iter().find(|entry| entry.phase == phase).map(|entry| entry.uptime)
    }

    /// Counts how often a guard repeated a forward phase, which happens after the previous guard was killed in that
    /// phase.
    pub fn interruptions(&self) -> usize {
        let is_repeated = |pair: &&[Entry]| pair[0].phase == pair[1].phase && pair[0].phase.is_forward();
        self.0.windows(2).filter(is_repeated).count()
    }
}

/// A journal with its file.
#[derive(Debug)]
pub struct JournalFile {
    file: File,
    journal: Journal,
    /// Length of the file's whole lines in bytes.
    length: u64,
    /// Lines that could not be written yet.
    pending: String,
}

impl JournalFile {
    /// Opens the journal, and removes an incomplete last line.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)?;
        let (journal, length) = Journal::parse_prefix(&text);
        file.set_len(length as u64)?;
        Ok(Self { file, journal, length: length as u64, pending: String::new() })
    }

    /// Opens the journal so that writes fail.
    #[cfg(test)]
    pub(crate) fn read_only(path: &Path) -> Self {
        let (journal, length) = Journal::parse_prefix(&std::fs::read(path).unwrap());
        Self { file: File::open(path).unwrap(), journal, length: length as u64, pending: String::new() }
    }

    /// Returns the phases so far.
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Appends an entry to the journal in memory and to the file. After a failed write, which may have written a part of the
    /// line, the next call writes the whole line again.
    pub fn append(&mut self, entry: Entry) -> io::Result<()> {
        self.pending.push_str(&entry.to_line());
        self.journal.0.push(entry);
        self.file.write_all_at(self.pending.as_bytes(), self.length)?;
        self.file.sync_all()?;
        self.length += self.pending.len() as u64;
        self.pending.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn failure(reason: &str, transient: bool) -> Failure {
        Failure { reason: reason.to_owned(), transient }
    }

    #[test]
    fn a_journal_continues_after_a_line_that_was_cut() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let entries = [
            Entry { uptime: 1, phase: Phase::Saving, failure: None },
            Entry { uptime: 2, phase: Phase::UndoUnloading, failure: Some(failure("load m: né", false)) },
            Entry { uptime: 3, phase: Phase::Undone, failure: Some(failure("in use", true)) },
        ];
        let mut journal = JournalFile::open(&path).unwrap();
        for entry in &entries {
            journal.append(entry.clone()).unwrap();
        }
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "1 saving\n2 undo-unloading lasting load m: né\n3 undone transient in use\n");
        let text = text.as_bytes();
        for length in 0..text.len() {
            fs::write(&path, &text[..length]).unwrap();
            let mut journal = JournalFile::open(&path).unwrap();
            let whole = text[..length].split(|&byte| byte == b'\n').count() - 1;
            assert_eq!(journal.journal().0, entries[..whole], "{length}");
            journal.append(entries[whole].clone()).unwrap();
            assert_eq!(Journal::parse(&fs::read(&path).unwrap()).0, entries[..=whole], "{length}");
        }
    }

    /// A full file system takes a part of a line, and later has room again.
    #[test]
    fn a_line_that_could_not_be_written_is_written_with_the_next() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let mut journal = JournalFile::open(&path).unwrap();
        let append =
            |journal: &mut JournalFile, uptime, phase| journal.append(Entry { uptime, phase, failure: None });
        append(&mut journal, 1, Phase::Saving).unwrap();
        let writable = std::mem::replace(&mut journal.file, File::open(&path).unwrap());
        append(&mut journal, 2, Phase::Unloading).unwrap_err();
        fs::write(&path, "1 saving\n2 unlo").unwrap();
        journal.file = writable;
        append(&mut journal, 3, Phase::Loading).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "1 saving\n2 unloading\n3 loading\n");
        assert_eq!(JournalFile::open(&path).unwrap().journal(), journal.journal());
    }

    #[test]
    fn repeated_phases_are_interruptions() {
        let journal = Journal::parse(
            b"1 saving\n2 saving\n3 unloading\n4 loading\n9 loading\n12 loading\n13 replaying\n",
        );
        assert_eq!(journal.interruptions(), 2);
        assert_eq!(journal.start_of(Phase::Loading), Some(4));
        assert_eq!(journal.phase(), Some(Phase::Replaying));
    }

    #[test]
    fn a_damaged_line_ends_the_journal() {
        for damaged in [&b"unknown"[..], b"loading lasting \xff"] {
            let journal = Journal::parse(&[b"1 saving\n2 ", damaged, b"\n3 loading\n"].concat());
            assert_eq!(journal.phase(), Some(Phase::Saving));
        }
    }
}
