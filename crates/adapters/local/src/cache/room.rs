//! Keeps the cache within its quotas. Evicts the least recently used entries first, never those in use, and removes leftovers of
//! killed farrier processes.
//!
//! Every visible name below `KIND/` is an entry, whatever the kind, and its modification time is its last use. A new kind needs
//! no change here.

use std::{
    collections::HashSet,
    hash::BuildHasher,
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use farrier_core::site::Storage;
use fs_err as fs;
use oci::client::free_space;
use runner::plan::MIN_FREE;

use super::{Cache, CacheError, LockMode, locks, scratch};
use crate::files::{self, if_there};

/// Directories without entries: work, locks, notes, the quarantine, state about engines' images and about this machine, and the
/// layout directory of builds that publish nothing.
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
/// Kinds whose entries grow after they were made; their size is not recorded.
const GROWING: [&str; 2] = ["apt", "git"];
/// Kind of the records of entries' sizes. Sizes are recorded because a kernel's tree has tens of thousands of files.
const SIZES: &str = "sizes";

/// Quota for all records, in bytes: enough for a hundred thousand small ones.
const RECORDS_QUOTA: u64 = 256 << 20;
/// Disk space kept free for builds, in bytes. Builds are stopped when less than half of it is free.
const FOR_BUILDS: u64 = 2 * MIN_FREE;
/// Minimum age of leftovers without a lock before their removal; another process might still own younger ones.
const LEFT_BEHIND: Duration = Duration::from_hours(24);

/// An entry that eviction can remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The entry's path in the cache, as `kind/key`.
    pub name: String,
    pub bytes: u64,
    /// Time of the last use.
    pub used: SystemTime,
}

/// Returns the entries to evict so that at most `most` bytes remain: the least recently used first, none that is in use.
pub fn surplus<S: BuildHasher>(
    mut entries: Vec<Entry>,
    most: u64,
    in_use: &HashSet<String, S>,
) -> Vec<Entry> {
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
    /// Removes leftovers of killed farrier processes and evicts entries above the quotas. Returns at once if another
    /// process is doing the same.
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
        // Shrink the cache on a disk that other programs fill.
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
            "evicted the least recently used cache entries"
        );
        Ok(())
    }

    /// Lists the kinds below a directory of the cache. A symbolic link is skipped, because it belongs to another cache.
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
            // The entry may have been removed since.
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

    /// Returns the size of a directory, measured once and then recorded.
    fn size_of(&self, kind: &str, key: &str, place: &Path) -> Result<u64, CacheError> {
        let record = format!("{kind}-{key}");
        if let Some(known) = self.read_record(SIZES, &record)? {
            return Ok(known);
        }
        let bytes = tree_bytes(place);
        self.write_record(SIZES, &record, &bytes)?;
        Ok(bytes)
    }

    /// Removes the entries that have not been used since they were listed. Returns their number and their size in bytes.
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

    /// Removes a file or directory. The quarantine logs a failure and retries.
    fn remove_all(&self, path: &Path) {
        let _ = self.quarantine().remove(path);
    }

    fn remove_old(&self, path: &Path) {
        if is_old(path) {
            self.remove_all(path);
        }
    }

    /// Removes leftovers of killed farrier processes. A running farrier is recognized by its locks.
    fn sweep(&self) -> Result<(), CacheError> {
        self.uses.forget_dead();
        // Sweep the quarantine first: what the steps below move into it has just been tried.
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
                    // The process making the entry holds its lock.
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

/// Name prefix of entries that are being removed.
const GONE: &str = ".gone-";

/// Lists a directory; returns nothing if it does not exist.
fn listing(directory: &Path) -> io::Result<Vec<fs::DirEntry>> {
    if_there(fs::read_dir(directory))?.into_iter().flatten().collect()
}

/// Returns the disk usage of a tree in bytes.
fn tree_bytes(tree: &Path) -> u64 {
    let files = walkdir::WalkDir::new(tree).into_iter().filter_map(Result::ok);
    files.filter_map(|file| file.metadata().ok()).map(|found| found.blocks() * 512).sum()
}

/// Whether a path was last modified longer ago than `than`.
pub(super) fn is_older(path: &Path, than: Duration) -> bool {
    let changed = fs::symlink_metadata(path).and_then(|found| found.modified());
    changed.is_ok_and(|at| at.elapsed().is_ok_and(|age| age > than))
}

fn is_old(path: &Path) -> bool {
    is_older(path, LEFT_BEHIND)
}
