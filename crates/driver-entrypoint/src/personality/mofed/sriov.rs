//! The node's NVIDIA network devices over a reload of their driver: devlink parameters; virtual functions, addresses, MTU and whether
//! interfaces are up; switchdev mode, with the representors' MTU and whether they are up.
//!
//! What cannot be done is said in the log: the address that the in-tree driver's physical function gives to a virtual one (only OFED
//! has a file for it), and switchdev mode without OFED's file for that and without devlink. Names of representors, and bridges that
//! they were in, are left to the host's udev and network manager.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use super::devlink::{Devlink, Mode, Parameter};
use crate::{
    error::Error,
    files::{self, entries, text},
    node::Node,
};

/// The PCI vendor.
const VENDOR: &str = "0x15b3";
/// Between two looks whether a device is up.
const LOOK: Duration = Duration::from_millis(100);
/// Looks in a second.
const LOOKS: u32 = 10;

/// The state of a node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct State {
    /// Sorted by device.
    parameters: Vec<Parameter>,
    physical: Vec<Physical>,
}

/// A physical function, with its virtual ones.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Physical {
    /// Such as `0000:08:00.0`.
    pci: String,
    up: bool,
    mtu: String,
    switchdev: bool,
    functions: Vec<Virtual>,
    representors: Vec<Representor>,
}

/// The interface by which a switch's host sees a virtual function.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Representor {
    /// `phys_port_name`, such as `pf0vf3`: the same after a reload, as its name need not be.
    port: String,
    up: bool,
    mtu: String,
}

/// A virtual function.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Virtual {
    pci: String,
    up: bool,
    /// Each of these is `-` where the function is bound to another driver, and has none.
    mtu: String,
    mac: String,
    guid: String,
}

impl State {
    /// As it is now.
    pub(crate) fn read(node: &Node<'_>) -> Self {
        let mut physical: Vec<Physical> = entries(node.paths.at("/sys/class/net"))
            .into_iter()
            .filter_map(|interface| {
                let device = interface.join("device");
                // Virtual functions and representors have the same vendor.
                if text(device.join("vendor")).as_deref() != Some(VENDOR)
                    || device.join("physfn").exists()
                    || text(interface.join("phys_port_name")).is_some_and(|name| name.contains("vf"))
                {
                    return None;
                }
                let number = text(device.join("sriov_numvfs")).and_then(|number| number.parse().ok());
                let number: usize = number.unwrap_or_default();
                Some(Physical {
                    pci: target(&device)?,
                    up: is_up(&interface),
                    mtu: text(interface.join("mtu")).unwrap_or_else(none),
                    // In legacy mode the kernel does not answer.
                    switchdev: text(interface.join("phys_switch_id")).is_some_and(|id| !id.is_empty()),
                    functions: (0..number).filter_map(|index| virtual_function(&device, index)).collect(),
                    representors: representors(node, &interface)
                        .into_iter()
                        .map(|(_, found)| found)
                        .collect(),
                })
            })
            .collect();
        physical.sort_by(|one, other| one.pci.cmp(&other.pci));
        physical.dedup_by(|one, other| one.pci == other.pci);
        let parameters = Devlink::of(node).map(|devlink| devlink.parameters()).unwrap_or_default();
        Self { parameters, physical }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.physical.is_empty() && self.parameters.is_empty()
    }

    /// For the log.
    pub(crate) fn summary(&self) -> String {
        let functions: usize = self.physical.iter().map(|physical| physical.functions.len()).sum();
        let (devices, parameters) = (self.physical.len(), self.parameters.len());
        format!("{devices} device(s), {functions} virtual function(s), {parameters} devlink parameter(s)")
    }

    /// Keeps it on the node, so that it survives a container that is killed while there is no driver.
    pub(crate) fn keep(&self, node: &Node<'_>, path: &str) -> Result<(), Error> {
        files::write(node, path, &self.to_text())
    }

    /// What a container that was killed kept.
    pub(crate) fn kept(node: &Node<'_>, path: &str) -> Option<Self> {
        Some(Self::parse(&text(node.paths.at(path))?)).filter(|state| !state.is_empty())
    }

