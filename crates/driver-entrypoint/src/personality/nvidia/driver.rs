//! The driver's modules: into the kernel and out of it, in the operators' order.

use std::time::Duration;

use rustix::io::Errno;

use crate::{
    error::Error,
    forecast,
    module_file::Origin,
    modules::{index::Index, load::Loader, loaded::Loaded, unload},
    node::Node,
};

/// Of the host, before the driver, where the node has them.
const HELPERS: [&str; 3] = ["i2c_core", "ipmi_msghandler", "ipmi_devintf"];

/// The driver without which there is nothing.
const NEEDED: [&str; 2] = ["nvidia", "nvidia_uvm"];

/// Comes with the driver, unless the image was built for computing alone.
const MODESET: &str = "nvidia_modeset";

/// Comes when it is asked for.
const DRM: &str = "nvidia_drm";

/// Out of the kernel, in this order. `nv_peer_mem`, `nvidia_fs` and `gdrdrv` have containers of their own, which nothing else would
/// end; `nvidia_drm` is not loaded by us, but may be there from the host's driver.
const UNLOADED: [&str; 8] = [
    "nvidia_drm",
    "nvidia_modeset",
    "nvidia_uvm",
    "nvidia_peermem",
    "nv_peer_mem",
    "nvidia_fs",
    "gdrdrv",
    "nvidia",
];

/// References of a process that has just ended are given back after moments.
const LOOKS: u32 = 10;
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// Trees to load from: this image, `more`, and the host. The operator's DaemonSet does not mount the host's
/// modules, but it shares the host's processes (`hostPID`), and the first of them shows the host's root.
pub(crate) fn index(node: &Node<'_>, more: Option<&str>) -> Result<Index, Error> {
    let release = node.kernel.release();
    let mut trees = vec![(Origin::Image, node.paths.image_modules(&release))];
    trees.extend(more.map(|tree| (Origin::Host, node.paths.at(tree).join(&release))));
    trees.push((Origin::Host, node.paths.host_modules(&release)));
    // Without hostPID it shows our own root, or none to look at.
    let hosts = node.paths.at("/proc/1/root/lib/modules").join(&release);
    if hosts.is_dir() {
        trees.push((Origin::Host, hosts));
    }
    Index::read(&release, &trees)
}

/// Is the driver loaded that this image has? One of other sources, under the same configuration, is not.
pub(crate) fn is_loaded(node: &Node<'_>, index: &Index) -> Result<bool, Error> {
    let loaded = Loaded::read(&node.paths)?;
    let Some(file) = index.of_image("nvidia").filter(|_| loaded.contains("nvidia")) else { return Ok(false) };
    let info = file.info()?;
    // What nothing is known of counts as the same: the operator's digest says so.
    Ok(info.identity().is_none() || loaded.is(&node.paths, "nvidia", &info))
}

/// Is everything there that the driver needs? An image for another kernel, or one whose modules are broken, must not
/// cost the node the driver that it has.
pub(crate) fn check(loader: &Loader<'_>, drm: bool) -> Result<(), Error> {
    let staying = Loaded::read(&loader.node.paths)?.without(&UNLOADED.map(str::to_owned));
    if let Some(name) = NEEDED.into_iter().find(|name| loader.index.of_image(name).is_none()) {
        return Err(loader.index.missing(name, None));
    }
    wanted(loader, drm).into_iter().try_for_each(|name| loader.plan(name, &staying).map(drop))
}

/// Loads the driver; what is loaded already stays as it is.
pub(crate) fn load(loader: &Loader<'_>, drm: bool) -> Result<(), Error> {
    let Loader { node, index, .. } = loader;
    for name in HELPERS {
        if !index.has(name) {
            node.log.step(format!("{name} is not there, which is no obstacle"));
        } else if let Err(error) = loader.load(name) {
            node.log.warn(format!("go on without {name}: {error}"));
        }
    }
    for name in wanted(loader, drm) {
        loader.load(name).map_err(|error| explain(node, error))?;
    }
    if index.of_image(MODESET).is_none() {
        node.log.step("the image has no nvidia_modeset, which computing does not need");
    }
    Ok(())
}

/// The driver's modules, in the order in which they are loaded.
fn wanted(loader: &Loader<'_>, drm: bool) -> Vec<&'static str> {
    let mut names = NEEDED.to_vec();
    names.extend(loader.index.of_image(MODESET).map(|_| MODESET));
    names.extend(drm.then_some(DRM));
    names
}

/// The kernel's words do not say what an administrator of GPUs wants to know.
fn explain(node: &Node<'_>, error: Error) -> Error {
    let refusal = match error {
        Error::Refused { name, refusal, .. } if name == "nvidia" && refusal.errno == Errno::NODEV => refusal,
        other => return other,
    };
    let loaded = Loaded::read(&node.paths).unwrap_or_default();
    let rivals = ["nouveau", "nova_core", "nova_drm", "vfio_pci"];
    let rivals: Vec<&str> = rivals.into_iter().filter(|name| loaded.contains(name)).collect();
    let hint = if rivals.is_empty() {
        "look whether the node has an NVIDIA GPU that this driver supports (lspci -d 10de:), and whether its \
         firmware, or the hypervisor, shows it; the kernel's messages follow in dmesg"
            .to_owned()
    } else {
        format!(
            "{} is loaded and may hold the GPU: unload it, or put it on the node's blacklist, and start again",
            rivals.join(" and ")
        )
    };
    Error::new(format!("no NVIDIA GPU was found by the driver (ENODEV){refusal}"), hint)
}

/// Unloads the driver, all of it or nothing: who holds a part of it keeps the whole.
pub(crate) fn unload(node: &Node<'_>) -> Result<(), Error> {
    forecast::announce(node, &UNLOADED)?;
    let mut looks = 1;
    let obstacles = loop {
        let obstacles = obstacles(node, &Loaded::read(&node.paths)?);
        if obstacles.is_empty() || looks == LOOKS {
            break obstacles;
        }
        looks += 1;
        node.kernel.pause(BETWEEN_LOOKS);
    };
    if !obstacles.is_empty() {
        let obstacles: Vec<String> = obstacles.iter().map(Error::to_string).collect();
        return Err(Error::new(
            format!("the NVIDIA driver is in use and stays loaded: {}", obstacles.join("; ")),
            "end the pods and processes that use the GPUs, or drain the node; the pod then starts again",
        ));
    }
    if unload::unload_all(node, &UNLOADED)?.is_empty() {
        node.log.step("no NVIDIA driver is loaded");
    }
    Ok(())
}

/// Who keeps the driver's modules from going, each for itself.
fn obstacles(node: &Node<'_>, loaded: &Loaded) -> Vec<Error> {
    let mut obstacles = Vec::new();
    for name in UNLOADED {
        let Some(module) = loaded.get(name) else { continue };
        let others = module.holders.iter().filter(|holder| !UNLOADED.contains(&holder.as_str()));
        let by: Vec<String> = others.cloned().collect();
        if !by.is_empty() {
            obstacles.push(Error::Held { name: name.to_owned(), by });
        }
        obstacles.extend(unload::in_use(node, loaded, name));
    }
    obstacles
}
