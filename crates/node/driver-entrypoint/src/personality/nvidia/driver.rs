//! Loads and unloads the driver's modules, in the operators' order.

use std::{path::PathBuf, time::Duration};

use rustix::io::Errno;

use super::options::Settings;
use crate::{
    devices,
    error::Error,
    files::name_of,
    forecast,
    module_file::{ModuleFile, Origin, kernel_name},
    modules::{index::Index, load::Loader, loaded::Loaded, parameters::Parameters, unload},
    node::Node,
};

/// Modules of the host to load before the driver, if the node has them.
const HOST_HELPERS: [&str; 3] = ["i2c_core", "ipmi_msghandler", "ipmi_devintf"];

/// Modules that every driver image must have.
const REQUIRED: [&str; 2] = ["nvidia", "nvidia_uvm"];

/// Loaded with the driver, unless the image was built for compute only.
const MODESET: &str = "nvidia_modeset";

/// Loaded only on request.
pub(crate) const DRM: &str = "nvidia_drm";

/// Modules to unload, in this order. `nv_peer_mem`, `nvidia_fs` and `gdrdrv` have separate containers, which nothing
/// else would stop. `nvidia_drm` may have been loaded by the host's driver.
const UNLOAD_ORDER: [&str; 8] = [
    "nvidia_drm",
    "nvidia_modeset",
    "nvidia_uvm",
    "nvidia_peermem",
    "nv_peer_mem",
    "nvidia_fs",
    "gdrdrv",
    "nvidia",
];

/// Polls while the driver is in use: references of a process that has just ended are dropped after a short delay.
const MAX_POLLS: u32 = 10;
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Indexes the modules of this image, of the tree `extra_tree`, and of the host. The operator's DaemonSet does not mount the
/// host's modules. It does share the host's PID namespace (`hostPID`), so the root of process 1 is the host's root.
pub(crate) fn index(node: &Node<'_>, extra_tree: Option<&str>) -> Result<Index, Error> {
    let release = node.kernel.release();
    let mut trees = vec![(Origin::Image, node.paths.image_modules(&release))];
    trees.extend(extra_tree.map(|tree| (Origin::Host, node.paths.at(tree).join(&release))));
    trees.push((Origin::Host, node.paths.host_modules(&release)));
    // Without hostPID this is the container's own root, or it does not exist.
    let host_tree = node.paths.at("/proc/1/root/lib/modules").join(&release);
    if host_tree.is_dir() {
        trees.push((Origin::Host, host_tree));
    }
    Index::read(&release, &trees)
}

/// Whether the loaded driver is the image's own build. Returns false for a driver that was built from other sources, even with
/// the same configuration.
pub(crate) fn is_loaded(node: &Node<'_>, index: &Index) -> Result<bool, Error> {
    let loaded = Loaded::read(&node.paths)?;
    let Some(file) = index.image_file("nvidia").filter(|_| loaded.contains("nvidia")) else {
        return Ok(false);
    };
    let info = file.info()?;
    // Modules without an identity count as the same, because the operator's digest has not changed.
    Ok(info.identity().is_none() || loaded.matches_file(&node.paths, "nvidia", &info))
}

/// Parameter by which the memory of coherent GPUs (GH200, GB200) stays with the driver. By default, drivers since 580 make it memory
/// of the node, and the kubelet counts it. The operators' images set it, too.
const COHERENT_MEMORY: (&str, &str) = ("NVreg_CoherentGPUMemoryMode", "driver");

/// Returns the parameters of the driver's modules, with this image's defaults. Warns if the operator asks for other modules.
pub(crate) fn parameters(node: &Node<'_>, index: &Index, settings: &Settings) -> Result<Parameters, Error> {
    let mut parameters = Parameters::read(&node.paths);
    let Some(info) = index.image_file("nvidia").map(ModuleFile::info).transpose()? else {
        return Ok(parameters);
    };
    let (name, value) = COHERENT_MEMORY;
    if info.parameters.iter().any(|parameter| parameter == name) {
        parameters.add_default("nvidia", &format!("{name}={value}"));
    }
    let is_open = info.license.contains("GPL");
    if settings.open_modules.is_some_and(|open| open != is_open) {
        let (asked, own) = if is_open { ("proprietary", "open") } else { ("open", "proprietary") };
        node.log.warn(format!(
            "kernelModuleType is {asked}, and this image has the {own} modules, which are used: name the image with the \
             {asked} ones, or set kernelModuleType to {own}"
        ));
    }
    Ok(parameters)
}

/// Checks that everything the driver needs exists. An image for another kernel, or one with broken modules, must not
/// make the node lose its current driver.
pub(crate) fn check(loader: &Loader<'_>, drm: bool) -> Result<(), Error> {
    let staying = Loaded::read(&loader.node.paths)?.without(&UNLOAD_ORDER.map(str::to_owned));
    if let Some(name) = REQUIRED.into_iter().find(|name| loader.index.image_file(name).is_none()) {
        return Err(loader.index.missing_error(name, None));
    }
    modules_to_load(loader, drm).into_iter().try_for_each(|name| loader.plan(name, &staying).map(drop))
}

/// Other drivers of GPUs.
const OTHER_DRIVERS: [&str; 4] = ["nouveau", "nova_core", "nova_drm", "vfio_pci"];