    fn to_text(&self) -> String {
        let mut lines = Vec::new();
        for Parameter { device, name, mode, value } in &self.parameters {
            lines.push(format!("parameter {device} {name} {} {value}\n", mode.name()));
        }
        for Physical { pci, up, mtu, switchdev, functions, representors } in &self.physical {
            lines.push(format!("physical {pci} {up} {mtu} {switchdev}\n"));
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
                (["parameter", device, name, mode, value], _) => {
                    let parameter = |mode| Parameter {
                        device: (*device).to_owned(),
                        name: (*name).to_owned(),
                        mode,
                        value: (*value).to_owned(),
                    };
                    state.parameters.extend(Mode::of(mode).map(parameter));
                }
                (["physical", pci, up, mtu, switchdev], _) if is_pci(pci) => state.physical.push(Physical {
                    pci: (*pci).to_owned(),
                    up: *up == "true",
                    mtu: (*mtu).to_owned(),
                    switchdev: *switchdev == "true",
                    functions: Vec::new(),
                    representors: Vec::new(),
                }),
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
                _ => {}
            }
        }
        state
    }

    /// Puts it back after a reload. What does not work is said, and the rest goes on: a network that is half there is
    /// better than none.
    pub(crate) fn restore(&self, node: &Node<'_>, wait_seconds: u32) {
        let restoring = Restoring { node, looks: wait_seconds * LOOKS, devlink: Devlink::of(node) };
        // Before virtual functions, because a device that is set up anew for them loses those.
        match &restoring.devlink {
            Some(devlink) => devlink.restore(&self.parameters),
            None if self.parameters.is_empty() => {}
            None => node.log.warn("this image has no devlink: parameters of devices are not restored"),
        }
        for physical in &self.physical {
            restoring.physical(physical);
        }
        // The functions of one card have one switch: all of their representors come before any is looked for.
        for Physical { pci, representors, .. } in self.physical.iter().filter(|physical| physical.switchdev) {
            if let Some(interface) = restoring.interface(pci) {
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
        let Physical { pci, up, mtu, switchdev, functions, representors: _ } = physical;
        let device = self.device(pci);
        let Some(interface) = self.interface(pci) else {
            self.node.log.warn(format!("{pci} has no network interface: its settings are not restored"));
            return;
        };
        let number = text(device.join("sriov_numvfs")).unwrap_or_else(|| "0".to_owned());
        // Those that were made meanwhile stay.
        if !functions.is_empty() && number != functions.len().to_string() {
            self.set(&device.join("sriov_numvfs"), &functions.len().to_string());
        }
        self.bring_up(&interface, *up);
        let mut addressed = true;
        for (index, function) in functions.iter().enumerate() {
            addressed &= self.address(&device, index, function);
            self.bind(&function.pci, "unbind");
            if !switchdev {
                self.bind(&function.pci, "bind");
            }
        }
        if !addressed {
            self.node.log.warn(format!(
                "{pci}: this driver has no files for the addresses of virtual functions; they keep those that they have now"
            ));
        }
        if *switchdev {
            self.switchdev(pci, &interface);
            for function in functions {
                self.bind(&function.pci, "bind");
            }
        }
        for function in functions.iter().filter(|function| function.mtu != "-") {
            let Some(interface) = self.interface(&function.pci) else {
                self.node.log.warn(format!("virtual function {} has no network interface", function.pci));
                continue;
            };
            self.set(&interface.join("mtu"), &function.mtu);
            self.bring_up(&interface, function.up);
        }
        if mtu != "-" {
            self.set(&interface.join("mtu"), mtu);
        }
        self.node.log.step(format!("restored {pci} with {} virtual function(s)", functions.len()));
    }

    /// OFED's files `sriov/<index>/{mac,node,port}`. Were they there, or not needed?
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
            // An Ethernet device has no port GUID that counts.
            if path.exists() { self.set(&path, value) } else { all &= file != "mac" }
        }
        all
    }

    fn switchdev(&self, pci: &str, interface: &Path) {
        let mode = interface.join("compat/devlink/mode");
        if mode.exists() {
            self.set(&mode, "switchdev");
        } else if !self.devlink.as_ref().is_some_and(|devlink| devlink.switchdev(pci)) {
            self.node.log.warn(format!(
                "{pci} was in switchdev mode, and is in legacy mode now: devlink dev eswitch set pci/{pci} mode switchdev"
            ));
        }
    }

    /// They come with switchdev mode, each with the function that it stands for.
    fn representors(&self, interface: &Path, wanted: &[Representor]) {
        let mut found = representors(self.node, interface);
        for _ in 0..self.looks {
            if found.len() >= wanted.len() {
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
                None => self.node.log.warn(format!("no interface has come for {port}")),
            }
        }
    }

    fn bind(&self, pci: &str, file: &str) {
        let driver = target(&self.device(pci).join("driver")).unwrap_or_else(|| "mlx5_core".to_owned());
        // A function that is given to a virtual machine is its driver's business.
        if driver == "mlx5_core" && (file == "bind" || self.device(pci).join("driver").exists()) {
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

    /// The first interface of a device, as soon as it is there.
    fn interface(&self, pci: &str) -> Option<PathBuf> {
        let place = self.device(pci).join("net");
        let look = |_| {
            let found = entries(&place).into_iter().next();
            if found.is_none() {
                self.node.kernel.pause(LOOK);
            }
            found
        };
        (0..self.looks).find_map(look).or_else(|| entries(&place).into_iter().next())
    }

    fn device(&self, pci: &str) -> PathBuf {
        self.node.paths.at("/sys/bus/pci/devices").join(pci)
    }

    fn set(&self, path: &Path, value: &str) {
        if let Err(error) = fs::write(path, value) {
            self.node.log.warn(format!("write {value} to {}: {error}", self.node.paths.name(path)));
        }
    }
}

/// Those of the switch of a physical function's interface, with their paths.
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

/// `0011:2233:4455:6677`, as sysfs shows it, to `00:11:22:33:44:55:66:77`, as it takes it.
fn colons(guid: &str) -> String {
    let digits: Vec<char> = guid.chars().filter(char::is_ascii_hexdigit).collect();
    let pairs: Vec<String> = digits.chunks(2).map(|pair| pair.iter().collect()).collect();
    pairs.join(":")
}

fn is_pci(text: &str) -> bool {
    !text.is_empty() && text.chars().all(|c| c.is_ascii_hexdigit() || c == ':' || c == '.')
}

/// `IFF_UP` is bit 0 (`include/uapi/linux/if.h`).
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

/// The last part of a link's target.
fn target(link: &Path) -> Option<String> {
    Some(fs::read_link(link).ok()?.file_name()?.to_str()?.to_owned())
}

#[cfg(test)]
mod tests;
