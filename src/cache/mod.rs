//! Adapter: the content-addressed, disposable cache directory, safe with several farriers at once.

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
use serde::{Serialize, de::DeserializeOwned};
use tempfile::NamedTempFile;

pub(crate) use self::room::{Entry, surplus};
pub use self::{
    locks::{CacheLock, LockMode},
    scratch::Scratch,
};
use self::{quarantine::Quarantine, scratch::Temporary, uses::Uses};
use crate::{
    error_causes, error_chain,
    files::{self, if_there},
};

const LOCKS: &str = "locks";
const QUARANTINE: &str = "quarantine";
const USES: &str = "uses";
const WORK: &str = "work";
/// The kind of blobs that were fetched from registries: files, each under its digest's hexadecimal form.
pub const BLOBS: &str = "blobs";

/// The cache: every entry is complete or absent. An entry is made in a temporary directory beside its
/// place and renamed; a lock file for each key keeps two farriers from making it twice.
///
/// What was got is in use, and stays, until the last clone of the object is dropped that it was got from.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
    uses: Arc<Uses>,
}

/// A cache directory that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("use the cache")]
pub struct CacheError(#[from] pub io::Error);

impl CacheError {
    /// What to do about it.
    pub fn hint(&self) -> Option<String> {
        is_full_disk(self).then(|| FULL_DISK.to_owned())
    }
}

/// What to do about a full disk.
pub const FULL_DISK: &str =
    "the disk is full: free some room; the cache directory can be deleted at any time";

/// What this machine, and the programs that farrier calls, say of a full disk.
const FULL_DISK_WORDS: [&str; 3] = ["No space left on device", "Disk quota exceeded", "enough free space in"];

/// Does a text say that a disk is full?
pub fn says_full_disk(text: &str) -> bool {
    FULL_DISK_WORDS.iter().any(|words| text.contains(words))
}

/// Is a full disk what failed? The words are read: an error that stands for its cause hides the cause's type.
pub fn is_full_disk(error: &(dyn Error + 'static)) -> bool {
    let full = |cause: &(dyn Error + 'static)| {
        cause.downcast_ref().map(io::Error::kind) == Some(io::ErrorKind::StorageFull)
    };
    error_causes(error).any(full) || says_full_disk(&error_chain(error))
}

impl Cache {
    /// Opens (and makes) the directory, for this user alone: it holds sources, logs and what is about to be published. A relative path is made absolute here: apt and compilers run elsewhere.
    pub fn open(root: PathBuf) -> Result<Self, CacheError> {
        let root = std::path::absolute(root)?;
        fs::create_dir_all(&root)?;
        if is_own(&root)? {
            files::private_directory(&root)?;
        }
        let uses = Arc::new(Uses::in_directory(root.join(USES)));
        Ok(Self { root, uses })
    }

    /// The same directory for one piece of work: what is got from the new object is in use as long as that one lives.
    #[must_use]
    pub fn in_use(&self) -> Self {
        Self { root: self.root.clone(), uses: Arc::new(self.uses.another()) }
    }

    /// `farrier` in `XDG_CACHE_HOME`, else in `.cache` of the home directory; `None` when neither is
    /// an absolute path (the XDG specification has relative ones ignored).
    pub fn default_root(xdg_cache_home: Option<OsString>, home: Option<OsString>) -> Option<PathBuf> {
        let absolute = |value: Option<OsString>| value.map(PathBuf::from).filter(|path| path.is_absolute());
        absolute(xdg_cache_home)
            .or_else(|| absolute(home).map(|home| home.join(".cache")))
            .map(|base| base.join("farrier"))
    }

    /// Where it is.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the entry is, or would be. Kinds and keys are single path components.
    pub fn place(&self, kind: &str, key: &str) -> Result<PathBuf, CacheError> {
        let path = self.root.join(component(&self.root, kind)?);
        Ok(path.join(component(&path, key)?))
    }

    /// The entry if it is there; it is complete then, and in use.
    pub fn get(&self, kind: &str, key: &str) -> Result<Option<PathBuf>, CacheError> {
        let place = self.place(kind, key)?;
        Ok((place.exists() && self.hold(kind, key)?).then_some(place))
    }

    /// Takes an entry into use: it is not removed any more. `false` where it is not there.
    pub fn hold(&self, kind: &str, key: &str) -> Result<bool, CacheError> {
        let place = self.place(kind, key)?;
        self.uses.add(&format!("{kind}/{key}"))?;
        // Its last use. An entry of another user's cannot be touched; it then goes earlier.
        let _ = File::open(&place).and_then(|entry| entry.file().set_modified(SystemTime::now()));
        Ok(place.exists())
    }

    /// The same for what is kept elsewhere, such as an image in an engine, and has an empty file here for its last use.
    pub fn stamp(&self, kind: &str, key: &str) -> Result<(), CacheError> {
        let place = self.place(kind, key)?;
        files::private_directory(&self.root.join(kind))?;
        File::create(place)?;
        self.hold(kind, key).map(drop)
    }

    /// When a stamp was set last.
    pub(crate) fn last_use(&self, kind: &str, key: &str) -> Result<Option<SystemTime>, CacheError> {
        Ok(fs::metadata(self.place(kind, key)?).and_then(|stamp| stamp.modified()).ok())
    }

    /// Removes a stamp.
    pub(crate) fn forget_stamp(&self, kind: &str, key: &str) -> Result<(), CacheError> {
        remove_file(&self.place(kind, key)?)
    }

    /// What any farrier on this cache uses at this moment, as `kind/key`.
    pub(crate) fn all_in_use(&self) -> Result<HashSet<String>, CacheError> {
        Ok(self.uses.all()?)
    }

    /// The entry, a directory, made by `make` in the temporary directory that it is given if it is not
    /// there yet. When `make` fails or the future is dropped, the temporary directory is removed.
    pub async fn get_or_make<F, M, E>(&self, kind: &str, key: &str, make: F) -> Result<PathBuf, E>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<(), E>>,
        E: From<CacheError>,
    {
        self.obtain(kind, key, Path::to_owned, make).await
    }

    /// The same for an entry that is a file; `make` is given its temporary place.
    pub async fn get_or_make_file<F, M, E>(&self, kind: &str, key: &str, make: F) -> Result<PathBuf, E>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<(), E>>,
        E: From<CacheError>,
    {
        self.obtain(kind, key, |directory| directory.join("file"), make).await
    }

    async fn obtain<F, M, E>(
        &self,
        kind: &str,
        key: &str,
        within: fn(&Path) -> PathBuf,
        make: F,
    ) -> Result<PathBuf, E>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<(), E>>,
        E: From<CacheError>,
    {
        if let Some(place) = self.get(kind, key)? {
            return Ok(place);
        }
        // Declared before the temporary directory, so that it is released after that one's removal.
        let _lock = self.lock(kind, key, LockMode::Exclusive).await?;
        if let Some(place) = self.get(kind, key)? {
            return Ok(place);
        }
        let temporary = self.temporary(kind, key)?;
        let entry = within(temporary.path());
        make(entry.clone()).await?;
        tree_record::record(kind, &entry).await?;
        // Before it appears: then it cannot go again.
        self.hold(kind, key)?;
        Ok(self.publish(kind, key, temporary, within)?)
    }

    /// An empty directory beside an entry's place. The caller has its lock.
    fn temporary(&self, kind: &str, key: &str) -> Result<Temporary, CacheError> {
        let parent = self.root.join(kind);
        files::private_directory(&parent)?;
        let prefix = format!("{TEMPORARY}{key}-");
        // Under the lock they can only be those of processes that were killed.
        self.remove_stale(&parent, &prefix)?;
        let made = tempfile::Builder::new().prefix(&prefix).tempdir_in(&parent)?;
        Ok(Temporary::new(made.keep(), self.quarantine()))
    }

    fn remove_stale(&self, parent: &Path, prefix: &str) -> Result<(), CacheError> {
        for entry in fs::read_dir(parent)? {
            let entry = entry?;
            if entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
                // The quarantine tells of it, and the new one has another name.
                let _ = self.quarantine().remove(&entry.path());
            }
        }
        Ok(())
    }

    /// Where that is kept which cannot be removed.
    pub(crate) fn quarantine(&self) -> Quarantine {
        Quarantine::in_directory(self.root.join(QUARANTINE))
    }

    /// Puts what was made in a temporary directory, or all of it, in its place.
    fn publish(
        &self,
        kind: &str,
        key: &str,
        temporary: Temporary,
        within: fn(&Path) -> PathBuf,
    ) -> Result<PathBuf, CacheError> {
        let (place, made) = (self.place(kind, key)?, within(temporary.path()));
        fs::rename(&made, &place)?;
        if made == temporary.path() {
            // It is there under its name now: nothing is left to remove.
            temporary.keep();
        }
        Ok(place)
    }

    /// Waits for the lock of a key. Dropping the future gives up the wait.
    pub async fn lock(&self, kind: &str, key: &str, mode: LockMode) -> Result<CacheLock, CacheError> {
        files::private_directory(&self.root.join(LOCKS))?;
        Ok(locks::wait(&self.lock_path(kind, key)?, mode).await?)
    }

    /// The same without waiting for other users; `None` where another one's lock is in the way.
    pub fn try_lock(&self, kind: &str, key: &str, mode: LockMode) -> Result<Option<CacheLock>, CacheError> {
        files::private_directory(&self.root.join(LOCKS))?;
        Ok(locks::try_lock(&self.lock_path(kind, key)?, mode)?)
    }

    fn lock_path(&self, kind: &str, key: &str) -> Result<PathBuf, CacheError> {
        let directory = self.root.join(LOCKS);
        Ok(directory.join(component(&directory, &format!("{kind}-{key}"))?))
    }

    /// An empty directory of this process's own, removed when the guard is dropped.
    pub fn scratch(&self) -> Result<Scratch, CacheError> {
        Ok(Scratch::below(&self.root.join(WORK), self.quarantine())?)
    }

    /// A small JSON record. One that is damaged or of another form counts as absent: records only save
    /// work.
    pub fn read_record<T: DeserializeOwned>(&self, kind: &str, key: &str) -> Result<Option<T>, CacheError> {
        let path = self.record_path(kind, key)?;
        let Some(bytes) = if_there(fs::read(&path))? else { return Ok(None) };
        touch_at_times(&path);
        Ok(serde_json::from_slice(&bytes).ok())
    }

    /// All records of a kind, in no order; damaged ones are left out.
    pub fn records<T: DeserializeOwned>(&self, kind: &str) -> Result<Vec<T>, CacheError> {
        let directory = self.root.join("records").join(kind);
        let Some(listing) = if_there(fs::read_dir(&directory))? else { return Ok(Vec::new()) };
        let read = |path: PathBuf| serde_json::from_slice(&fs::read(path).ok()?).ok();
        Ok(listing.flatten().filter_map(|entry| read(entry.path())).collect())
    }

    /// Writes a record, whole or not at all.
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

    /// Removes a record; one that is absent is fine.
    pub fn remove_record(&self, kind: &str, key: &str) -> Result<(), CacheError> {
        remove_file(&self.record_path(kind, key)?)
    }

    fn record_path(&self, kind: &str, key: &str) -> Result<PathBuf, CacheError> {
        let path = self.root.join("records");
        let path = path.join(component(&path, kind)?);
        Ok(path.join(component(&path, &format!("{key}.json"))?))
    }
}

/// Whether the directory is a cache, or nothing yet: not one that others use, which somebody has named.
fn is_own(root: &Path) -> io::Result<bool> {
    const STICKY: u32 = 0o1000;
    let shared = fs::metadata(root)?.permissions().mode() & STICKY != 0;
    Ok(!shared && (root.join(LOCKS).is_dir() || fs::read_dir(root)?.next().is_none()))
}

/// Removes a file; one that is absent is fine.
fn remove_file(path: &Path) -> Result<(), CacheError> {
    if_there(fs::remove_file(path))?;
    Ok(())
}

/// How the name of what is being made begins; the entry's key follows, and something random.
const TEMPORARY: &str = ".tmp-";

/// The key of an entry that is being made.
fn key_of_temporary(name: &str) -> Option<&str> {
    Some(name.strip_prefix(TEMPORARY)?.rsplit_once('-')?.0)
}

/// Records are read with each pass: their last use is noted once in an hour.
fn touch_at_times(record: &Path) {
    let Ok(file) = std::fs::File::open(record) else { return };
    let age = file.metadata().and_then(|found| found.modified()).map(|at| at.elapsed().unwrap_or_default());
    if age.is_ok_and(|age| age > Duration::from_hours(1)) {
        let _ = file.set_modified(SystemTime::now());
    }
}

/// A name that is one visible path component.
fn component<'a>(parent: &Path, name: &'a str) -> Result<&'a str, CacheError> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._+~=:-".contains(c);
    if (1..=255).contains(&name.len()) && name.chars().all(plain) && !name.starts_with('.') {
        Ok(name)
    } else {
        let text = format!("name a cache entry in {}: {name:?} is no plain name", parent.display());
        Err(io::Error::new(io::ErrorKind::InvalidInput, text).into())
    }
}

#[cfg(test)]
mod tests;
