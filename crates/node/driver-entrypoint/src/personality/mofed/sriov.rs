//! Saves and restores the state of `mlx5_core` devices across a reload of the driver:
//!
//! - devlink parameters
//! - virtual functions, addresses, MTU, and whether interfaces are up
//! - switchdev mode, with the representors' MTU and whether they are up
//! - what is attached to the interface of a device, where no network manager restores it (see [`links`])
//!
//! Two settings cannot always be restored; the log then says so. The in-tree driver has no file for the addresses that a
//! physical function assigns to its virtual functions; only OFED has one. Switchdev mode needs OFED's file or devlink.
//! Names of representors, and their membership in bridges, are left to the host's udev and network manager.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

mod links;
mod lost;
mod restore;

use links::Link;
use restore::Restoring;

use super::devlink::{Devlink, Parameter, set_by_users};
use crate::{
    error::Error,
    files::{self, entries, text},
    node::Node,
};

/// Polling interval while a device comes up.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Polls per second.
const POLLS_PER_SECOND: u32 = 10;

/// Saved state of a node's devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// Identifies the load of the driver that this state was read from; see [`load_of`].
    load: u64,
    /// Devlink parameters, sorted by device.
    parameters: Vec<Parameter>,
    physical: Vec<Physical>,
}

/// A physical function and its virtual functions.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Physical {
    /// Device name in devlink, for example `pci/0000:08:00.0`.
    device: String,
    up: bool,
    /// `-` without an interface: InfiniBand without IPoIB, or an interface in a pod's network namespace.
    mtu: String,
    switchdev: bool,
    /// Value of `sriov_numvfs`.
    number: usize,
    functions: Vec<Virtual>,
    representors: Vec<Representor>,
    links: Vec<Link>,
}

/// Network interface that represents a virtual function on the host's side of the switch.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Representor {
    /// `phys_port_name`, for example `pf0vf3`; unlike the interface's name it is stable across a reload.
    port: String,
    up: bool,
    mtu: String,
}

/// State of a virtual function.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Virtual {
    pci: String,
    up: bool,
    /// Each of these is `-` if the function does not have it, for example because it is bound to another driver.
    mtu: String,
    mac: String,
    guid: String,
    /// Name of another driver, such as `vfio-pci`; `-` for none and for `mlx5_core`.
    driver: String,
}

impl State {
    /// Reads the current state. `fresh` is the file with the parameters recorded when this driver was loaded.
    pub(crate) fn read(node: &Node<'_>, fresh: &str) -> Self {
        let devlink = Devlink::of(node);
        let devices = devices(node);
        let physical = |device: &String| {
            let path = path_of(node, device);
            let interface = uplink(&path);
            let number = text(path.join("sriov_numvfs")).and_then(|number| number.parse().ok());
            let number = number.unwrap_or_default();
            let representors = interface.iter().flat_map(|interface| representors(node, interface));
            let representors: Vec<Representor> = representors.map(|(_, found)| found).collect();
            // mlx5 has a switch ID in legacy mode, too (since Linux 5.10), but representors only in switchdev mode.
            let mode = devlink.as_ref().and_then(|devlink| devlink.is_switchdev(device));
            let attribute = |name: &str| interface.as_ref().and_then(|path| text(path.join(name)));
            let compat = || attribute("compat/devlink/mode").map(|mode| mode == "switchdev");
            Physical {
                device: device.clone(),
                up: interface.as_deref().is_some_and(is_up),
                mtu: attribute("mtu").unwrap_or_else(none),
                switchdev: mode.or_else(compat).unwrap_or(!representors.is_empty()),
                number,
                functions: (0..number).filter_map(|index| virtual_function(&path, index)).collect(),
                representors,
                links: interface.map(|interface| links::read(node, &interface)).unwrap_or_default(),
            }
        };
        let physical = devices.iter().map(physical).collect();
        let parameters = devlink.map(|devlink| devlink.parameters(&devices)).unwrap_or_default();
        let load = load_of(node);
        let fresh =
            text(node.paths.at(fresh)).map(|text| Self::parse(&text)).filter(|fresh| fresh.load == load);
        let parameters = set_by_users(parameters, &fresh.unwrap_or_default().parameters);
        Self { load, parameters, physical }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.physical.is_empty() && self.parameters.is_empty()
    }

    /// Summary for the log.
    pub(crate) fn summary(&self) -> String {
        let functions: usize = self.physical.iter().map(|physical| physical.number).sum();
        let (devices, parameters) = (self.physical.len(), self.parameters.len());
        format!("{devices} device(s), {functions} virtual function(s), {parameters} devlink parameter(s)")
    }

    /// Lists settings of the devices that are lost with the driver.
    pub(crate) fn lost(node: &Node<'_>) -> Vec<String> {
        lost::list(node)
    }

