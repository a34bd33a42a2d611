//! What the program remembers between boots.

use std::{
    collections::BTreeMap,
    io::Write as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use crate::Result;

/// Digests of drivers' system extensions by the name of the driver.
pub(crate) type Artifacts = BTreeMap<String, String>;

/// A kernel that the boot loader boots once. The default kernel stays as it is until the drivers are loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trial {
    pub(crate) release: String,
    pub(crate) artifacts: Artifacts,
}

/// A kernel whose first boot did not load the drivers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailedTrial {
    pub(crate) artifacts: Artifacts,
    pub(crate) reason: String,
}

/// Content of the state file.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    pub(crate) trial: Option<Trial>,
    /// Failed trials by kernel release.
    #[serde(default)]
    pub(crate) failed: BTreeMap<String, FailedTrial>,
}

impl State {
    /// Reads the state; empty where no state was written.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        match fs_err::read(path) {
            Ok(bytes) => Ok(serde_json::from_slice(&bytes).map_err(std::io::Error::other)?),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(error.into()),
        }
    }

    /// Writes the state, which survives a crash of the host that follows immediately.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let bytes = serde_json::to_vec_pretty(self).map_err(std::io::Error::other)?;
        write_durably(path, &bytes)
    }

    /// Records that the pending trial failed.
    pub(crate) fn fail_trial(&mut self, reason: &str) {
        if let Some(Trial { release, artifacts }) = self.trial.take() {
            self.failed.insert(release, FailedTrial { artifacts, reason: reason.to_owned() });
        }
    }
}

/// Replaces a file atomically, and waits until the disk has the content.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs_err::create_dir_all(directory)?;
    let temporary = PathBuf::from(format!("{}.new", path.display()));
    let mut file = fs_err::File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs_err::rename(&temporary, path)?;
    fs_err::File::open(directory)?.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("farrier-host/state.json");
        assert_eq!(State::read(&path).unwrap(), State::default());
        let artifacts = Artifacts::from([("hello".to_owned(), "sha256:1".to_owned())]);
        let trial = Trial { release: "6.2".to_owned(), artifacts: artifacts.clone() };
        let mut state = State { trial: Some(trial), ..State::default() };
        state.write(&path).unwrap();
        assert_eq!(State::read(&path).unwrap(), state);
        state.fail_trial("it hung");
        assert_eq!(state.trial, None);
        assert_eq!(state.failed["6.2"], FailedTrial { artifacts, reason: "it hung".to_owned() });
    }
}
