//! The steps of each command.

use std::{
    path::Path,
    process::{Command, ExitCode},
};

use serde::Serialize;

use crate::{
    Error, Result,
    artifacts::ArtifactStore,
    boot_loader::{self, BootLoader},
    commands::output_of,
    config::HostConfig,
    extensions::{self, Loaded},
    gate::{self, BootInstruction, Decision, boot_instruction, decide},
    kernels,
    log::{print, print_error},
    node_labels,
    state::{Artifacts, DIRECTORY, State, lock, read_json, write_durably, write_json},
};

const ROOT: &str = "/";
/// File with the kernel that was last confirmed as the default.
const DEFAULT: &str = "/var/lib/farrier-host/default";
const STATE: &str = "/var/lib/farrier-host/state.json";
/// File with the newest decision, for `status`.
const DECISION: &str = "/var/lib/farrier-host/decision.json";
/// Lock that protects the state from other commands.
const LOCK: &str = "lock";

/// The host that this program runs on.
pub(crate) struct Host {
    config: HostConfig,
    running: String,
    boot_id: String,
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
        Ok(Self {
            config: HostConfig::read(config)?,
            running: kernels::running()?,
            boot_id: kernels::boot_id()?,
        })
    }

    /// Fetches missing drivers of newer kernels, and lets the newest kernel that has all drivers boot once.
    pub(crate) fn reconcile(&self) -> Result<()> {
        let _lock = lock(LOCK)?;
        self.reconcile_locked()
    }

    fn reconcile_locked(&self) -> Result<()> {
        if let Err(error) = extensions::merge_again(&self.running, true) {
            print_error(format!("warning: {error}"));
        }
        let boot_loader = boot_loader::detect(Path::new(ROOT))?;
        boot_loader.keep_default(confirmed_default().as_deref())?;
        let installed = kernels::installed(Path::new(ROOT))?;
        let default = default_kernel(boot_loader.as_ref(), &installed)?;
        let store = self.store();
        let mut state = read_state();
        state.end_missed_trial(&self.running, &self.boot_id);
        write_json(Path::new(STATE), &state)?;
        // Until the trial ends, leave the lock to `confirm`: a registry may take minutes to answer. A failure must lead back to the
        // default, so newer kernels wait.
        if State::gives_way(Some(&state), &self.running, Some(default.as_str())) {
            return Ok(());
        }
        store.keep_only(&installed)?;
        // Also fetch the default kernel's drivers, because the next boot loads them.
        for driver in &self.config.drivers {
            if let Err(why) = store.ensure_stored(driver, &default) {
                print_error(format!("kernel {default}: no {driver}: {why}"));
            }
        }
        let mut look_up = |driver: &str, release: &str| store.ensure_stored(driver, release);
        let (bootable, drivers) = (boot_loader.kernels()?, &self.config.drivers);
        let mut decision = decide(&default, &installed, &bootable, drivers, &state, &mut look_up);
        // Report the decision even if the boot loader fails.
        let instructed = self.instruct(boot_loader.as_ref(), &decision, &mut state);
        if let Err(error) = &instructed {
            decision.hold_trial(error);
        }
        for (release, reasons) in &decision.held {
            for (driver, why) in reasons {
                print(format!("kernel {release} is held: {driver}: {why}"));
            }
        }
        // Other programs may write to the directory of the labels.
        if let Err(error) = node_labels::write(Path::new(ROOT), &decision, &loaded_artifacts()) {
            print_error(format!("warning: no labels for NFD: {error}"));
        }
        write_json(Path::new(DECISION), &decision)?;
        instructed
    }

    /// Arms or disarms the boot loader according to the decision.
    fn instruct(&self, boot_loader: &dyn BootLoader, decision: &Decision, state: &mut State) -> Result<()> {
        match boot_instruction(decision, state, boot_loader.next_kernel()?.as_deref()) {
            BootInstruction::Nothing => return Ok(()),
            BootInstruction::ClearNext => {
                boot_loader.clear_next()?;
                state.trial = None;
            }
            BootInstruction::BootOnce(mut trial) => {
                // Record the trial before the kernel can boot. Without `armed_in` it cannot count as missed.
                state.trial = Some(trial.clone());
                write_json(Path::new(STATE), state)?;
                boot_loader.boot_once(&trial.release)?;
                print(format!("kernel {} boots next, once: all of its drivers are stored", trial.release));
                trial.armed_in = Some(self.boot_id.clone());
                state.trial = Some(trial);
            }
        }
        write_json(Path::new(STATE), state)
    }

    /// Verifies and merges the running kernel's extensions, and loads their modules. If the kernel is on trial, a failure ends the
    /// trial and reboots into the default kernel.
    pub(crate) fn activate(&self) -> Result<ExitCode> {
        let mut state = read_state();
        // Load the drivers even if the disk is full: the next reconcile ends the trial as well.
        if state.end_missed_trial(&self.running, &self.boot_id)
            && let Err(error) = write_json(Path::new(STATE), &state)
        {
            print_error(format!("warning: {error}"));
        }
        match self.load_drivers() {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error) => fail_boot(&self.running, &error),
        }
    }

    /// Makes the running kernel the default if its drivers are loaded.
    pub(crate) fn confirm(&self) -> Result<ExitCode> {
        let loaded = Loaded::read().ok_or(Error::NotActivated);
        let checked = loaded.and_then(|loaded| extensions::ensure_loaded(Path::new(ROOT), &loaded.modules));
        // A trial also fails if its kernel leaves the disk read-only.
        let _lock = match checked.and_then(|()| lock(LOCK)) {
            Ok(lock) => lock,
            Err(error) => return fail_boot(&self.running, &error),
        };
        let mut state = read_state();
        if state.is_on_trial(&self.running) {
            let boot_loader = boot_loader::detect(Path::new(ROOT))?;
            write_durably(Path::new(DEFAULT), self.running.as_bytes())?;
            set_default(boot_loader.as_ref(), &self.running)?;
            state.trial = None;
            state.failed.remove(&self.running);
            write_json(Path::new(STATE), &state)?;
            print(format!("kernel {} is the default now: its drivers are loaded", self.running));
        }
        Ok(ExitCode::SUCCESS)
    }

    pub(crate) fn retry(&self, release: &str) -> Result<()> {
        let _lock = lock(LOCK)?;
        if !kernels::installed(Path::new(ROOT))?.iter().any(|installed| installed == release) {
            return Err(Error::NotInstalled { release: release.to_owned() });
        }
        for driver in &self.config.drivers {
            let unavailable =
                |why| Error::Unavailable { release: release.to_owned(), driver: driver.clone(), why };
            self.store().refresh(driver, release).map_err(unavailable)?;
        }
        let mut state = read_state();
        state.failed.remove(release);
        write_json(Path::new(STATE), &state)?;
        self.reconcile_locked()
    }

    pub(crate) fn import(&self, bundle: &Path) -> Result<()> {
        let _lock = lock(LOCK)?;
        self.store().import(bundle)?;
        self.reconcile_locked()
    }

    pub(crate) fn print_status(&self, json: bool) -> Result<()> {
        let default = boot_loader::detect(Path::new(ROOT))?.default_kernel()?;
        let decision = read_json(Path::new(DECISION))?.unwrap_or_default();
        let status = Status { running: &self.running, default, decision };
        if json {
            print(serde_json::to_string_pretty(&status)?);
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

    /// Merges and loads every driver that can be verified. If a driver is missing, fails after loading the others.
    fn load_drivers(&self) -> Result<()> {
        let (store, directory) = (self.store(), Path::new(DIRECTORY).join("extensions"));
        // A link for another kernel keeps a removed extension on the disk.
        for entry in fs_err::read_dir(&directory).into_iter().flatten().flatten() {
            if !entry.file_name().to_string_lossy().ends_with(&format!("-{}.raw", self.running)) {
                let _ = fs_err::remove_file(entry.path());
            }
        }
        let (mut images, mut loaded, mut missing) = (Vec::new(), Loaded::default(), Vec::new());
        for driver in &self.config.drivers {
            match store.write_verified(driver, &self.running, &directory) {
                Ok((image, digest)) => {
                    images.push(image);
                    loaded.artifacts.insert(driver.clone(), digest);
                }
                Err(error) => missing.push(format!("{driver}: {error}")),
            }
        }
        let rejected = extensions::merge(&images, &self.running)?;
        missing.extend(rejected.iter().map(ToString::to_string));
        let mut files = extensions::modules(Path::new(ROOT), &self.running, &self.config.drivers)?;
        let configured = &self.config.modules;
        loaded.modules =
            if configured.is_empty() { files.keys().cloned().collect() } else { configured.clone() };
        let result = extensions::load(&loaded.modules);
        if !missing.is_empty() {
            return Err(Error::Drivers { why: missing.join("; ") });
        }
        result?;
        let not_merged = extensions::not_merged(Path::new(ROOT), &self.running, &self.config.drivers);
        if !not_merged.is_empty() {
            return Err(Error::NotMerged { drivers: not_merged.join(", ") });
        }
        files.retain(|module, _| loaded.modules.contains(module));
        extensions::ensure_own(Path::new(ROOT), &files)?;
        loaded.write()
    }

    fn store(&self) -> ArtifactStore<'_> {
        ArtifactStore { config: &self.config, directory: DIRECTORY.into(), farrier: "farrier".into() }
    }
}

