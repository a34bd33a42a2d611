//! State that the program keeps between boots.

use std::{
    collections::BTreeMap,
    fs::{File, Permissions},
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::Result;

/// Directory of this program's data.
pub(crate) const DIRECTORY: &str = "/var/lib/farrier-host";

/// Digests of drivers' system extensions by the name of the driver.
pub(crate) type Artifacts = BTreeMap<String, String>;

/// A kernel that the boot loader boots once. The default kernel stays as it is until the drivers are loaded.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Trial {
    pub(crate) release: String,
    pub(crate) artifacts: Artifacts,
    /// Identifier of the boot in which the boot loader was armed; `None` until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) armed_in: Option<String>,
}

/// A kernel whose first boot did not load the drivers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FailedTrial {
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
    /// Whether this kernel runs on trial.
    pub(crate) fn is_on_trial(&self, running: &str) -> bool {
        self.trial.as_ref().is_some_and(|trial| trial.release == *running)
    }

    /// Whether this kernel must give way to the default if its drivers fail. If the state is missing, for example with its disk,
    /// every kernel except the default counts as on trial: the default is known to find that disk.
    pub(crate) fn gives_way(state: Option<&Self>, running: &str, default: Option<&str>) -> bool {
        match state {
            Some(state) => state.is_on_trial(running) && default != Some(running),
            None => default.is_some_and(|default| default != running),
        }
    }

    /// Fails a missed trial: the host has booted another kernel since the boot loader was armed. Returns whether one was missed.
    pub(crate) fn end_missed_trial(&mut self, running: &str, boot_id: &str) -> bool {
        let is_missed = |trial: &Trial| {
            trial.release != *running && trial.armed_in.as_ref().is_some_and(|armed| *armed != *boot_id)
        };
        let missed = self.trial.as_ref().is_some_and(is_missed);
        if missed {
            self.fail_trial(&format!("the host came back with kernel {running}"));
        }
        missed
    }

    /// Records that the pending trial failed.
    pub(crate) fn fail_trial(&mut self, reason: &str) {
        if let Some(trial) = self.trial.take() {
            self.failed.insert(trial.release, FailedTrial { reason: reason.to_owned() });
        }
    }
}

/// Waits for a lock that other commands take, too. Dropping the returned file releases the lock.
pub(crate) fn lock(name: &str) -> Result<File> {
    fs_err::create_dir_all(DIRECTORY)?;
    // Other users must not hold the lock.
    fs_err::set_permissions(DIRECTORY, Permissions::from_mode(0o700))?;
    let file = File::create(Path::new(DIRECTORY).join(name))?;
    file.lock()?;
    Ok(file)
}

/// Removes a file, unless it does not exist.
pub(crate) fn remove_if_exists(path: &Path) -> io::Result<()> {
    match fs_err::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Reads a file; `None` if it does not exist.
pub(crate) fn read_if_exists(path: &Path) -> io::Result<Option<Vec<u8>>> {
    match fs_err::read(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        content => content.map(Some),
    }
}

/// Reads a JSON file; `None` if it was never written, or its disk is missing.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    let content = read_if_exists(path)?;
    Ok(content.map(|content| serde_json::from_slice(&content)).transpose()?)
}

/// Writes a JSON file so that it survives an immediate crash of the host.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    write_durably(path, &serde_json::to_vec(value)?)
}

/// Replaces a file atomically, and waits until the disk has the content.
pub(crate) fn write_durably(path: &Path, bytes: &[u8]) -> Result<()> {
    let directory = path.parent().unwrap_or(Path::new("/"));
    fs_err::create_dir_all(directory)?;
    // Programs that read the directory skip hidden files.
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary: PathBuf = directory.join(format!(".{name}.new"));
    // Other programs may write to NFD's directory. Never write through a link that one of them left.
    remove_if_exists(&temporary)?;
    let mut file = fs_err::OpenOptions::new().write(true).create_new(true).open(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs_err::rename(&temporary, path)?;
    Ok(fs_err::File::open(directory)?.sync_all()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("farrier-host/state.json");
        assert_eq!(read_json::<State>(&path).unwrap(), None);
        let artifacts = Artifacts::from([("hello".to_owned(), "sha256:1".to_owned())]);
        let trial = Trial { release: "6.2".to_owned(), artifacts, armed_in: None };
        let mut state = State { trial: Some(trial), ..State::default() };
        write_json(&path, &state).unwrap();
        assert_eq!(read_json::<State>(&path).unwrap().as_ref(), Some(&state));
        state.fail_trial("it hung");
        assert_eq!(state.trial, None);
        assert_eq!(state.failed["6.2"], FailedTrial { reason: "it hung".to_owned() });
    }

    #[test]
    fn a_link_that_another_program_left_is_replaced_and_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, path) = (dir.path().join("grub.cfg"), dir.path().join("farrier-host"));
        std::fs::write(&victim, "menu").unwrap();
        std::os::unix::fs::symlink(&victim, dir.path().join(".farrier-host.new")).unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        write_durably(&path, b"labels").unwrap();
        assert_eq!(std::fs::read(&victim).unwrap(), b"menu");
        assert_eq!(std::fs::read(&path).unwrap(), b"labels");
        assert!(path.symlink_metadata().unwrap().is_file());
    }

    #[test]
    fn without_a_state_every_kernel_but_the_default_gives_way() {
        let trial = Trial { release: "6.2".to_owned(), artifacts: Artifacts::new(), armed_in: None };
        let state = State { trial: Some(trial), ..State::default() };
        for (state, running, default, expected) in [
            (Some(&state), "6.2", Some("6.1"), true),
            (Some(&state), "6.2", None, true),
            // A reboot would lead to the same kernel.
            (Some(&state), "6.2", Some("6.2"), false),
            (Some(&state), "6.0", Some("6.1"), false),
            (None, "6.2", Some("6.1"), true),
            (None, "6.1", Some("6.1"), false),
            (None, "6.1", None, false),
        ] {
            assert_eq!(State::gives_way(state, running, default), expected, "{running} {default:?}");
        }
    }

    #[test]
    fn only_a_trial_that_the_boot_loader_knew_can_be_missed() {
        let trial = |armed_in: Option<&str>| State {
            trial: Some(Trial {
                release: "6.2".to_owned(),
                artifacts: Artifacts::new(),
                armed_in: armed_in.map(str::to_owned),
            }),
            ..State::default()
        };
        for (armed_in, running, missed) in [
            (Some("boot-1"), "6.1", true),
            (Some("boot-2"), "6.1", false),
            (None, "6.1", false),
            (Some("boot-1"), "6.2", false),
        ] {
            let mut state = trial(armed_in);
            assert_eq!(state.end_missed_trial(running, "boot-2"), missed, "{armed_in:?} {running}");
            assert_eq!(state.failed.contains_key("6.2"), missed);
            assert_eq!(state.is_on_trial("6.2"), !missed);
        }
    }
}
