//! The content-addressed, disposable cache directory. Several farrier processes can share it at the same time.

mod durable;
mod locks;
mod quarantine;
mod room;
mod scratch;
mod tree_record;
mod uses;

use std::{
    collections::HashSet,
    error::Error,
    ffi::OsString,
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use fs_err::{self as fs, File};
use oci::{error_causes, error_chain};
use serde::{Serialize, de::DeserializeOwned};
use tempfile::NamedTempFile;
use walkdir::WalkDir;

pub use self::quarantine::Quarantine;
pub use self::room::{Entry, surplus};
pub use self::{
    locks::{CacheLock, LockMode},
    scratch::Scratch,
};
use self::{scratch::Temporary, uses::Uses};
use crate::files::{self, if_there};

const LOCKS: &str = "locks";
const QUARANTINE: &str = "quarantine";
const USES: &str = "uses";
const WORK: &str = "work";
/// Kind of the entries that hold blobs fetched from registries: files named by the hexadecimal form of their digest.
pub const BLOBS: &str = "blobs";

/// Handle to a cache directory in which every entry is either complete or absent. An entry is made in a temporary directory next
/// to its final path and then renamed. A lock file per key keeps two farrier processes from making the same entry twice.
///
/// Entries obtained through a handle are in use, and thus never evicted, until the last clone of that handle is dropped.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
    uses: Arc<Uses>,
}