    /// Saves the state on the node, so that it survives if the container is killed while no driver is loaded.
    pub(crate) fn keep(&self, node: &Node<'_>, path: &str) -> Result<(), Error> {
        files::write(node, path, &self.to_text())
    }

    /// Reads the state saved by this container or an earlier one.
    pub(crate) fn found(node: &Node<'_>, path: &str) -> Option<Self> {
        text(node.paths.at(path)).map(|text| Self::parse(&text)).filter(|state| !state.is_empty())
    }

    /// Reads the state saved by an earlier container that was killed or could not restore it. If the driver has not
    /// been unloaded since, the saved state is ignored: users may have changed the devices.
    pub(crate) fn kept(node: &Node<'_>, path: &str) -> Option<Self> {
        Self::found(node, path).filter(|state| state.load != load_of(node))
    }

    fn to_text(&self) -> String {
        let mut lines = vec![format!("load {}\n", self.load)];
        lines.extend(self.parameters.iter().map(Parameter::to_line));
        for Physical { device, up, mtu, switchdev, number, functions, representors, links } in &self.physical
        {
            lines.push(format!("physical {device} {up} {mtu} {switchdev} {number}\n"));
            lines.extend(links.iter().map(Link::to_line));
            for Virtual { pci, up, mtu, mac, guid, driver } in functions {
                lines.push(format!("virtual {pci} {up} {mtu} {mac} {guid} {driver}\n"));
            }
            for Representor { port, up, mtu } in representors {
                lines.push(format!("representor {port} {up} {mtu}\n"));
            }
        }
        lines.concat()
    }

    fn parse(text: &str) -> Self {
        let mut state = Self::default();
        for line in text.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            match (fields.as_slice(), state.physical.last_mut()) {
                (["load", load], _) => state.load = load.parse().unwrap_or_default(),
                (["physical", device, up, mtu, switchdev, number], _) if is_device(device) => {
                    state.physical.push(Physical {
                        device: (*device).to_owned(),
                        up: *up == "true",
                        mtu: (*mtu).to_owned(),
                        switchdev: *switchdev == "true",
                        number: number.parse().unwrap_or_default(),
                        functions: Vec::new(),
                        representors: Vec::new(),
                        links: Vec::new(),
                    });
                }
                (["link", link @ ..], Some(physical)) => physical.links.extend(Link::of_fields(link)),
                (["representor", port, up, mtu], Some(physical)) => physical.representors.push(Representor {
                    port: (*port).to_owned(),
                    up: *up == "true",
                    mtu: (*mtu).to_owned(),
                }),
                (["virtual", pci, up, mtu, mac, guid, driver @ ..], Some(physical)) if is_pci(pci) => {
                    physical.functions.push(Virtual {
                        pci: (*pci).to_owned(),
                        up: *up == "true",
                        mtu: (*mtu).to_owned(),
                        mac: (*mac).to_owned(),
                        guid: (*guid).to_owned(),
                        // A container of an earlier version did not save it.
                        driver: driver.first().map_or_else(none, |driver| (*driver).to_owned()),
                    });
                }
                (fields, _) => state.parameters.extend(Parameter::of_fields(fields)),
            }
        }
        state
    }

    /// Restores the state after a reload. Failures are logged and the rest continues: a partly restored network is
    /// better than none. The parameters that the devices have before are recorded in the file `fresh`.
    pub(crate) fn restore(&self, node: &Node<'_>, wait_seconds: u32, fresh: &str) {
        let restore = Restoring { node, polls: wait_seconds * POLLS_PER_SECOND, devlink: Devlink::of(node) };
        // The driver was not unloaded; only interfaces that other modules created on its devices are gone.
        if self.load != 0 && self.load == load_of(node) {
            for physical in &self.physical {
                restore.interfaces(physical);
            }
            return;
        }
        // Before virtual functions are created: a device that is reinitialized for its parameters loses them.
        match &restore.devlink {
            Some(devlink) => {
                let mut parameters = devlink.parameters(&devices(node));
                for parameter in &mut parameters {
                    // Also if this driver has the same value by default: the next driver may have another default.
                    parameter.set =
                        self.parameters.iter().any(|wanted| wanted.set && wanted.is_of(parameter));
                }
                let came_with = Self { load: load_of(node), parameters, physical: Vec::new() };
                node.log.warn_of(came_with.keep(node, fresh));
                devlink.restore(&self.parameters);
            }
            None if self.parameters.is_empty() => {}
            None => node.log.warn("this image has no devlink: parameters of devices are not restored"),
        }
        for physical in &self.physical {
            restore.physical(physical);
        }
        // All functions of a card share one switch, so its representors appear only after all of its functions are
        // restored.
        for Physical { device, representors, .. } in
            self.physical.iter().filter(|physical| !physical.representors.is_empty())
        {
            if let Some(interface) = restore.interface(device) {
                restore.representors(&interface, representors);
            }
        }
    }
}