/// Checks, before the old driver is unloaded, that at least one GPU is held by no other driver.
pub(crate) fn check_gpus(node: &Node<'_>) -> Result<(), Error> {
    let gpus = devices::gpus(&node.paths);
    let describe_holder = |gpu: &PathBuf| {
        let is_other = |driver: &String| OTHER_DRIVERS.contains(&kernel_name(driver).as_str());
        let driver = devices::driver(gpu).filter(is_other)?;
        Some(format!("{} is bound to {driver}", name_of(gpu)))
    };
    let held_gpus: Vec<String> = gpus.iter().filter_map(describe_holder).collect();
    if held_gpus.is_empty() {
        return Ok(());
    }
    let list = held_gpus.join(", ");
    if held_gpus.len() < gpus.len() {
        node.log.warn(format!("other drivers hold some of the GPUs: {list}"));
        return Ok(());
    }
    Err(Error::new(
        format!("no GPU is left for this driver: {list}"),
        "put that driver on the node's blacklist and reboot, or unbind it (echo ADDRESS > \
         /sys/bus/pci/drivers/DRIVER/unbind), and start again",
    ))
}

/// Loads the driver; modules that are already loaded are kept.
pub(crate) fn load(loader: &Loader<'_>, drm: bool) -> Result<(), Error> {
    let Loader { node, index, .. } = loader;
    for name in HOST_HELPERS {
        if !index.has(name) {
            node.log.step(format!("{name} is not installed, which is not an error"));
        } else if let Err(error) = loader.load(name) {
            node.log.warn(format!("continuing without {name}: {error}"));
        }
    }
    for name in modules_to_load(loader, drm) {
        loader.load(name).map_err(|error| explain_missing_gpu(node, error))?;
    }
    if index.image_file(MODESET).is_none() {
        node.log.step("the image has no nvidia_modeset, which compute workloads do not need");
    }
    Ok(())
}

/// Lists the driver's modules in load order.
fn modules_to_load(loader: &Loader<'_>, drm: bool) -> Vec<&'static str> {
    let mut names = REQUIRED.to_vec();
    names.extend(loader.index.image_file(MODESET).map(|_| MODESET));
    names.extend(drm.then_some(DRM));
    names
}

/// Replaces the kernel's error `ENODEV` with one that has a hint.
fn explain_missing_gpu(node: &Node<'_>, error: Error) -> Error {
    let refusal = match error {
        Error::Refused { name, refusal, .. } if name == "nvidia" && refusal.errno == Errno::NODEV => refusal,
        other => return other,
    };
    let loaded = Loaded::read(&node.paths).unwrap_or_default();
    let others: Vec<&str> = OTHER_DRIVERS.into_iter().filter(|name| loaded.contains(name)).collect();
    let hint = if others.is_empty() {
        "check that the node has an NVIDIA GPU that this driver supports (lspci -d 10de:; the open modules: \
         Turing and newer), and that its firmware or the hypervisor exposes it; see dmesg for the kernel's messages"
            .to_owned()
    } else {
        format!(
            "{} is loaded and may hold the GPU: unload it, or put it on the node's blacklist, and start again",
            others.join(" and ")
        )
    };
    Error::new(format!("no NVIDIA GPU was found by the driver (ENODEV){refusal}"), hint)
}

/// Unloads the driver completely or not at all: a user of any module keeps all modules loaded.
pub(crate) fn unload(node: &Node<'_>) -> Result<(), Error> {
    // A GPU has neither interfaces nor storage: the forecast only names its users.
    forecast::announce(node, &UNLOAD_ORDER, &[])?;
    check_users(node, &[])?;
    if unload::unload_all(node, &UNLOAD_ORDER)?.is_empty() {
        node.log.step("no NVIDIA driver is loaded");
    }
    Ok(())
}

/// Fails if anything besides these daemons uses the driver. A stop of the fabric manager aborts the work of all processes on the
/// GPUs, so this check comes before it.
pub(crate) fn check_users(node: &Node<'_>, daemons: &[u32]) -> Result<(), Error> {
    let mut obstacles = Ok(Vec::new());
    node.poll(MAX_POLLS, POLL_INTERVAL, || {
        obstacles = Loaded::read(&node.paths).map(|loaded| find_obstacles(node, &loaded, daemons));
        obstacles.as_ref().map_or(true, Vec::is_empty)
    });
    let obstacles = obstacles?;
    if obstacles.is_empty() {
        return Ok(());
    }
    Err(Error::new(
        format!("the NVIDIA driver is in use and stays loaded: {}", obstacles.join("; ")),
        "stop the pods and processes that use the GPUs, or drain the node; the pod then restarts",
    ))
}

/// Lists the obstacles to the unload of the driver's modules after the stop of these daemons.
fn find_obstacles(node: &Node<'_>, loaded: &Loaded, daemons: &[u32]) -> Vec<String> {
    let mut obstacles = Vec::new();
    for name in UNLOAD_ORDER {
        let Some(module) = loaded.get(name) else { continue };
        let others = module.holders.iter().filter(|holder| !UNLOAD_ORDER.contains(&holder.as_str()));
        let users: Vec<String> = others.cloned().collect();
        if !users.is_empty() {
            obstacles.push(Error::Held { name: name.to_owned(), users }.to_string());
        }
        let in_use = unload::in_use(node, loaded, name).filter(|error| !is_of_daemons(error, daemons));
        obstacles.extend(in_use.map(|error| error.to_string()));
    }
    obstacles
}

/// Whether all references may be those of the daemons.
fn is_of_daemons(error: &Error, daemons: &[u32]) -> bool {
    let Error::InUse { users, .. } = error else { return false };
    !daemons.is_empty() && users.iter().all(|user| daemons.contains(&user.id))
}
