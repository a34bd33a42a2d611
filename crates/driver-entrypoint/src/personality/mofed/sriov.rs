//! Saves and restores the state of `mlx5_core` devices across a reload of the driver:
//!
//! - devlink parameters
//! - virtual functions, addresses, MTU, and whether interfaces are up
//! - switchdev mode, with the representors' MTU and whether they are up
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

use super::devlink::{Devlink, Parameter, set_by_people};
use crate::{
    error::Error,
    files::{self, entries, text},
    node::Node,
};

/// Polling interval while a device comes up.
const LOOK: Duration = Duration::from_millis(100);
/// Polls per second.
const LOOKS: u32 = 10;

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
            }
        };
        let physical = devices.iter().map(physical).collect();
        let parameters = devlink.map(|devlink| devlink.parameters(&devices)).unwrap_or_default();
        let load = load_of(node);
        let fresh =
            text(node.paths.at(fresh)).map(|text| Self::parse(&text)).filter(|fresh| fresh.load == load);
        let parameters = set_by_people(parameters, &fresh.unwrap_or_default().parameters);
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
        for Physical { device, up, mtu, switchdev, number, functions, representors } in &self.physical {
            lines.push(format!("physical {device} {up} {mtu} {switchdev} {number}\n"));
            for Virtual { pci, up, mtu, mac, guid } in functions {
                lines.push(format!("virtual {pci} {up} {mtu} {mac} {guid}\n"));
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
                    });
                }
                (["representor", port, up, mtu], Some(physical)) => physical.representors.push(Representor {
                    port: (*port).to_owned(),
                    up: *up == "true",
                    mtu: (*mtu).to_owned(),
                }),
                (["virtual", pci, up, mtu, mac, guid], Some(physical)) if is_pci(pci) => {
                    physical.functions.push(Virtual {
                        pci: (*pci).to_owned(),
                        up: *up == "true",
                        mtu: (*mtu).to_owned(),
                        mac: (*mac).to_owned(),
                        guid: (*guid).to_owned(),
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
        let restoring = Restoring { node, looks: wait_seconds * LOOKS, devlink: Devlink::of(node) };
        // The driver was not unloaded; only interfaces that other modules created on its devices are gone.
        if self.load != 0 && self.load == load_of(node) {
            for physical in &self.physical {
                restoring.interfaces(physical);
            }
            return;
        }
        // Before virtual functions are created: a device that is reinitialized for its parameters loses them.
        match &restoring.devlink {
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
            restoring.physical(physical);
        }
        // All functions of a card share one switch, so its representors appear only after all of its functions are
        // restored.
        for Physical { device, representors, .. } in
            self.physical.iter().filter(|physical| !physical.representors.is_empty())
        {
            if let Some(interface) = restoring.interface(device) {
                restoring.representors(&interface, representors);
            }
        }
    }
}

struct Restoring<'a> {
    node: &'a Node<'a>,
    looks: u32,
    devlink: Option<Devlink<'a>>,
}