/// Reports a failure of the boot. If the running kernel is on trial, ends the trial and reboots into the default kernel.
pub(crate) fn fail_boot(running: &str, error: &Error) -> Result<ExitCode> {
    print_error(format!("error: {error}"));
    let state: Option<State> = read_json(Path::new(STATE)).ok().flatten();
    let boot_loader = boot_loader::detect(Path::new(ROOT));
    let default = boot_loader.as_ref().ok().and_then(|loader| loader.default_kernel().ok().flatten());
    if !State::gives_way(state.as_ref(), running, default.as_deref()) {
        return Ok(ExitCode::FAILURE);
    }
    if let Some(mut state) = state {
        state.fail_trial(&error.to_string());
        // On a full disk, the next boot records the missed trial.
        if let Err(error) = write_json(Path::new(STATE), &state) {
            print_error(format!("warning: {error}"));
        }
    }
    // GRUB may have been unable to clear the kernel that it boots once.
    if let Err(error) = boot_loader.and_then(|boot_loader| boot_loader.clear_next()) {
        print_error(format!("warning: {error}"));
    }
    print_error(format!("kernel {running} was on trial: rebooting into the default kernel"));
    output_of(Command::new("systemctl").args(["--no-block", "reboot"]))?;
    Ok(ExitCode::FAILURE)
}

