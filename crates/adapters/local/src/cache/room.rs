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
const NOT_ENTRIES: [&str; 11] = [
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
const MIN_FREE_FOR_BUILDS: u64 = 2 * MIN_FREE;
/// Minimum age of a leftover without a lock before its removal: another process may still use a younger one.
const MIN_LEFTOVER_AGE: Duration = Duration::from_hours(24);

/// An entry that eviction can remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The entry's path in the cache, as `kind/key`.
    pub name: String,
    pub bytes: u64,
    /// Time of the last use.
    pub used: SystemTime,
}

/// Returns the entries to evict so that at most `quota` bytes remain, least recently used first. Entries in use are kept.
pub fn surplus<S: BuildHasher>(
    mut entries: Vec<Entry>,
    quota: u64,
    in_use: &HashSet<String, S>,
) -> Vec<Entry> {
    let mut total: u64 = entries.iter().map(|entry| entry.bytes).sum();
    entries.retain(|entry| !in_use.contains(&entry.name));
    entries.sort_by(|a, b| (a.used, &a.name).cmp(&(b.used, &b.name)));
    let is_evicted = |entry: &Entry| {
        let is_evicted = total > quota;
        total = total.saturating_sub(entry.bytes);
        is_evicted
    };
    entries.into_iter().take_while(is_evicted).collect()
}

impl Cache {
    /// Removes leftovers of killed farrier processes and evicts entries above the quotas. Returns at once if another
    /// process is doing the same.
    pub fn make_room(&self, quotas: &Storage) -> Result<(), CacheError> {
        files::private_directory(&self.root.join(super::LOCKS))?;
        let lock_path = self.root.join(super::LOCKS).join(".room");
        let Some(_lock) = locks::try_lock(&lock_path, LockMode::Exclusive)? else { return Ok(()) };
        self.sweep()?;
        let (logs, kinds): (Vec<String>, Vec<String>) =
            self.kinds("")?.into_iter().partition(|kind| kind.as_str() == LOGS);
        let records = self.kinds(RECORDS)?.into_iter().map(|kind| format!("{RECORDS}/{kind}")).collect();
        for (kinds, quota) in
            [(kinds, quotas.cache.bytes()), (logs, quotas.logs.bytes()), (records, RECORDS_QUOTA)]
        {
            self.enforce_quota(&kinds, quota)?;
        }
        Ok(())
    }

    fn enforce_quota(&self, kinds: &[String], quota: u64) -> Result<(), CacheError> {
        let mut entries = Vec::new();
        for kind in kinds {
            self.add_entries(kind, &mut entries)?;
        }
        let total: u64 = entries.iter().map(|entry| entry.bytes).sum();
        // Shrink the cache on a disk that other programs fill.
        let shortage = MIN_FREE_FOR_BUILDS.saturating_sub(free_space(&self.root)?);
        let to_evict = surplus(entries, quota.min(total.saturating_sub(shortage)), &self.uses.all()?);
        if to_evict.is_empty() {
            return Ok(());
        }
        let (removed, bytes) = self.evict(&to_evict)?;
        tracing::info!(
            removed,
            bytes,
            quota,
            kinds = kinds.join(", "),
            "evicted the least recently used cache entries"
        );
        Ok(())
    }

    /// Lists the kinds in a subdirectory of the cache. Skips symbolic links, which belong to another cache.
    fn kinds(&self, subdirectory: &str) -> io::Result<Vec<String>> {
        let directory = self.root.join(subdirectory);
        let mut kinds = Vec::new();
        for entry in listing(&directory)? {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let is_excluded = subdirectory.is_empty() && NOT_ENTRIES.contains(&name.as_str());
            if entry.file_type()?.is_dir() && !is_excluded && !name.starts_with('.') {
                kinds.push(name);
            }
        }
        kinds.sort();
        Ok(kinds)
    }

    fn add_entries(&self, kind: &str, entries: &mut Vec<Entry>) -> Result<(), CacheError> {
        for directory_entry in listing(&self.root.join(kind))? {
            let Ok(key) = directory_entry.file_name().into_string() else { continue };
            // The entry may have been removed since.
            let Ok(metadata) = directory_entry.metadata() else { continue };
            if key.starts_with('.') {
                continue;
            }
            let used = metadata.modified()?;
            let bytes = if !metadata.is_dir() {
                metadata.blocks() * 512
            } else if GROWING.contains(&kind) {
                tree_bytes(&directory_entry.path())
            } else {
                self.size_of(kind, &key, &directory_entry.path())?
            };
            entries.push(Entry { name: format!("{kind}/{key}"), bytes, used });
        }
        Ok(())
    }