impl Restoring<'_> {
    fn physical(&self, physical: &Physical) {
        let Physical { device, switchdev, number, functions, .. } = physical;
        let path = path_of(self.node, device);
        let wanted = number.to_string();
        // Virtual functions that were created in the meantime stay.
        if *number > 0 && text(path.join("sriov_numvfs")).as_ref() != Some(&wanted) {
            self.set(&path.join("sriov_numvfs"), &wanted);
        }
        let mut addressed = true;
        for (index, function) in functions.iter().enumerate() {
            addressed &= self.address(&path, index, function);
            self.bind(&function.pci, "unbind");
            if !switchdev {
                self.bind(&function.pci, "bind");
            }
        }
        if !addressed {
            self.node.log.warn(format!(
                "{device}: this driver has no files for the addresses of virtual functions; they keep those that they have now"
            ));
        }
        if *switchdev {
            self.switchdev(physical);
            for function in functions {
                self.bind(&function.pci, "bind");
            }
        }
        self.interfaces(physical);
        self.node.log.step(format!("restored {device} with {number} virtual function(s)"));
    }

    /// Restores MTU and up state of the interfaces of a device and of its virtual functions.
    fn interfaces(&self, physical: &Physical) {
        let Physical { device, up, mtu, functions, .. } = physical;
        for function in functions.iter().filter(|function| function.mtu != "-") {
            let Some(interface) = self.interface(&format!("pci/{}", function.pci)) else {
                self.node.log.warn(format!("virtual function {} has no network interface", function.pci));
                continue;
            };
            self.set(&interface.join("mtu"), &function.mtu);
            self.bring_up(&interface, function.up);
        }
        if mtu == "-" {
            return;
        }
        let Some(interface) = self.interface(device) else {
            self.node
                .log
                .warn(format!("{device} has no network interface: its MTU and state are not restored"));
            return;
        };
        self.set(&interface.join("mtu"), mtu);
        self.bring_up(&interface, *up);
    }

    /// Writes OFED's files `sriov/<index>/{mac,node,port}`; returns whether all needed files exist.
    fn address(&self, device: &Path, index: usize, function: &Virtual) -> bool {
        let directory = device.join(format!("sriov/{index}"));
        let guid = Some(function.guid.as_str())
            .filter(|guid| *guid != "-" && !guid.chars().all(|c| "0:".contains(c)));
        let mac = Some(function.mac.as_str()).filter(|mac| *mac != "-");
        let values = [("mac", mac), ("node", guid), ("port", guid)];
        let mut all = true;
        for (file, value) in values {
            let Some(value) = value else { continue };
            let path = directory.join(file);
            // The node and port GUIDs of an Ethernet device are not essential.
            if path.exists() { self.set(&path, value) } else { all &= file != "mac" }
        }
        all
    }

    fn switchdev(&self, physical: &Physical) {
        let Physical { device, mtu, .. } = physical;
        let interface = if mtu == "-" { None } else { self.interface(device) };
        let mode = interface.map(|interface| interface.join("compat/devlink/mode"));
        if let Some(mode) = mode.filter(|mode| mode.exists()) {
            self.set(&mode, "switchdev");
        } else if !self.devlink.as_ref().is_some_and(|devlink| devlink.switchdev(device)) {
            self.node.log.warn(format!(
                "{device} was in switchdev mode, and is in legacy mode now: devlink dev eswitch set {device} mode switchdev"
            ));
        }
    }

    /// Restores the representors. They appear after the change to switchdev mode, one for each function.
    fn representors(&self, interface: &Path, wanted: &[Representor]) {
        let mut found = representors(self.node, interface);
        for _ in 0..self.looks {
            if found.len() >= wanted.len() && found.iter().all(|(path, _)| self.is_named(path)) {
                break;
            }
            self.node.kernel.pause(LOOK);
            found = representors(self.node, interface);
        }
        for Representor { port, up, mtu } in wanted {
            match found.iter().find(|(_, found)| found.port == *port) {
                Some((path, _)) => {
                    self.set(&path.join("mtu"), mtu);
                    self.bring_up(path, *up);
                }
                None => self.node.log.warn(format!("no interface appeared for {port}")),
            }
        }
    }

    fn bind(&self, pci: &str, file: &str) {
        let bound = path_of(self.node, &format!("pci/{pci}")).join("driver");
        let driver = target(&bound).unwrap_or_else(|| "mlx5_core".to_owned());
        // A function that is bound to another driver, for example for a virtual machine, is left to that driver.
        if driver == "mlx5_core" && (file == "bind" || bound.exists()) {
            self.set(&self.node.paths.at(&format!("/sys/bus/pci/drivers/{driver}/{file}")), pci);
        }
    }

    fn bring_up(&self, interface: &Path, up: bool) {
        let flags = flags(interface);
        let wanted = if up { flags | 1 } else { flags & !1 };
        if wanted != flags {
            self.set(&interface.join("flags"), &format!("{wanted:#x}"));
        }
    }

    /// Whether udev has named the interface. Before Linux 6.2 an interface that is up cannot be renamed.
    fn is_named(&self, interface: &Path) -> bool {
        let at = |path: &str| self.node.paths.at(&format!("/run/udev/{path}"));
        let data = text(interface.join("ifindex")).and_then(|number| text(at(&format!("data/n{number}"))));
        data.is_some_and(|data| !data.contains("ID_RENAMING=1")) || !at("control").exists()
    }

    /// Waits until the interface of a device exists and udev has named it.
    fn interface(&self, device: &str) -> Option<PathBuf> {
        let device = path_of(self.node, device);
        let look = |_| {
            let found = uplink(&device).filter(|interface| self.is_named(interface));
            if found.is_none() {
                self.node.kernel.pause(LOOK);
            }
            found
        };
        (0..self.looks).find_map(look).or_else(|| uplink(&device))
    }

    fn set(&self, path: &Path, value: &str) {
        if let Err(error) = fs::write(path, value) {
            self.node.log.warn(format!("write {value} to {}: {error}", self.node.paths.name(path)));
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
        guid: guid.map_or_else(none, |guid| colons(&guid)),
    })
}

/// Converts a GUID from the format that sysfs shows, `0011:2233:4455:6677`, to the format that it accepts,
/// `00:11:22:33:44:55:66:77`.
fn colons(guid: &str) -> String {
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
