//! Adapter: the content-addressed, disposable cache directory, safe with several farriers at once.

use std::{
    error::Error,
    ffi::OsString,
    fs::{Permissions, TryLockError},
    io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

use fs_err::{self as fs, File};
use serde::{Serialize, de::DeserializeOwned};
use tempfile::{NamedTempFile, TempDir};
use walkdir::WalkDir;

use crate::{error_causes, error_chain};

/// The cache: every entry is complete or absent. An entry is made in a temporary directory beside its
/// place and renamed; a lock file for each key keeps two farriers from making it twice.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
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

/// Held while an entry is made; the system releases it even when the process is killed.
#[derive(Debug)]
pub struct CacheLock {
    _file: File,
}

/// How a lock is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockMode {
    /// By one.
    Exclusive,
    /// By any number, while no one holds it exclusively.
    Shared,
}

/// A directory of one build, see [`Cache::scratch`].
#[derive(Debug)]
pub struct Scratch {
    directory: PathBuf,
    lock_path: PathBuf,
    _lock: std::fs::File,
}

impl Scratch {
    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.directory
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.directory) {
            tracing::warn!(path = %self.directory.display(), %error, "a build's directory was not removed");
        }
        let _ = fs::remove_file(&self.lock_path);
    }
}

impl Cache {
    /// Opens (and makes) the directory. A relative path is made absolute here: apt and compilers run elsewhere.
    pub fn open(root: PathBuf) -> Result<Self, CacheError> {
        let root = std::path::absolute(root)?;
        fs::create_dir_all(&root)?;
        Ok(Self { root })
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

    /// The directory of blobs that were fetched from registries, each under its digest's hexadecimal form.
    pub fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    /// Where the entry is, or would be. Kinds and keys are single path components.
    pub fn place(&self, kind: &str, key: &str) -> Result<PathBuf, CacheError> {
        let path = self.root.join(component(&self.root, kind)?);
        Ok(path.join(component(&path, key)?))
    }

    /// The entry if it is there; it is complete then.
    pub fn get(&self, kind: &str, key: &str) -> Result<Option<PathBuf>, CacheError> {
        let place = self.place(kind, key)?;
        Ok(place.is_dir().then_some(place))
    }

    /// The entry, a directory, made by `make` in the temporary directory that it is given if it is not
    /// there yet. When `make` fails or the future is dropped, the temporary directory is removed.
    pub async fn get_or_make<F, M, E>(&self, kind: &str, key: &str, make: F) -> Result<PathBuf, E>
    where
        F: FnOnce(PathBuf) -> M,
        M: Future<Output = Result<(), E>>,
        E: From<CacheError>,
    {
        if let Some(place) = self.get(kind, key)? {
            return Ok(place);
        }
        let place = self.place(kind, key)?;
        // Declared before the temporary directory, so that it is released after that one's removal.
        let _lock = self.lock(kind, key, LockMode::Exclusive).await?;
        if place.is_dir() {
            return Ok(place);
        }
        let parent = self.root.join(kind);
        let prefix = format!(".tmp-{key}-");
        fs::create_dir_all(&parent).map_err(CacheError)?;
        // Under the lock they can only be those of processes that were killed.
        remove_stale(&parent, &prefix)?;
        let temporary =
            tempfile::Builder::new().prefix(&prefix).tempdir_in(&parent).map_err(CacheError::from)?;
        make(temporary.path().to_owned()).await?;
        publish(temporary, &place)?;
        Ok(place)
    }

    /// Waits for the lock of a key. Dropping the future gives up the wait.
    pub async fn lock(&self, kind: &str, key: &str, mode: LockMode) -> Result<CacheLock, CacheError> {
        let directory = self.root.join("locks");
        fs::create_dir_all(&directory)?;
        let path = directory.join(component(&directory, &format!("{kind}-{key}"))?);
        let file = File::options().create(true).truncate(false).write(true).open(&path)?;
        // Asking again and again instead of waiting in the system: a thread that waits there can be
        // neither cancelled nor abandoned when the program is told to end.
        let mut pause = Duration::from_millis(5);
        loop {
            let attempt = match mode {
                LockMode::Exclusive => file.try_lock(),
                LockMode::Shared => file.try_lock_shared(),
            };
            match attempt {
                Ok(()) => return Ok(CacheLock { _file: file }),
                Err(TryLockError::WouldBlock) => {
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(Duration::from_millis(100));
                }
                Err(TryLockError::Error(error)) => return Err(error.into()),
            }
        }
    }

    /// An empty directory of this process's own, removed when the guard is dropped. Those of farriers that
    /// were killed are removed first: their lock is free.
    pub fn scratch(&self) -> Result<Scratch, CacheError> {
        let parent = self.root.join("work");
        fs::create_dir_all(&parent)?;
        for entry in fs::read_dir(&parent)?.flatten() {
            let path = entry.path();
            if path.extension().is_some_and(|e| e == "lock")
                && File::open(&path).is_ok_and(|file| file.try_lock().is_ok())
            {
                // Another farrier may be at the same; what is left is removed next time.
                let _ = remove_tree(&path.with_extension("d"));
                let _ = fs::remove_file(&path);
            }
        }
        // It gets the name by which others look for it only when it is locked.
        let new = NamedTempFile::with_prefix_in(".new-", &parent)?;
        new.as_file().lock()?;
        let unique = new.path().file_name().unwrap_or_default().to_string_lossy().replace(".new-", "build-");
        let lock_path = parent.join(format!("{unique}.lock"));
        let lock = new.persist(&lock_path).map_err(io::Error::from)?;
        let directory = lock_path.with_extension("d");
        let scratch = Scratch { directory, lock_path, _lock: lock };
        fs::create_dir(&scratch.directory)?;
        Ok(scratch)
    }

    /// A small JSON record. One that is damaged or of another form counts as absent: records only save
    /// work.
    pub fn read_record<T: DeserializeOwned>(&self, kind: &str, key: &str) -> Result<Option<T>, CacheError> {
        let path = self.record_path(kind, key)?;
        match fs::read(&path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).ok()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// All records of a kind, in no order; damaged ones are left out.
    pub fn records<T: DeserializeOwned>(&self, kind: &str) -> Result<Vec<T>, CacheError> {
        let directory = self.root.join("records").join(kind);
        let listing = match fs::read_dir(&directory) {
            Ok(listing) => listing,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        };
        let read = |path: PathBuf| serde_json::from_slice(&fs::read(path).ok()?).ok();
        Ok(listing.flatten().filter_map(|entry| read(entry.path())).collect())
    }

    /// Writes a record, whole or not at all.
    pub fn write_record<T: Serialize>(&self, kind: &str, key: &str, record: &T) -> Result<(), CacheError> {
        let path = self.record_path(kind, key)?;
        let parent = self.root.join("records").join(kind);
        fs::create_dir_all(&parent)?;
        let file = NamedTempFile::with_prefix_in(".tmp-", &parent)?;
        serde_json::to_writer(&file, record).map_err(io::Error::from)?;
        file.persist(&path).map_err(io::Error::from)?;
        Ok(())
    }

    /// Removes a record; one that is absent is fine.
    pub fn remove_record(&self, kind: &str, key: &str) -> Result<(), CacheError> {
        let path = self.record_path(kind, key)?;
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    fn record_path(&self, kind: &str, key: &str) -> Result<PathBuf, CacheError> {
        let path = self.root.join("records");
        let path = path.join(component(&path, kind)?);
        Ok(path.join(component(&path, &format!("{key}.json"))?))
    }
}

/// Puts a finished temporary directory in its place.
fn publish(temporary: TempDir, place: &Path) -> Result<(), CacheError> {
    fs::rename(temporary.path(), place)?;
    // It is there under its name now: nothing is left to remove.
    let _ = temporary.keep();
    Ok(())
}

/// Removes a directory that a build wrote to, where directories may deny themselves to their owner.
fn remove_tree(directory: &Path) -> io::Result<()> {
    match fs::remove_dir_all(directory) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {}
        other => return other,
    }
    // Each is opened after it was made to be: a walk opens a directory when it is asked for the next entry.
    for entry in WalkDir::new(directory) {
        let entry = entry?;
        if entry.file_type().is_dir() {
            fs::set_permissions(entry.path(), Permissions::from_mode(0o700))?;
        }
    }
    fs::remove_dir_all(directory)
}

fn remove_stale(parent: &Path, prefix: &str) -> Result<(), CacheError> {
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        if entry.file_name().as_encoded_bytes().starts_with(prefix.as_bytes()) {
            fs::remove_dir_all(entry.path())?;
        }
    }
    Ok(())
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
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    fn cache() -> (TempDir, Cache) {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::open(directory.path().join("cache")).unwrap();
        (directory, cache)
    }

    fn left_over(cache: &Cache, kind: &str) -> Vec<String> {
        let names = fs::read_dir(cache.root().join(kind)).unwrap();
        names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn its_paths_are_absolute() {
        let directory = tempfile::tempdir_in(".").unwrap();
        let relative = Path::new(directory.path().file_name().unwrap()).join("cache");
        let cache = Cache::open(relative.clone()).unwrap();
        assert_eq!(cache.root(), std::env::current_dir().unwrap().join(relative));
    }

    #[tokio::test]
    async fn two_makers_make_one() {
        let (_directory, cache) = cache();
        // A second cache object has its own file handles, as a second process would.
        let other = Cache::open(cache.root().to_owned()).unwrap();
        let runs = AtomicUsize::new(0);
        let runs = &runs;
        let make = |path: PathBuf| async move {
            runs.fetch_add(1, Ordering::SeqCst);
            tokio::task::yield_now().await;
            fs::write(path.join("file"), "x").unwrap();
            Ok::<(), CacheError>(())
        };
        let (a, b) =
            tokio::join!(cache.get_or_make("kind", "key", make), other.get_or_make("kind", "key", make));
        assert_eq!(a.unwrap(), b.unwrap());
        assert_eq!(runs.load(Ordering::SeqCst), 1);
        assert_eq!(left_over(&cache, "kind"), ["key"]);
    }

    #[tokio::test]
    async fn failure_and_cancellation_leave_nothing() {
        let (_directory, cache) = cache();
        let fail = |path: PathBuf| async move {
            fs::write(path.join("half"), "x").unwrap();
            Err(CacheError(io::ErrorKind::StorageFull.into()))
        };
        cache.get_or_make::<_, _, CacheError>("kind", "key", fail).await.unwrap_err();
        assert!(left_over(&cache, "kind").is_empty());

        let (started, start) = tokio::sync::oneshot::channel();
        let hang = |path: PathBuf| async move {
            fs::write(path.join("half"), "x").unwrap();
            started.send(()).unwrap();
            std::future::pending::<Result<(), CacheError>>().await
        };
        tokio::select! {
            _ = cache.get_or_make("kind", "key", hang) => unreachable!(),
            () = async { start.await.unwrap() } => {}
        }
        assert!(left_over(&cache, "kind").is_empty());
        // The lock is free again.
        cache.get_or_make::<_, _, CacheError>("kind", "key", |_| async { Ok(()) }).await.unwrap();
    }

    #[tokio::test]
    async fn leftovers_of_a_killed_process_are_removed() {
        let (_directory, cache) = cache();
        fs::create_dir_all(cache.root().join("kind/.tmp-key-abc/deep")).unwrap();
        fs::create_dir_all(cache.root().join("kind/.tmp-other-abc")).unwrap();
        cache.get_or_make::<_, _, CacheError>("kind", "key", |_| async { Ok(()) }).await.unwrap();
        let mut names = left_over(&cache, "kind");
        names.sort();
        assert_eq!(names, [".tmp-other-abc", "key"]);
    }

    #[test]
    fn scratch_directories_go_with_their_owner() {
        let (_directory, cache) = cache();
        let live = cache.scratch().unwrap();
        fs::write(live.path().join("x"), "x").unwrap();
        // What a killed farrier leaves: a lock file without a holder, and its directory.
        let work = cache.root().join("work");
        fs::write(work.join("build-dead.lock"), "").unwrap();
        fs::create_dir(work.join("build-dead.d")).unwrap();
        let second = cache.scratch().unwrap();
        assert!(live.path().join("x").exists() && second.path().exists());
        assert!(!work.join("build-dead.lock").exists() && !work.join("build-dead.d").exists());
        drop((live, second));
        assert_eq!(fs::read_dir(&work).unwrap().count(), 0);
    }

    #[test]
    fn records_round_trip_and_damage_is_absence() {
        let (_directory, cache) = cache();
        assert_eq!(cache.read_record::<Vec<u32>>("kind", "key").unwrap(), None);
        cache.write_record("kind", "key", &vec![1, 2]).unwrap();
        assert_eq!(cache.read_record("kind", "key").unwrap(), Some(vec![1, 2]));
        fs::write(cache.root().join("records/kind/key.json"), "[1,").unwrap();
        assert_eq!(cache.read_record::<Vec<u32>>("kind", "key").unwrap(), None);
    }

    #[test]
    fn names_are_single_components() {
        let (_directory, cache) = cache();
        for name in ["", "..", ".hidden", "a/b", "a\0b", "a b", &"x".repeat(256)] {
            cache.place("kind", name).unwrap_err();
            cache.place(name, "key").unwrap_err();
        }
    }

    #[test]
    fn default_root_follows_xdg() {
        let root = |xdg: Option<&str>, home: Option<&str>| {
            Cache::default_root(xdg.map(Into::into), home.map(Into::into))
        };
        assert_eq!(root(Some("/x"), Some("/h")), Some("/x/farrier".into()));
        assert_eq!(root(Some("relative"), Some("/h")), Some("/h/.cache/farrier".into()));
        assert_eq!(root(None, Some("/h")), Some("/h/.cache/farrier".into()));
        assert_eq!(root(Some(""), None), None);
    }
}