/// The cache directory cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("cannot use the cache")]
pub struct CacheError(#[from] pub io::Error);

impl CacheError {
    /// Returns a remedy, if there is a known one.
    pub fn hint(&self) -> Option<String> {
        use io::ErrorKind::{AlreadyExists, NotADirectory, PermissionDenied, ReadOnlyFilesystem};
        match self.0.kind() {
            _ if is_full_disk(self) => Some(FULL_DISK.to_owned()),
            AlreadyExists | NotADirectory | PermissionDenied | ReadOnlyFilesystem => Some(
                "name a directory that you may write to, with --cache-dir or FARRIER_CACHE_DIR".to_owned(),
            ),
            _ => None,
        }
    }
}

/// Hint for a full disk.
pub const FULL_DISK: &str =
    "the disk is full: free some space; the cache directory can be deleted at any time";

/// Messages by which the operating system, and the programs that farrier calls, report a full disk.
const FULL_DISK_TEXTS: [&str; 3] = ["No space left on device", "Disk quota exceeded", "enough free space in"];

/// Whether a text reports a full disk.
pub fn reports_full_disk(text: &str) -> bool {
    FULL_DISK_TEXTS.iter().any(|message| text.contains(message))
}

/// Whether a full disk caused the error. Message texts are searched too, because a wrapping error can hide the type of its cause.
pub fn is_full_disk(error: &(dyn Error + 'static)) -> bool {
    let is_storage_full = |cause: &(dyn Error + 'static)| {
        cause.downcast_ref().map(io::Error::kind) == Some(io::ErrorKind::StorageFull)
    };
    error_causes(error).any(is_storage_full) || reports_full_disk(&error_chain(error))
}

impl Cache {
    /// Opens the directory and creates it if needed. Only the current user gets access, because the cache holds sources, logs and
    /// unpublished payloads. A relative path is made absolute here, because apt and compilers run in other directories.
    pub fn open(root: PathBuf) -> Result<Self, CacheError> {
        let root = std::path::absolute(root)?;
        fs::create_dir_all(&root)?;
        if may_become_private(&root)? {
            files::private_directory(&root)?;
        }
        let uses = Arc::new(Uses::in_directory(root.join(USES)));
        Ok(Self { root, uses })
    }

    /// Returns a handle to the same directory for one task. Entries obtained through the new handle stay in use until it is
    /// dropped.
    #[must_use]
    pub fn in_use(&self) -> Self {
        Self { root: self.root.clone(), uses: Arc::new(self.uses.another()) }
    }

    /// Returns `farrier` in `XDG_CACHE_HOME`, or else in `.cache` of the home directory. Returns `None` when neither is an
    /// absolute path (the XDG specification requires relative paths to be ignored).
    pub fn default_root(xdg_cache_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
        let absolute = |value: Option<OsString>| value.map(PathBuf::from).filter(|path| path.is_absolute());
        absolute(xdg_cache_home)
            .or_else(|| absolute(home).map(|home| home.join(".cache")))
            .map(|base| base.join("farrier"))
    }

    /// Returns the absolute path of the cache directory.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of an entry, which need not exist. Kinds and keys are single path components.
    pub fn entry_path(&self, kind: &str, key: &str) -> Result<PathBuf, CacheError> {
        let path = self.root.join(component(&self.root, kind)?);
        Ok(path.join(component(&path, key)?))
    }

    /// Returns the entry's path if the entry exists. The entry is then complete, and marked as in use.
    pub fn get(&self, kind: &str, key: &str) -> Result<Option<PathBuf>, CacheError> {
        let path = self.entry_path(kind, key)?;
        Ok((path.exists() && self.hold(kind, key)?).then_some(path))
    }

    /// Marks an entry as in use, so that it is not evicted. Returns `false` if the entry does not exist.
    pub fn hold(&self, kind: &str, key: &str) -> Result<bool, CacheError> {
        let path = self.entry_path(kind, key)?;
        self.uses.add(&format!("{kind}/{key}"))?;
        // Record the last use as the modification time. farrier cannot touch an entry of another user, and evicts it earlier.
        let _ = File::open(&path).and_then(|entry| entry.file().set_modified(SystemTime::now()));
        Ok(path.exists())
    }

    /// Records the use of an object outside the cache, such as an image in an engine, by touching an empty file as its stamp.
    pub fn stamp(&self, kind: &str, key: &str) -> Result<(), CacheError> {
        let path = self.entry_path(kind, key)?;
        files::private_directory(&self.root.join(kind))?;
        File::create(path)?;
        self.hold(kind, key).map(drop)
    }

    /// Returns the time when a stamp was last set.
    pub fn last_use(&self, kind: &str, key: &str) -> Result<Option<SystemTime>, CacheError> {
        Ok(fs::metadata(self.entry_path(kind, key)?).and_then(|stamp| stamp.modified()).ok())
    }

    /// Removes a stamp.
    pub fn forget_stamp(&self, kind: &str, key: &str) -> Result<(), CacheError> {
        remove_file(&self.entry_path(kind, key)?)
    }

    /// Returns all entries that any farrier sharing this cache is using, as `kind/key`.
    pub fn all_in_use(&self) -> Result<HashSet<String>, CacheError> {
        Ok(self.uses.all()?)
    }

    /// Returns an entry that is a directory. If it is missing, `make` builds it in the temporary directory passed to it. The
    /// temporary directory is removed when `make` fails or the future is dropped.
    pub async fn get_or_make<F, M, E>(&self, kind: &str, key: &str, make: F) -> Result<PathBuf, E>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<(), E>>,
        E: From<CacheError>,
    {
        self.get_or_make_intact(kind, key, |_| true, make).await
    }

    /// Like [`Self::get_or_make`], for an entry that a power loss may have damaged: a damaged entry is moved to the quarantine and
    /// made again.
    pub async fn get_or_make_intact<F, M, E>(
        &self,
        kind: &str,
        key: &str,
        is_intact: fn(&Path) -> bool,
        make: F,
    ) -> Result<PathBuf, E>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<(), E>>,
        E: From<CacheError>,
    {
        self.obtain(kind, key, Path::to_owned, is_intact, make).await
    }

    /// Like [`Self::get_or_make`], for an entry that is a file. `make` is given the file's temporary path. An empty file is made again.
    pub async fn get_or_make_file<F, M, E>(&self, kind: &str, key: &str, make: F) -> Result<PathBuf, E>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<(), E>>,
        E: From<CacheError>,
    {
        self.obtain(kind, key, |directory| directory.join("file"), has_content, make).await
    }

    async fn obtain<F, M, E>(
        &self,
        kind: &str,
        key: &str,
        entry_in: fn(&Path) -> PathBuf,
        is_intact: fn(&Path) -> bool,
        make: F,
    ) -> Result<PathBuf, E>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<(), E>>,
        E: From<CacheError>,
    {
        if let Some(path) = self.get(kind, key)?.filter(|path| is_intact(path)) {
            return Ok(path);
        }
        // Declare the lock before the temporary directory, so that the directory is removed before the lock is released.
        let _lock = self.lock(kind, key, LockMode::Exclusive).await?;
        if let Some(path) = self.get(kind, key)? {
            if is_intact(&path) {
                return Ok(path);
            }
            self.set_damaged_aside(&path)?;
        }
        let temporary = self.temporary(kind, key)?;
        let entry = entry_in(temporary.path());
        make(entry.clone()).await?;
        tree_record::record(kind, &entry).await?;
        durable::write_to_disk(&entry).await?;
        // Mark the entry before it appears, so that it cannot be evicted in between.
        self.hold(kind, key)?;
        Ok(self.publish(kind, key, temporary, entry_in)?)
    }

    fn set_damaged_aside(&self, entry: &Path) -> Result<(), CacheError> {
        let new_path = self.quarantine().set_aside(entry)?;
        let (path, quarantine) = (entry.display(), new_path.display());
        tracing::warn!(%path, %quarantine, "a cache entry is damaged: moved it to the quarantine");
        Ok(())
    }

    /// Creates an empty temporary directory next to an entry's path. The caller holds the entry's lock.
    fn temporary(&self, kind: &str, key: &str) -> Result<Temporary, CacheError> {
        let parent = self.root.join(kind);
        files::private_directory(&parent)?;
        let prefix = format!("{TEMPORARY}{key}-");
        // The caller holds the lock, so these directories were left by killed processes.
        self.remove_stale(&parent, &prefix)?;
        let directory = tempfile::Builder::new().prefix(&prefix).tempdir_in(&parent)?;
        Ok(Temporary::new(directory.keep(), self.quarantine()))
    }

    fn remove_stale(&self, parent: &Path, prefix: &str) -> Result<(), CacheError> {
        for entry in fs::read_dir(parent)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
                // The quarantine logs a failure, and the new directory gets another name.
                let _ = self.quarantine().remove(&entry.path());
            }
        }
        Ok(())
    }

    /// Returns the quarantine, which holds files and directories that cannot be removed.
    pub fn quarantine(&self) -> Quarantine {
        Quarantine::in_directory(self.root.join(QUARANTINE))
    }

    /// Moves the finished entry (the temporary directory, or the file in it) to its final path.
    fn publish(
        &self,
        kind: &str,
        key: &str,
        temporary: Temporary,
        entry_in: fn(&Path) -> PathBuf,
    ) -> Result<PathBuf, CacheError> {
        let (path, entry) = (self.entry_path(kind, key)?, entry_in(temporary.path()));
        fs::rename(&entry, &path)?;
        if entry == temporary.path() {
            // The directory itself was renamed, so nothing is left to remove.
            temporary.keep();
        }
        Ok(path)
    }

    /// Waits for the lock of a key. Dropping the future cancels the wait.
    pub async fn lock(&self, kind: &str, key: &str, mode: LockMode) -> Result<CacheLock, CacheError> {
        files::private_directory(&self.root.join(LOCKS))?;
        Ok(locks::wait(&self.lock_path(kind, key)?, mode).await?)
    }

    /// Takes the lock of a key without waiting; returns `None` while a conflicting lock is held.
    pub fn try_lock(&self, kind: &str, key: &str, mode: LockMode) -> Result<Option<CacheLock>, CacheError> {
        files::private_directory(&self.root.join(LOCKS))?;
        Ok(locks::try_lock(&self.lock_path(kind, key)?, mode)?)
    }

    fn lock_path(&self, kind: &str, key: &str) -> Result<PathBuf, CacheError> {
        let directory = self.root.join(LOCKS);
        Ok(directory.join(component(&directory, &format!("{kind}-{key}"))?))
    }

    /// Returns a new empty directory for this process, removed when the guard is dropped.
    pub fn scratch(&self) -> Result<Scratch, CacheError> {
        Ok(Scratch::create_in(&self.root.join(WORK), self.quarantine())?)
    }

    /// Reads a small JSON record. A damaged record, or one of another format, counts as absent, because farrier can always
    /// recompute a record.
    pub fn read_record<T: DeserializeOwned>(&self, kind: &str, key: &str) -> Result<Option<T>, CacheError> {
        let path = self.record_path(kind, key)?;
        let Some(bytes) = if_there(fs::read(&path))? else { return Ok(None) };
        touch_hourly(&path);
        Ok(serde_json::from_slice(&bytes).ok())
    }

    /// Returns all records of a kind, in no particular order. Damaged ones are skipped.
    pub fn records<T: DeserializeOwned>(&self, kind: &str) -> Result<Vec<T>, CacheError> {
        let directory = self.root.join("records").join(kind);
        let Some(listing) = if_there(fs::read_dir(&directory))? else { return Ok(Vec::new()) };
        let read = |path: PathBuf| serde_json::from_slice(&fs::read(path).ok()?).ok();
        Ok(listing.flatten().filter_map(|entry| read(entry.path())).collect())
    }

    /// Writes a record atomically.
    pub fn write_record<T: Serialize>(&self, kind: &str, key: &str, record: &T) -> Result<(), CacheError> {
        let path = self.record_path(kind, key)?;
        files::private_directory(&self.root.join("records"))?;
        let parent = self.root.join("records").join(kind);
        files::private_directory(&parent)?;
        let file = NamedTempFile::with_prefix_in(".tmp-", &parent)?;
        serde_json::to_writer(&file, record).map_err(io::Error::from)?;
        file.persist(&path).map_err(io::Error::from)?;
        Ok(())
    }

    /// Removes a record; a missing record is not an error.
    pub fn remove_record(&self, kind: &str, key: &str) -> Result<(), CacheError> {
        remove_file(&self.record_path(kind, key)?)
    }

    fn record_path(&self, kind: &str, key: &str) -> Result<PathBuf, CacheError> {
        let path = self.root.join("records");
        let path = path.join(component(&path, kind)?);
        Ok(path.join(component(&path, &format!("{key}.json"))?))
    }
}

