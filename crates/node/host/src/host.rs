//! The steps of each command.

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
};

use serde::Serialize;

use crate::{
    Error, Result,
    artifacts::ArtifactStore,
    boot_loader,
    commands::output_of,
    config::HostConfig,
    extensions,
    gate::{Decision, decide},
    kernels,
    log::{print, print_error},
    node_labels,
    state::{Artifacts, State, write_durably},
};

const ROOT: &str = "/";
const DIRECTORY: &str = "/var/lib/farrier-host";

/// The host that this program runs on.
pub(crate) struct Host {
    config: HostConfig,
    running: String,
}

/// Output of `status`.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Status<'a> {
    running: &'a str,
    default: Option<String>,
    #[serde(flatten)]
    decision: Decision,
}

impl Host {
    pub(crate) fn open(config: &Path) -> Result<Self> {
        Ok(Self { config: HostConfig::read(config)?, running: kernels::running()? })
    }

    /// Fetches what newer kernels lack, and arms the newest one that lacks nothing.
    pub(crate) fn reconcile(&self) -> Result<()> {
        let boot_loader = boot_loader::find(Path::new(ROOT))?;
        let installed = kernels::installed(Path::new(ROOT))?;
        let default = boot_loader.default()?.filter(|release| installed.contains(release));
        let default = default.ok_or(Error::NoDefault)?;
        let (store, mut state) = (self.store(), State::read(&state_file())?);
        store.keep_only(&installed)?;
        // Also fetch the default kernel's drivers, because the next boot loads them.
        for driver in &self.config.drivers {
            if let Err(why) = store.ensure_stored(driver, &default) {
                print_error(format!("kernel {default}: no {driver}: {why}"));
            }
        }
        let mut look_up = |driver: &str, release: &str| store.ensure_stored(driver, release);
        let decision = decide(&default, &installed, &self.config.drivers, &state, &mut look_up);
        if let (Some(trial), true) = (&decision.trial, decision.is_new) {
            state.trial = Some(trial.clone());
            // After a crash between the two, the boot loader boots the default.
            state.write(&state_file())?;
            boot_loader.set_next(&trial.release)?;
            print(format!("kernel {} boots next, once: all of its drivers are stored", trial.release));
        }
        for (release, reasons) in &decision.held {
            for (driver, why) in reasons {
                print(format!("kernel {release} is held: {driver}: {why}"));
            }
        }
        node_labels::write(Path::new(ROOT), &decision, &self.loaded()?)?;
        write_durably(&decision_file(), &serde_json::to_vec(&decision).map_err(std::io::Error::other)?)
    }

