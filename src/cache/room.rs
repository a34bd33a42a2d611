//! Adapter: what the cache may hold: the least recently used goes first, what is in use never; and what killed farriers left.
//!
//! Every visible name below `KIND/` is an entry, whatever the kind, with its time of modification as its last use. A new kind
//! needs nothing here.

use std::{
    collections::HashSet,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use fs_err as fs;
use runner::plan::LEAST_FREE;

use super::{Cache, CacheError, LockMode, locks, scratch};
use crate::{
    files::{self, if_there},
    registry::free_space,
    site::Storage,
};

/// Directories that hold no entries: work, locks, notes, the quarantine, what is remembered of engines' images and of this machine,
/// and the layout directory of builds that publish nothing.
const APART: [&str; 11] = [
    super::LOCKS,
    super::QUARANTINE,
    super::USES,
    super::WORK,
    RECORDS,
    "attempts",
    "boot",
    "engine-runs",
    "layout",
    "base",
    "toolchain",
];
const LOGS: &str = "logs";
const RECORDS: &str = "records";
/// Kinds whose entries grow after they were made: their size is not remembered.
const GROWING: [&str; 2] = ["apt", "git"];
/// The record of an entry's size: a kernel's tree has tens of thousands of files.
const SIZES: &str = "sizes";

/// Bytes of all records: a hundred thousand of the small ones.
const RECORDS_QUOTA: u64 = 256 << 20;
/// Bytes that are kept free for builds: with less than half of it they are stopped.
const FOR_BUILDS: u64 = 2 * LEAST_FREE;
/// What has no lock, was left by a killed process, and might be another one's, is removed when it is so old.
const LEFT_BEHIND: Duration = Duration::from_hours(24);

/// Something that can be removed to make room.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// `kind/key`.
    pub(crate) name: String,
    pub(crate) bytes: u64,
    /// When it was used last.
    pub(crate) used: SystemTime,
}

/// What must go so that no more than `most` bytes stay: the least recently used first, nothing that is in use.
pub(crate) fn surplus(mut entries: Vec<Entry>, most: u64, in_use: &HashSet<String>) -> Vec<Entry> {
    let mut held: u64 = entries.iter().map(|entry| entry.bytes).sum();
    entries.retain(|entry| !in_use.contains(&entry.name));
    entries.sort_by(|a, b| (a.used, &a.name).cmp(&(b.used, &b.name)));
    let goes = |entry: &Entry| {
        let goes = held > most;
        held = held.saturating_sub(entry.bytes);
        goes
    };
    entries.into_iter().take_while(goes).collect()
}

impl Cache {
    /// Removes what killed farriers left, and what is above the quotas. Another farrier that is at it is left alone.
    pub fn make_room(&self, quotas: &Storage) -> Result<(), CacheError> {
        files::private_directory(&self.root.join(super::LOCKS))?;
        let alone = self.root.join(super::LOCKS).join(".room");
        let Some(_alone) = locks::try_lock(&alone, LockMode::Exclusive)? else { return Ok(()) };
        self.sweep()?;
        let (logs, kinds): (Vec<String>, Vec<String>) =
            self.kinds("")?.into_iter().partition(|kind| kind.as_str() == LOGS);
        let records = self.kinds(RECORDS)?.into_iter().map(|kind| format!("{RECORDS}/{kind}")).collect();
        for (kinds, most) in
            [(kinds, quotas.cache.bytes()), (logs, quotas.logs.bytes()), (records, RECORDS_QUOTA)]
        {
            self.keep_below(&kinds, most)?;
        }
        Ok(())
    }

    fn keep_below(&self, kinds: &[String], most: u64) -> Result<(), CacheError> {
        let mut entries = Vec::new();
        for kind in kinds {
            self.add_entries(kind, &mut entries)?;
        }
        let held: u64 = entries.iter().map(|entry| entry.bytes).sum();
        // On a disk that others fill, the cache holds less.
        let missing = FOR_BUILDS.saturating_sub(free_space(&self.root)?);
        let doomed = surplus(entries, most.min(held.saturating_sub(missing)), &self.uses.all()?);
        if doomed.is_empty() {
            return Ok(());
        }
        let (removed, bytes) = self.remove(&doomed)?;
        tracing::info!(
            removed,
            bytes,
            quota = most,
            kinds = kinds.join(", "),
            "removed what was not used for longest from the cache"
        );
        Ok(())
    }

    /// The kinds below a part of the cache. One that is a link is another cache's.
    fn kinds(&self, part: &str) -> io::Result<Vec<String>> {
        let directory = self.root.join(part);
        let mut kinds = Vec::new();
        for entry in listing(&directory)? {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let is_apart = part.is_empty() && APART.contains(&name.as_str());
            if entry.file_type()?.is_dir() && !is_apart && !name.starts_with('.') {
                kinds.push(name);
            }
        }
        kinds.sort();
        Ok(kinds)
    }