    /// Returns the size of a directory, measured once and then recorded.
    fn size_of(&self, kind: &str, key: &str, path: &Path) -> Result<u64, CacheError> {
        let record = format!("{kind}-{key}");
        if let Some(recorded) = self.read_record(SIZES, &record)? {
            return Ok(recorded);
        }
        let bytes = tree_bytes(path);
        self.write_record(SIZES, &record, &bytes)?;
        Ok(bytes)
    }

    /// Removes the entries that have not been used since they were listed. Returns their number and their size in bytes.
    fn evict(&self, to_evict: &[Entry]) -> Result<(usize, u64), CacheError> {
        let mut moved = Vec::new();
        {
            let (in_use, _lock) = self.uses.lock_all()?;
            for entry in to_evict.iter().filter(|entry| !in_use.contains(&entry.name)) {
                let path = self.root.join(&entry.name);
                if fs::metadata(&path).and_then(|metadata| metadata.modified()).ok() != Some(entry.used) {
                    continue;
                }
                let (parent, name) = (path.parent(), path.file_name().unwrap_or_default().to_string_lossy());
                let moved_path = parent.unwrap_or(&self.root).join(format!("{REMOVING_PREFIX}{name}"));
                fs::rename(&path, &moved_path)?;
                moved.push((entry, moved_path));
            }
        }
        for (entry, moved_path) in &moved {
            self.remove_all(moved_path);
            if let Some((kind, key)) = entry.name.split_once('/').filter(|(kind, _)| *kind != RECORDS) {
                self.remove_record(SIZES, &format!("{kind}-{key}"))?;
                if let Some(_lock) = self.try_lock(kind, key, LockMode::Exclusive)? {
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
        self.uses.remove_abandoned();
        // Sweep the quarantine first: the steps below may add files whose removal has just failed.
        self.quarantine().sweep()?;
        let work = self.root.join(super::WORK);
        if work.is_dir() {
            scratch::remove_abandoned(&work, &self.quarantine())?;
        }
        for kind in self.kinds("")? {
            for leftover in listing(&self.root.join(&kind))? {
                let name = leftover.file_name().to_string_lossy().into_owned();
                if name.starts_with(REMOVING_PREFIX) {
                    self.remove_all(&leftover.path());
                } else if let Some(key) = super::key_of_temporary(&name) {
                    // The process making the entry holds its lock.
                    if let Some(_lock) = self.try_lock(&kind, key, LockMode::Exclusive)? {
                        self.remove_all(&leftover.path());
                    }
                } else if name.starts_with('.') {
                    self.remove_old(&leftover.path());
                }
            }
        }
        let records = self.kinds(RECORDS)?.into_iter().map(|kind| Path::new(RECORDS).join(kind));
        let others = [super::USES, super::WORK, "attempts", "engine-runs"].map(PathBuf::from);
        for part in records.chain(others) {
            for leftover in listing(&self.root.join(part))? {
                let name = leftover.file_name();
                if name.as_encoded_bytes().starts_with(b".") && name != ".gate" {
                    self.remove_old(&leftover.path());
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
const REMOVING_PREFIX: &str = ".gone-";

/// Lists a directory; returns nothing if it does not exist.
fn listing(directory: &Path) -> io::Result<Vec<fs::DirEntry>> {
    if_there(fs::read_dir(directory))?.into_iter().flatten().collect()
}

/// Returns the disk usage of a tree in bytes.
fn tree_bytes(tree: &Path) -> u64 {
    let files = walkdir::WalkDir::new(tree).into_iter().filter_map(Result::ok);
    files.filter_map(|file| file.metadata().ok()).map(|metadata| metadata.blocks() * 512).sum()
}

/// Whether a path was last modified more than `min_age` ago.
pub(super) fn is_older(path: &Path, min_age: Duration) -> bool {
    let changed = fs::symlink_metadata(path).and_then(|metadata| metadata.modified());
    changed.is_ok_and(|time| time.elapsed().is_ok_and(|age| age > min_age))
}

fn is_old(path: &Path) -> bool {
    is_older(path, MIN_LEFTOVER_AGE)
}
