//! `nvidia-driver init`: replaces the loaded driver with the image's, exposes the container's root, and undoes all of
//! it at a signal.

use std::time::Duration;

use super::{
    daemons::{self, StartResult},
    driver, labels,
    options::Settings,
    parameters, state,
};
use crate::{
    error::Error,
    files::{self, entries, text},
    firmware::Firmware,
    lock,
    modules::{
        load::Loader,
        loaded::Loaded,
        unload,
        versions::{self, Driver},
    },
    mounts,
    node::Node,
    selinux,
    signals::Signals,
};

/// Mellanox's PCI vendor ID, as sysfs shows it.
const MELLANOX: &str = "0x15b3";

/// GSP firmware; it is copied to a directory below the exposed root.
const FIRMWARE: Firmware<'_> = Firmware { host_path: "/run/nvidia/driver/lib/firmware", subdir: "nvidia" };

/// Root of the host, through its first process.
const HOST_ROOT: &str = "/proc/1/root";

/// Polling interval while the start waits.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the container from start to stop.
pub(crate) fn run(node: &Node<'_>, settings: &Settings, signals: &mut dyn Signals) -> Result<(), Error> {
    let _lock = lock::take(node, state::PID_FILE)?;
    node.log.step(format!("NVIDIA driver for kernel {}", node.kernel.release()));
    parameters::check(node, &parameters::MODULES)?;
    let index = driver::index(node, None)?;
    let parameters = driver::parameters(node, &index, settings)?;
    let loader = Loader { node, index, parameters };
    driver::check(&loader, settings.drm)?;
    // The operator's digest covers its whole configuration, including the image's name. The module's own hash catches an image
    // with new content under the same name.
    let is_same = settings.config_digest.is_some()
        && settings.config_digest == text(node.paths.at(state::DIGEST_FILE))
        && driver::is_loaded(node, &loader.index)?;
    if !is_same {
        driver::check_gpus(node)?;
    }
    state::set_not_ready(node)?;
    if is_same {
        node.log.step("the loaded driver already has this configuration: only user space is set up again");
    } else {
        // Fails if the driver is in use, which then stays loaded.
        driver::check_users(node, &daemons::processes(&node.paths))?;
        daemons::stop(node)?;
        driver::unload(node)?;
        files::remove(node, state::DIGEST_FILE)?;
    }
    // Unmount the root that a killed container exposed, so that no firmware is copied into it.
    mounts::conceal(node, state::ROOT)?;
    match start(&loader, settings, signals) {
        Ok(()) => {
            node.log.step("done, waiting for a signal");
            let signal = signals.wait();
            node.log.step(format!("received {signal}: stopping"));
            stop(node)
        }
        Err(error) => {
            node.log.warn_of(stop(node));
            Err(error)
        }
    }
}

fn start(loader: &Loader<'_>, settings: &Settings, signals: &mut dyn Signals) -> Result<(), Error> {
    let Loader { node, .. } = loader;
    signals.check()?;
    set_up_firmware(loader)?;
    signals.check()?;
    driver::load(loader, settings.drm)?;
    signals.check()?;
    load_peer_memory(loader, settings)?;
    start_daemons(node, settings, signals)?;
    signals.check()?;
    mounts::expose(node, "/", state::ROOT)?;
    label_devices(node);
    state::set_ready(node, settings.config_digest.as_deref())?;
    signals.check()
}

/// The order matters: if the driver is in use and stays loaded, its user space must also stay.
fn stop(node: &Node<'_>) -> Result<(), Error> {
    state::set_not_ready(node)?;
    // The operator's driver manager, which unloads a driver that was in use, does not unload this module.
    node.log.warn_of(unload::unload(node, driver::DRM));
    driver::check_users(node, &daemons::processes(&node.paths))?;
    daemons::stop(node)?;
    driver::unload(node)?;
    FIRMWARE.restore_search_path(node)?;
    mounts::conceal(node, state::ROOT)?;
    state::clear(node)
}

fn set_up_firmware(loader: &Loader<'_>) -> Result<(), Error> {
    let Loader { node, parameters, .. } = loader;
    let parameters = parameters.of("nvidia");
    if parameters.split_whitespace().any(|parameter| parameter == "NVreg_EnableGpuFirmware=0") {
        node.log.step("NVreg_EnableGpuFirmware=0: the GPU's firmware is not set up");
        return Ok(());
    }
    FIRMWARE.provide(node)?;
    // GPUs before Turing need no firmware.
    if let Err(error) = FIRMWARE.set_search_path(node) {
        node.log.warn(format!("continuing without a search path for firmware: {error}"));
    }
    Ok(())
}