/// Lists the physical functions bound to the driver by their devlink names, sorted. Virtual functions are created again
/// when their physical function is restored.
fn devices(node: &Node<'_>) -> Vec<String> {
    let name = |path: &Path| Some(path.file_name()?.to_str()?.to_owned());
    let of_bus = |bus: PathBuf| {
        let found = entries(bus.join("drivers/mlx5_core")).into_iter();
        let found = found.filter(|entry| entry.is_dir() && !entry.ends_with("module"));
        let found = found.filter(|device| !device.join("physfn").exists()).collect::<Vec<_>>();
        found.into_iter().filter_map(move |device| Some(format!("{}/{}", name(&bus)?, name(&device)?)))
    };
    entries(node.paths.at("/sys/bus")).into_iter().flat_map(of_bus).collect()
}

/// Path in sysfs of a device by its devlink name.
fn path_of(node: &Node<'_>, device: &str) -> PathBuf {
    let (bus, name) = device.split_once('/').unwrap_or(("pci", device));
    node.paths.at("/sys/bus").join(bus).join("devices").join(name)
}

/// Finds the interface of the function itself. Representors of other functions are below the same device; their port
/// names contain `pf`, such as `pf0vf3` and `c1pf0sf2`.
fn uplink(device: &Path) -> Option<PathBuf> {
    let stands_for_another =
        |path: &PathBuf| text(path.join("phys_port_name")).is_some_and(|name| name.contains("pf"));
    entries(device.join("net")).into_iter().find(|interface| !stands_for_another(interface))
}

/// Identifies the current load of the driver; 0 if it is not loaded. The number is the inode of the module's directory,
/// because sysfs does not reuse inode numbers.
fn load_of(node: &Node<'_>) -> u64 {
    fs::metadata(node.paths.at("/sys/module/mlx5_core")).map(|module| module.ino()).unwrap_or_default()
}

/// Finds the representors on the switch of a physical function's interface, with their paths.
fn representors(node: &Node<'_>, interface: &Path) -> Vec<(PathBuf, Representor)> {
    let Some(switch) = text(interface.join("phys_switch_id")).filter(|id| !id.is_empty()) else {
        return Vec::new();
    };
    let representor = |path: PathBuf| {
        let port = text(path.join("phys_port_name")).filter(|name| name.contains("vf"))?;
        let mtu = text(path.join("mtu"))?;
        let is_ours = text(path.join("phys_switch_id")).as_ref() == Some(&switch);
        let up = is_up(&path);
        is_ours.then_some((path, Representor { port, up, mtu }))
    };
    entries(node.paths.at("/sys/class/net")).into_iter().filter_map(representor).collect()
}

fn virtual_function(device: &Path, index: usize) -> Option<Virtual> {
    let function = device.join(format!("virtfn{index}"));
    let pci = target(&function)?;
    let interface = entries(function.join("net")).into_iter().next();
    let attribute =
        |name: &str| interface.as_ref().and_then(|path| text(path.join(name))).unwrap_or_else(none);
    let guid = entries(function.join("infiniband")).first().and_then(|path| text(path.join("node_guid")));
    Some(Virtual {
        pci,
        up: interface.as_deref().is_some_and(is_up),
        mtu: attribute("mtu"),
        mac: Some(attribute("address")).filter(|mac| mac.len() == 17).unwrap_or_else(none),
        guid: guid.map_or_else(none, |guid| with_colons(&guid)),
        driver: target(&function.join("driver")).filter(|driver| driver != "mlx5_core").unwrap_or_else(none),
    })
}

/// Converts a GUID from the format that sysfs shows, `0011:2233:4455:6677`, to the format that it accepts,
/// `00:11:22:33:44:55:66:77`.
fn with_colons(guid: &str) -> String {
    let digits: Vec<char> = guid.chars().filter(char::is_ascii_hexdigit).collect();
    let pairs: Vec<String> = digits.chunks(2).map(|pair| pair.iter().collect()).collect();
    pairs.join(":")
}

fn is_device(text: &str) -> bool {
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphanumeric())
            && name.chars().all(|c| c.is_ascii_alphanumeric() || ":._-".contains(c))
    };
    text.split_once('/').is_some_and(|(bus, name)| is_name(bus) && is_name(name))
}

fn is_pci(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_hexdigit() || c == ':' || c == '.')
}

/// Reads the interface flags; `IFF_UP` is bit 0 (`include/uapi/linux/if.h`).
fn flags(interface: &Path) -> u32 {
    let flags = text(interface.join("flags")).unwrap_or_default();
    u32::from_str_radix(flags.trim_start_matches("0x"), 16).unwrap_or_default()
}

fn is_up(interface: &Path) -> bool {
    flags(interface) & 1 != 0
}

fn none() -> String {
    "-".to_owned()
}

/// Last component of a symlink's target.
fn target(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests;