/// Whether no file of an entry is empty.
pub fn has_content(entry: &Path) -> bool {
    WalkDir::new(entry).into_iter().all(|found| {
        let metadata = found.and_then(|found| found.metadata());
        metadata.is_ok_and(|metadata| metadata.is_dir() || metadata.len() > 0)
    })
}

/// Whether the directory may become private: it is a cache or empty, and has no sticky bit (shared directories such as /tmp do).
fn may_become_private(root: &Path) -> io::Result<bool> {
    const STICKY: u32 = 0o1000;
    let shared = fs::metadata(root)?.permissions().mode() & STICKY != 0;
    Ok(!shared && (root.join(LOCKS).is_dir() || fs::read_dir(root)?.next().is_none()))
}

/// Removes a file; a missing file is not an error.
fn remove_file(path: &Path) -> Result<(), CacheError> {
    if_there(fs::remove_file(path))?;
    Ok(())
}

/// Prefix of entries in progress; the entry's key and a random suffix follow.
const TEMPORARY: &str = ".tmp-";

/// Returns the key of an entry in progress.
fn key_of_temporary(name: &str) -> Option<&str> {
    Some(name.strip_prefix(TEMPORARY)?.rsplit_once('-')?.0)
}

/// Updates the last use of a record, at most once an hour, because each reconcile reads the records.
fn touch_hourly(record: &Path) {
    let Ok(file) = std::fs::File::open(record) else { return };
    let age = file.metadata().and_then(|m| m.modified()).map(|time| time.elapsed().unwrap_or_default());
    if age.is_ok_and(|age| age > Duration::from_hours(1)) {
        let _ = file.set_modified(SystemTime::now());
    }
}

/// Checks that a name is a single, visible path component.
fn component<'a>(parent: &Path, name: &'a str) -> Result<&'a str, CacheError> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._+~=:-".contains(c);
    if (1..=255).contains(&name.len()) && name.chars().all(is_allowed) && !name.starts_with('.') {
        Ok(name)
    } else {
        let text = format!("name a cache entry in {}: {name:?} is not a plain file name", parent.display());
        Err(io::Error::new(io::ErrorKind::InvalidInput, text).into())
    }
}

#[cfg(test)]
mod tests;