/// Makes the running kernel the default and holds later kernels. Runs when the package is installed, before a configuration
/// exists.
pub(crate) fn pin() -> Result<()> {
    let _lock = lock(LOCK)?;
    let (boot_loader, running) = (boot_loader::detect(Path::new(ROOT))?, kernels::running()?);
    boot_loader.keep_default(None)?;
    boot_loader.set_default(&running)?;
    write_durably(Path::new(DEFAULT), running.as_bytes())?;
    let mut state = read_state();
    if state.trial.take().is_some() { write_json(Path::new(STATE), &state) } else { Ok(()) }
}

/// Keeps the default after packages of kernels were installed or replaced.
pub(crate) fn keep_default() -> Result<()> {
    boot_loader::detect(Path::new(ROOT))?.keep_default(confirmed_default().as_deref())
}

/// Returns the default kernel, after setting it in the boot loader if something else has changed or removed it there.
fn default_kernel(boot_loader: &dyn BootLoader, installed: &[String]) -> Result<String> {
    let (confirmed, found) = (confirmed_default(), boot_loader.default_kernel()?);
    let running = Loaded::read().and_then(|_| kernels::running().ok());
    let candidates = [confirmed.as_deref(), found.as_deref(), running.as_deref()];
    let default = gate::default_kernel(candidates, installed).ok_or(Error::NoDefault)?;
    if found.as_deref() != Some(default) {
        set_default(boot_loader, default)?;
        let found = found.as_deref().unwrap_or("none");
        print(format!("the default is {default} now, not {found}: `farrier-host pin` changes it"));
    }
    if confirmed.as_deref() != Some(default) {
        write_durably(Path::new(DEFAULT), default.as_bytes())?;
    }
    Ok(default.to_owned())
}

/// Sets the boot loader's default. Fails if that has no effect.
fn set_default(boot_loader: &dyn BootLoader, release: &str) -> Result<()> {
    boot_loader.set_default(release)?;
    match boot_loader.default_kernel()? {
        Some(actual) if actual == release => Ok(()),
        Some(actual) => Err(Error::OtherDefault { release: release.to_owned(), actual }),
        None => Err(Error::NoDefault),
    }
}

/// Reads the state. Starts from an empty one if the file is unreadable: a kernel on trial then needs another trial.
fn read_state() -> State {
    let state = read_json(Path::new(STATE)).unwrap_or_else(|error| {
        print_error(format!("warning: {STATE}: {error}"));
        None
    });
    state.unwrap_or_default()
}

/// Returns the extensions that were merged in this boot; none if one of their modules is not loaded.
fn loaded_artifacts() -> Artifacts {
    let loaded = Loaded::read().unwrap_or_default();
    match extensions::ensure_loaded(Path::new(ROOT), &loaded.modules) {
        Ok(()) => loaded.artifacts,
        Err(_) => Artifacts::new(),
    }
}

/// Returns the kernel that was last confirmed as the default.
fn confirmed_default() -> Option<String> {
    fs_err::read_to_string(DEFAULT).ok()
}

#[cfg(test)]
mod tests {
    /// A reboot before the confirmation counts as a failed trial, and a reconcile may wait minutes for the registry.
    #[test]
    fn a_kernel_is_confirmed_before_the_first_reconcile() {
        let minutes = |timer: &str| -> u32 {
            let line = timer.lines().find_map(|line| line.strip_prefix("OnBootSec=")?.strip_suffix("min"));
            line.unwrap().parse().unwrap()
        };
        let confirm = minutes(include_str!("../package/farrier-host-confirm.timer"));
        // systemd starts a unit up to a minute late.
        assert!(minutes(include_str!("../package/farrier-host.timer")) > confirm + 1);
    }
}
