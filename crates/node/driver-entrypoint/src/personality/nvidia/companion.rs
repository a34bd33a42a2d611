//! Containers next to the GPU driver's, for peer memory, GPUDirect Storage and GDRCopy. Each keeps one module loaded
//! while the GPU driver is loaded, and OFED if the module needs it. A replacement of one of these drivers leads to a
//! reload of the module.

use std::time::Duration;

use rustix::io::Errno;

use super::{
    driver, state,
    watch::{Missing, Observation, Owner, Step, decide},
};
use crate::{
    error::Error,
    files,
    modules::{
        load::Loader,
        loaded::Loaded,
        parameters::Parameters,
        unload,
        versions::{self, Driver},
    },
    node::{Node, is_plain_path},
    signals::Signals,
};

/// Polling interval for the drivers and for signals.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Number of polls between two log lines about waiting.
const POLLS_PER_REMINDER: u32 = 30;

/// The GPU driver's modules, if its container exposes its root.
const GPU_MODULES: &str = "/run/nvidia/driver/lib/modules";

/// Headers that OFED's containers expose. Manifests of the first generation mount these instead of the ready file.
const OFED_SOURCES: &str = "/run/mellanox/drivers/usr/src/ofa_kernel";

/// Usage text of `nv-peer-mem`.
pub(crate) const USAGE: &str = "\
usage: driver-entrypoint nv-peer-mem [--ready-file PATH]

Loads nv_peer_mem as soon as OFED and the GPU driver are ready; unloads it when one of them is unloaded, and at a signal.
USE_HOST_MOFED=true: OFED is the host's own. The ready file is /.driver-ready unless another is named.";

/// Usage text of `nvidia-gds-driver` and `nvidia-gdrcopy-driver`.
pub(crate) const INSTALL_USAGE: &str = "\
usage: nvidia-gds-driver install        load nvidia-fs as soon as the GPU driver is ready, and again whenever it was replaced
       nvidia-gdrcopy-driver install    the same for gdrdrv, with its device file /dev/gdrdrv";

/// A container for a module that depends on the GPU driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Companion<'a> {
    pub(crate) module: &'a str,
    pub(crate) owner: Owner,
    /// Ready file; it exists while the module is loaded against the current drivers.
    pub(crate) ready_file: Option<&'a str>,
    pub(crate) ofed: Ofed,
}

/// The OFED that a module depends on, if any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ofed {
    /// The module does not use OFED.
    Unused,
    /// OFED of another container.
    Container,
    /// The host's own OFED.
    Host,
}

impl Ofed {
    /// Converts `USE_HOST_MOFED`.
    pub(crate) fn of(is_host: bool) -> Self {
        if is_host { Self::Host } else { Self::Container }
    }
}

/// GDRCopy's module. It creates no device file itself; its applications expect one of this name (`insmod.sh` of GDRCopy).
const GDRDRV: &str = "gdrdrv";
/// Directories for device files: the container's, the host's, and the GPU driver's root, which the container toolkit
/// uses for containers.
const DEVICE_DIRECTORIES: [&str; 3] = ["/dev", "/proc/1/root/dev", "/run/nvidia/driver/dev"];

/// State that is kept between polls.
#[derive(Default)]
struct PollState {
    /// Identity of the `ib_core` that the module was loaded against.
    loaded_against: Option<String>,
    /// Whether OFED's ready file was ever seen. Once seen, its absence means that OFED is not ready.
    ofed_file_seen: bool,
    /// The missing drivers, and the number of polls for which they have been missing.
    waiting: Option<(Missing, u32)>,
    is_ready: bool,
}