    fn add_entries(&self, kind: &str, entries: &mut Vec<Entry>) -> Result<(), CacheError> {
        for found in listing(&self.root.join(kind))? {
            let Ok(key) = found.file_name().into_string() else { continue };
            // It may be gone by now.
            let Ok(metadata) = found.metadata() else { continue };
            if key.starts_with('.') {
                continue;
            }
            let used = metadata.modified()?;
            let bytes = if !metadata.is_dir() {
                metadata.blocks() * 512
            } else if GROWING.contains(&kind) {
                tree_bytes(&found.path())
            } else {
                self.size_of(kind, &key, &found.path())?
            };
            entries.push(Entry { name: format!("{kind}/{key}"), bytes, used });
        }
        Ok(())
    }

    /// The size of a directory, counted once.
    fn size_of(&self, kind: &str, key: &str, place: &Path) -> Result<u64, CacheError> {
        let record = format!("{kind}-{key}");
        if let Some(known) = self.read_record(SIZES, &record)? {
            return Ok(known);
        }
        let bytes = tree_bytes(place);
        self.write_record(SIZES, &record, &bytes)?;
        Ok(bytes)
    }

    /// Removes entries whose use has not begun meanwhile; says how many, and their bytes.
    fn remove(&self, doomed: &[Entry]) -> Result<(usize, u64), CacheError> {
        let mut moved = Vec::new();
        {
            let (in_use, _gate) = self.uses.closed()?;
            for entry in doomed.iter().filter(|entry| !in_use.contains(&entry.name)) {
                let place = self.root.join(&entry.name);
                if fs::metadata(&place).and_then(|found| found.modified()).ok() != Some(entry.used) {
                    continue;
                }
                let (parent, name) =
                    (place.parent(), place.file_name().unwrap_or_default().to_string_lossy());
                let gone = parent.unwrap_or(&self.root).join(format!("{GONE}{name}"));
                fs::rename(&place, &gone)?;
                moved.push((entry, gone));
            }
        }
        for (entry, gone) in &moved {
            self.remove_all(gone);
            if let Some((kind, key)) = entry.name.split_once('/').filter(|(kind, _)| *kind != RECORDS) {
                self.remove_record(SIZES, &format!("{kind}-{key}"))?;
                if let Some(_alone) = self.try_lock(kind, key, LockMode::Exclusive)? {
                    self.remove_all(&self.lock_path(kind, key)?);
                }
            }
        }
        Ok((moved.len(), moved.iter().map(|(entry, _)| entry.bytes).sum()))
    }

    /// Removes a file or directory. What stays is told, and tried again.
    fn remove_all(&self, path: &Path) {
        let _ = self.quarantine().remove(path);
    }

    fn remove_old(&self, path: &Path) {
        if is_old(path) {
            self.remove_all(path);
        }
    }

    /// Removes what killed farriers left. Who runs is known by their locks.
    fn sweep(&self) -> Result<(), CacheError> {
        self.uses.forget_dead();
        // First: what is moved there below was just tried.
        self.quarantine().sweep()?;
        let work = self.root.join(super::WORK);
        if work.is_dir() {
            scratch::remove_dead(&work, &self.quarantine())?;
        }
        for kind in self.kinds("")? {
            for left in listing(&self.root.join(&kind))? {
                let name = left.file_name().to_string_lossy().into_owned();
                if name.starts_with(GONE) {
                    self.remove_all(&left.path());
                } else if let Some(key) = super::key_of_temporary(&name) {
                    // Its maker has the lock.
                    if let Some(_lock) = self.try_lock(&kind, key, LockMode::Exclusive)? {
                        self.remove_all(&left.path());
                    }
                } else if name.starts_with('.') {
                    self.remove_old(&left.path());
                }
            }
        }
        let records = self.kinds(RECORDS)?.into_iter().map(|kind| Path::new(RECORDS).join(kind));
        let apart = [super::USES, super::WORK, "attempts", "engine-runs"].map(PathBuf::from);
        for part in records.chain(apart) {
            for left in listing(&self.root.join(part))? {
                let name = left.file_name();
                if name.as_encoded_bytes().starts_with(b".") && name != ".gate" {
                    self.remove_old(&left.path());
                }
            }
        }
        for lock in listing(&self.root.join(super::LOCKS))? {
            let path = lock.path();
            if is_old(&path) && locks::try_lock(&path, LockMode::Exclusive)?.is_some() {
                self.remove_all(&path);
            }
        }
        Ok(())
    }
}

/// How an entry begins that is being removed.
const GONE: &str = ".gone-";

/// What is in a directory; nothing where there is none.
fn listing(directory: &Path) -> io::Result<Vec<fs::DirEntry>> {
    if_there(fs::read_dir(directory))?.into_iter().flatten().collect()
}

/// What a tree takes on the disk.
fn tree_bytes(tree: &Path) -> u64 {
    let files = walkdir::WalkDir::new(tree).into_iter().filter_map(Result::ok);
    files.filter_map(|file| file.metadata().ok()).map(|found| found.blocks() * 512).sum()
}

/// Whether something was modified longer ago than so.
pub(super) fn is_older(path: &Path, than: Duration) -> bool {
    let changed = fs::symlink_metadata(path).and_then(|found| found.modified());
    changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > than))
}

fn is_old(path: &Path) -> bool {
    is_older(path, LEFT_BEHIND)
}