/// Loads nvidia_peermem as a best effort, like the operator's own images; `reload_nvidia_peermem` loads it later if
/// this fails.
fn load_peer_memory(loader: &Loader<'_>, settings: &Settings) -> Result<(), Error> {
    let Loader { node, .. } = loader;
    if !settings.rdma {
        return Ok(());
    }
    if !has_mellanox_device(node) {
        node.log.step(
            "GPUDirect RDMA is enabled, but this node has no Mellanox adapter: nvidia_peermem is not loaded",
        );
    } else if !state::is_ofed_ready(node, &Loaded::read(&node.paths)?, settings.host_ofed) {
        node.log.step("OFED is not ready: nvidia_peermem is left to reload_nvidia_peermem");
    } else if let Err(error) = load_if_versions_match(loader, settings) {
        node.log.warn(format!("continuing without nvidia_peermem: {error}"));
        node.log.warn(format!("hint: {}", error.hint()));
    }
    Ok(())
}

/// Loads nvidia_peermem if it was compiled against the loaded OFED. The GPU driver comes from this image, so it need not be
/// compared.
fn load_if_versions_match(loader: &Loader<'_>, settings: &Settings) -> Result<(), Error> {
    let drivers: &[Driver] = if settings.host_ofed { &[] } else { &[Driver::Ofed] };
    versions::check(loader, "nvidia_peermem", drivers)?;
    loader.load("nvidia_peermem").map(drop)
}

fn has_mellanox_device(node: &Node<'_>) -> bool {
    let devices = entries(node.paths.at("/sys/bus/pci/devices"));
    devices.iter().any(|device| text(device.join("vendor")).is_some_and(|vendor| vendor == MELLANOX))
}

/// Starts the optional tools and the fabric manager. Only the fabric manager is essential, for GPUs behind switches.
/// Its failure ends the start, as with the operators' images.
fn start_daemons(node: &Node<'_>, settings: &Settings, signals: &mut dyn Signals) -> Result<(), Error> {
    for result in daemons::start_tools(&node.paths) {
        match result {
            StartResult::Success(name) => node.log.step(format!("started {name}")),
            StartResult::Absent(name) => {
                node.log.step(format!("the image has no {name}, which is not an error"));
            }
            StartResult::Failed(name, error) => node.log.warn(format!("continuing without {name}: {error}")),
        }
    }
    let Some(manager) = daemons::fabric_manager(&node.paths) else { return Ok(()) };
    if manager.is_installed(&node.paths) {
        if manager.needs_infiniband {
            wait_for_infiniband(node, signals)?;
        }
        daemons::configure_fabric_manager(node, &settings.fabric_fields)?;
    }
    match manager.start(&node.paths) {
        StartResult::Success(name) => {
            node.log.step(format!("started {name}"));
            let reset = manager.reset_gpus(&node.paths, &settings.fabric_fields);
            if let Some(StartResult::Failed(name, error)) = reset {
                node.log.warn(format!("continuing without a reset of the GPUs by {name}: {error}"));
            }
        }
        StartResult::Absent(name) => node.log.warn(format!(
            "this node has NVSwitches and the image has no {name}: without a fabric manager CUDA does not start here"
        )),
        StartResult::Failed(name, error) => {
            return Err(Error::new(
                format!("{name} does not start: {error}"),
                "its log is /var/log/fabricmanager.log; its version must be the driver's",
            ));
        }
    }
    Ok(())
}

/// Waits for the modules that the fabric manager of the fifth NVLink generation needs.
fn wait_for_infiniband(node: &Node<'_>, signals: &mut dyn Signals) -> Result<(), Error> {
    let are_loaded = || -> Result<bool, Error> {
        let loaded = Loaded::read(&node.paths)?;
        Ok(loaded.contains("mlx5_core") && loaded.contains("ib_umad"))
    };
    if !are_loaded()? {
        node.log.step("the fabric manager waits for mlx5_core and ib_umad to be loaded");
    }
    while !are_loaded()? {
        signals.check()?;
        node.kernel.pause(POLL_INTERVAL);
    }
    Ok(())
}

fn label_devices(node: &Node<'_>) {
    match selinux::is_enabled(node, HOST_ROOT).then(|| labels::label_devices(node)) {
        None => {}
        Some(Ok(files)) => node.log.step(format!("SELinux: {files} device file(s) labeled for containers")),
        Some(Err(error)) => {
            node.log
                .warn(format!("continuing, though SELinux may keep containers from the devices: {error}"));
        }
    }
}

#[cfg(test)]
mod tests;