impl<'a> Companion<'a> {
    /// Parses `nv-peer-mem`: the container of `nv_peer_mem`, for GPU drivers before 470. Takes the arguments and the
    /// environment.
    pub(crate) fn nv_peer_mem(
        arguments: &[&'a str],
        variable: impl Fn(&str) -> Option<String>,
    ) -> Option<Self> {
        let ready_file = match arguments {
            [] => "/.driver-ready",
            ["--ready-file", path] => path,
            _ => return None,
        };
        let ofed = Ofed::of(variable("USE_HOST_MOFED").is_some_and(|value| value == "true"));
        let is_path = is_plain_path(ready_file) && !ready_file.ends_with('/');
        let (module, ready_file) = ("nv_peer_mem", Some(ready_file));
        is_path.then_some(Self { module, owner: Owner::ThisContainer, ready_file, ofed })
    }

    /// Parses `nvidia-gds-driver install` and `nvidia-gdrcopy-driver install`: the program's name and its arguments.
    /// The GPU driver's container, in the same pod, unloads their modules.
    pub(crate) fn install(program: &str, arguments: &[&str]) -> Option<Self> {
        let module = if program == "nvidia-gds-driver" { "nvidia_fs" } else { GDRDRV };
        let companion = Self { module, owner: Owner::DriverContainers, ready_file: None, ofed: Ofed::Unused };
        (*arguments == ["install"]).then_some(companion)
    }

    /// Runs until a signal arrives or the module cannot be loaded.
    pub(crate) fn run(&self, node: &Node<'_>, signals: &mut dyn Signals) -> Result<(), Error> {
        // A killed container may have left the ready file behind.
        self.clear_ready(node)?;
        let mut state = PollState::default();
        let signal = loop {
            if let Some(signal) = signals.received() {
                break signal;
            }
            if let Err(error) = self.poll(node, &mut state) {
                self.clear_ready(node)?;
                return Err(error);
            }
            node.kernel.pause(POLL_INTERVAL);
        };
        node.log.step(format!("received {signal}: stopping"));
        self.clear_ready(node)?;
        if self.owner == Owner::ThisContainer {
            unload::unload(node, self.module)?;
        }
        Ok(())
    }

    /// Polls the node once and acts on the result.
    fn poll(&self, node: &Node<'_>, state: &mut PollState) -> Result<(), Error> {
        let Self { module, owner, .. } = *self;
        let loaded = Loaded::read(&node.paths)?;
        let observed = self.observe(node, &loaded, state);
        let step = decide(owner, &observed, state.loaded_against.as_deref());
        match step {
            Step::Keep if state.is_ready => return Ok(()),
            Step::Keep => node.log.step(format!("module {module} is loaded")),
            Step::Wait(missing) => {
                self.withdraw_ready(node, state)?;
                let text = match missing {
                    Missing::Ofed => "waiting for OFED",
                    Missing::Gpu => "waiting for the GPU driver",
                    Missing::Both => "waiting for OFED and the GPU driver",
                };
                self.log_waiting(node, state, missing, text);
                return Ok(());
            }
            Step::Load | Step::Reload => {
                self.withdraw_ready(node, state)?;
                if step == Step::Reload {
                    node.log
                        .step(format!("ib_core was replaced after {module} was loaded: loading it again"));
                    unload::unload(node, module)?;
                }
                self.load(node)?;
            }
            Step::Release(missing) => {
                self.withdraw_ready(node, state)?;
                // Retry at later polls, because the module's user may release it. OFED's own container also reports
                // that the module blocks it.
                match unload::unload(node, module) {
                    Ok(_) => state.loaded_against = None,
                    Err(error) => self.log_waiting(node, state, missing, &error.to_string()),
                }
                return Ok(());
            }
        }
        // A killed container may have loaded the module without creating the device files.
        if module == GDRDRV {
            make_device_files(node)?;
        }
        state.loaded_against = observed.ib_core;
        (state.is_ready, state.waiting) = (true, None);
        self.ready_file.map_or(Ok(()), |file| files::set_ready(node, file))
    }

    fn observe(&self, node: &Node<'_>, loaded: &Loaded, state: &mut PollState) -> Observation {
        let uses_ofed = self.ofed != Ofed::Unused;
        let is_ready_by_file = uses_ofed && state::is_ofed_ready(node, loaded, self.ofed == Ofed::Host);
        state.ofed_file_seen |= is_ready_by_file;
        let is_ready_by_sources = self.owner == Owner::ThisContainer
            && !state.ofed_file_seen
            && loaded.contains("mlx5_core")
            && node.paths.at(OFED_SOURCES).exists();
        Observation {
            ofed: !uses_ofed || is_ready_by_file || is_ready_by_sources,
            gpu: state::is_gpu_ready(node, loaded, self.owner == Owner::DriverContainers),
            loaded: loaded.contains(self.module),
            ib_core: loaded.identity(&node.paths, "ib_core").filter(|_| uses_ofed),
        }
    }

    fn load(&self, node: &Node<'_>) -> Result<(), Error> {
        let index = driver::index(node, Some(GPU_MODULES))?;
        let loader = Loader { node, index, parameters: Parameters::read(&node.paths) };
        let drivers = [Driver::Gpu, Driver::Ofed];
        // The host's own OFED exposes no Module.symvers to containers.
        let drivers = if self.ofed == Ofed::Container { &drivers[..] } else { &drivers[..1] };
        versions::check(&loader, self.module, drivers)?;
        loader.load(self.module).map(drop).map_err(|error| self.with_hint(error))
    }

    /// Adds a hint for the most common failure: a module that was not compiled against the loaded drivers.
    fn with_hint(&self, error: Error) -> Error {
        match &error {
            Error::Refused { name, refusal, .. }
                if name == self.module
                    && matches!(refusal.errno, Errno::NOENT | Errno::INVAL | Errno::NOEXEC) =>
            {
                let ofed_text = if self.ofed == Ofed::Unused { "" } else { "OFED and the " };
                let hint = format!(
                    "{name} was not compiled against the {ofed_text}GPU driver that is loaded here: build its \
                     image with those drivers in spec.needs, and roll them out together"
                );
                Error::new(error.to_string(), hint)
            }
            _ => error,
        }
    }

    /// Logs why nothing happens: immediately and then periodically.
    fn log_waiting(&self, node: &Node<'_>, state: &mut PollState, missing: Missing, text: &str) {
        let polls = match state.waiting {
            Some((before, polls)) if before == missing => polls + 1,
            _ => 0,
        };
        if polls % POLLS_PER_REMINDER == 0 {
            node.log.step(format!("{}: {text}", self.module));
        }
        state.waiting = Some((missing, polls));
    }

    fn withdraw_ready(&self, node: &Node<'_>, state: &mut PollState) -> Result<(), Error> {
        state.is_ready = false;
        self.clear_ready(node)
    }

    fn clear_ready(&self, node: &Node<'_>) -> Result<(), Error> {
        self.ready_file.map_or(Ok(()), |file| files::remove_and_log(node, file))
    }
}

/// Creates GDRCopy's device files again, because the major number can change with each load.
fn make_device_files(node: &Node<'_>) -> Result<(), Error> {
    let devices = files::text(node.paths.at("/proc/devices")).unwrap_or_default();
    let numbers = devices.lines().filter_map(|line| line.trim().split_once(' '));
    let number = numbers.filter(|(_, name)| *name == GDRDRV).find_map(|(number, _)| number.parse().ok());
    let number = number.ok_or_else(|| {
        Error::new("gdrdrv is loaded, but /proc/devices has no number for it", "check dmesg on the node")
    })?;
    for directory in DEVICE_DIRECTORIES.iter().filter(|directory| node.paths.at(directory).is_dir()) {
        let path = format!("{directory}/{GDRDRV}");
        files::remove(node, &path)?;
        node.kernel
            .make_device(&node.paths.at(&path), number)
            .map_err(Error::on("make device", path.as_str()))?;
        node.log.step(format!("made {path} (character device {number}:0)"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
