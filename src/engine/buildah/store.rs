//! Adapter: a storage directory for one run of buildah.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use fs_err::{self as fs, File};

use super::EngineError;

/// Names of our directories, beside buildah's own storage.
const PREFIX: &str = "farrier-run-";
/// Held locked for as long as the run lives.
const LOCK: &str = "lock";

/// Times that a directory's removal is tried.
const REMOVALS: u32 = 40;
const PAUSE: Duration = Duration::from_millis(50);

/// Where the machine's storage is, and which driver it has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Storage {
    root: PathBuf,
    driver: String,
}

/// One run's directory: `root` and `run` for containers, `context` and all temporary files.
pub(super) struct RunStore {
    dir: tempfile::TempDir,
    _lock: File,
}

impl Storage {
    /// Reads what `buildah info` prints.
    pub(super) fn parse(info: &str) -> Option<Self> {
        let info: serde_json::Value = serde_json::from_str(info).ok()?;
        let store = info.get("store")?;
        let text = |key: &str| store.get(key)?.as_str().map(str::to_owned);
        let root = PathBuf::from(text("GraphRoot")?);
        root.is_absolute().then_some(())?;
        Some(Self { root, driver: text("GraphDriverName")? })
    }

    /// The machine's storage.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Beside the storage: on a file system that its driver is known to work on.
    fn parent(&self) -> &Path {
        self.root.parent().unwrap_or(&self.root)
    }

    /// Makes a run's directory.
    pub(super) fn create_run(&self, id: &str) -> Result<RunStore, EngineError> {
        let parent = self.parent();
        let prefix = format!("{PREFIX}{id}-");
        let dir = tempfile::Builder::new().prefix(&prefix).tempdir_in(parent)?;
        // It gets its name when it is locked: before, another farrier might take the run for a dead one.
        let (unnamed, named) = (dir.path().join(".lock"), dir.path().join(LOCK));
        let lock = File::create(&unnamed)?;
        lock.lock()?;
        fs::rename(unnamed, named)?;
        for name in ["context", "tmp"] {
            fs::create_dir(dir.path().join(name))?;
        }
        Ok(RunStore { dir, _lock: lock })
    }

    /// The containers in the machine's storage that bear a run's mark, by id. buildah keeps its notes on each
    /// in a file, and shows only a part of them in its answers.
    pub(super) fn containers_of(&self, run: &RunStore) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.root.join(format!("{}-containers", self.driver))) else {
            return Vec::new();
        };
        let mark = format!("{:?}", run.mark());
        entries
            .flatten()
            .filter(|entry| {
                let notes = fs::read_to_string(entry.path().join("userdata/buildah.json"));
                notes.is_ok_and(|notes| notes.contains(&mark))
            })
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()
    }

    /// Removes the directories of runs that were killed before they could do so: theirs are unlocked.
    pub(super) fn remove_stale(&self) {
        let Ok(entries) = fs::read_dir(self.parent()) else { return };
        for entry in entries.flatten() {
            if !entry.file_name().to_string_lossy().starts_with(PREFIX) {
                continue;
            }
            // A directory without its lock is being made at this moment.
            let Ok(lock) = File::open(entry.path().join(LOCK)) else { continue };
            if lock.try_lock().is_ok()
                && let Err(error) = fs::remove_dir_all(entry.path())
            {
                tracing::warn!(path = %entry.path().display(), %error, "cannot remove a dead build's directory");
            }
        }
    }
}

impl RunStore {
    /// Removes the directory; in several tries, since a killed build's mounts may go a moment after it.
    pub(super) fn remove(self) {
        let path = self.path();
        for attempt in 0..REMOVALS {
            match fs::remove_dir_all(path) {
                Ok(()) => return,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return,
                Err(error) if attempt + 1 == REMOVALS => {
                    tracing::warn!(path = %path.display(), %error, "cannot remove a build's directory");
                }
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// The directory.
    pub(super) fn path(&self) -> &Path {
        self.dir.path()
    }

    /// A name that no other run has.
    pub(super) fn mark(&self) -> String {
        self.path().file_name().unwrap_or_default().to_string_lossy().into_owned()
    }

    /// The build context.
    pub(super) fn context(&self) -> PathBuf {
        self.path().join("context")
    }

    /// For temporary files.
    pub(super) fn temporary(&self) -> PathBuf {
        self.path().join("tmp")
    }

    /// buildah's options to work here, with the machine's images at hand.
    pub(super) fn options(&self, storage: &Storage) -> [String; 8] {
        let below = |name: &str| self.path().join(name).display().to_string();
        [
            "--root".to_owned(),
            below("root"),
            "--runroot".to_owned(),
            below("run"),
            "--storage-driver".to_owned(),
            storage.driver.clone(),
            "--storage-opt".to_owned(),
            format!("additionalimagestore={}", storage.root.display()),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storage(root: &Path) -> Storage {
        Storage { root: root.join("storage"), driver: "overlay".to_owned() }
    }

    #[test]
    fn reads_what_buildah_prints() {
        let info = r#"{"host": {}, "store": {"GraphDriverName": "overlay", "GraphRoot": "/var/lib/containers/storage"}}"#;
        let storage = Storage::parse(info).unwrap();
        assert_eq!(storage.root(), Path::new("/var/lib/containers/storage"));
        assert_eq!(storage.driver, "overlay");
        assert_eq!(Storage::parse(r#"{"store": {"GraphRoot": "x", "GraphDriverName": "vfs"}}"#), None);
        assert_eq!(Storage::parse("Error"), None);
    }

    #[test]
    fn a_run_leaves_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let run = storage(dir.path()).create_run("job").unwrap();
        assert!(run.context().is_dir());
        run.remove();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn containers_are_told_by_their_mark() {
        let dir = tempfile::tempdir().unwrap();
        let storage = storage(dir.path());
        let run = storage.create_run("job").unwrap();
        for (id, mark) in [("ours", run.mark()), ("theirs", format!("{}x", run.mark()))] {
            let notes = storage.root().join(format!("overlay-containers/{id}/userdata"));
            fs::create_dir_all(&notes).unwrap();
            fs::write(notes.join("buildah.json"), format!(r#"{{"cgroupParent":"{mark}"}}"#)).unwrap();
        }
        assert_eq!(storage.containers_of(&run), ["ours"]);
    }

    #[test]
    fn only_dead_runs_are_stale() {
        let dir = tempfile::tempdir().unwrap();
        let storage = storage(dir.path());
        let alive = storage.create_run("alive").unwrap();
        let dead = dir.path().join(format!("{PREFIX}dead-1"));
        let (young, other) = (dir.path().join(format!("{PREFIX}young-1")), dir.path().join("other"));
        for path in [&dead, &young, &other] {
            fs::create_dir(path).unwrap();
        }
        fs::write(dead.join(LOCK), "").unwrap();
        storage.remove_stale();
        assert!(alive.path().is_dir() && young.is_dir() && other.is_dir());
        assert!(!dead.exists());
    }
}