    /// Verifies and merges the running kernel's extensions, and loads their modules. If the kernel is on trial, a failure ends the
    /// trial and reboots into the default kernel.
    pub(crate) fn activate(&self) -> Result<ExitCode> {
        let mut state = State::read(&state_file())?;
        if state.trial.as_ref().is_some_and(|trial| trial.release != self.running) {
            state.fail_trial(&format!("the host came back with kernel {}", self.running));
            state.write(&state_file())?;
        }
        match self.load_drivers() {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) => self.fail(state, &error),
        }
    }

    /// Makes the running kernel the default if its drivers are loaded.
    pub(crate) fn confirm(&self) -> Result<ExitCode> {
        let mut state = State::read(&state_file())?;
        if let Err(error) = extensions::ensure_loaded(Path::new(ROOT), &self.modules()?) {
            return self.fail(state, &error);
        }
        if state.trial.take_if(|trial| trial.release == self.running).is_some() {
            let boot_loader = boot_loader::find(Path::new(ROOT))?;
            boot_loader.set_default(&self.running)?;
            if boot_loader.default()?.as_ref() != Some(&self.running) {
                return Err(Error::OtherDefault { release: self.running.clone() });
            }
            state.failed.remove(&self.running);
            state.write(&state_file())?;
            print(format!("kernel {} is the default now: its drivers are loaded", self.running));
        }
        Ok(ExitCode::SUCCESS)
    }

    pub(crate) fn retry(&self, release: &str) -> Result<()> {
        let mut state = State::read(&state_file())?;
        state.failed.remove(release);
        state.trial.take_if(|trial| trial.release == *release);
        state.write(&state_file())?;
        self.store().forget(release)?;
        self.reconcile()
    }

    pub(crate) fn import(&self, bundle: &Path) -> Result<()> {
        self.store().import(bundle)?;
        self.reconcile()
    }

    pub(crate) fn print_status(&self, json: bool) -> Result<()> {
        let default = boot_loader::find(Path::new(ROOT))?.default()?;
        let decision = match fs_err::read(decision_file()) {
            Ok(bytes) => serde_json::from_slice(&bytes).map_err(std::io::Error::other)?,
            Err(_) => Decision::default(),
        };
        let status = Status { running: &self.running, default, decision };
        if json {
            print(serde_json::to_string_pretty(&status).map_err(std::io::Error::other)?);
            return Ok(());
        }
        print(format!("running  {}", status.running));
        print(format!("default  {}", status.default.as_deref().unwrap_or("unknown")));
        if let Some(trial) = &status.decision.trial {
            print(format!("next     {}, once: all of its drivers are stored", trial.release));
        }
        for (release, reasons) in &status.decision.held {
            for (driver, why) in reasons {
                print(format!("held     {release}: {driver}: {why}"));
            }
        }
        Ok(())
    }

    fn load_drivers(&self) -> Result<()> {
        let (store, directory) = (self.store(), Path::new(DIRECTORY).join("extensions"));
        // Remove the copies for earlier kernels.
        if directory.exists() {
            fs_err::remove_dir_all(&directory)?;
        }
        let images: Vec<PathBuf> = self
            .config
            .drivers
            .iter()
            .map(|driver| store.verified(driver, &self.running, &directory))
            .collect::<Result<_>>()?;
        extensions::merge(&images, &self.running)?;
        extensions::load(&self.modules()?)
    }

    /// Returns the running kernel's extensions; none unless all of their modules are loaded.
    fn loaded(&self) -> Result<Artifacts> {
        let modules = self.modules()?;
        if modules.is_empty() || extensions::ensure_loaded(Path::new(ROOT), &modules).is_err() {
            return Ok(Artifacts::new());
        }
        let store = self.store();
        let stored = self
            .config
            .drivers
            .iter()
            .filter_map(|driver| Some((driver.clone(), store.stored(driver, &self.running)?)));
        Ok(stored.collect())
    }

    fn modules(&self) -> Result<Vec<String>> {
        if self.config.modules.is_empty() {
            extensions::modules(Path::new(ROOT), &self.running)
        } else {
            Ok(self.config.modules.clone())
        }
    }

    /// Reports a failure. A kernel on trial gives way to the default kernel.
    fn fail(&self, mut state: State, error: &Error) -> Result<ExitCode> {
        print_error(format!("error: {error}"));
        if state.trial.as_ref().is_some_and(|trial| trial.release == self.running) {
            state.fail_trial(&error.to_string());
            state.write(&state_file())?;
            print_error(format!("kernel {} was on trial: rebooting into the default kernel", self.running));
            output_of(Command::new("systemctl").args(["--no-block", "reboot"]))?;
        }
        Ok(ExitCode::FAILURE)
    }

    fn store(&self) -> ArtifactStore<'_> {
        ArtifactStore { config: &self.config, directory: DIRECTORY.into() }
    }
}

/// Makes the running kernel the default, also when another kernel is installed. Needs no configuration, because the package does this when it is installed.
pub(crate) fn pin() -> Result<()> {
    let boot_loader = boot_loader::find(Path::new(ROOT))?;
    boot_loader.hold_new_kernels()?;
    boot_loader.set_default(&kernels::running()?)
}

fn state_file() -> PathBuf {
    Path::new(DIRECTORY).join("state.json")
}

/// File with the newest decision, for `status`.
fn decision_file() -> PathBuf {
    Path::new(DIRECTORY).join("decision.json")
}
