//! Saves and restores the state of `mlx5_core` devices across a reload of the driver:
//!
//! - devlink parameters
//! - virtual functions, addresses, MTU, and whether interfaces are up
//! - VLAN, trust, rate and other settings of virtual functions (see [`vf_settings`])
//! - switchdev mode, with the representors' MTU and whether they are up
//! - settings of interfaces, where no network manager restores them (see [`links`])
//!
//! Some settings need programs of the image; a missing program is logged. Addresses of virtual functions need OFED's
//! files or `ip`, switchdev mode needs OFED's file or `devlink`. Names of representors, and their membership in bridges,
//! are left to the host's udev and network manager.

use std::{
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    time::Duration,
};

mod links;
mod lost;
mod restore;
mod vf_settings;

use links::LinkSetting;
pub(crate) use lost::lost_settings;
use restore::Restorer;

use super::devlink::{self, Devlink, Parameter, changed_parameters};
use crate::{
    devices::bound_to_module,
    error::Error,
    files::{self, entries, link_name, name_of, program, text},
    node::Node,
};

/// Polling interval while a device comes up.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Polls per second.
const POLLS_PER_SECOND: u32 = 10;

/// Saved state of a node's devices.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct NetworkState {
    /// Modules that drove the devices, each with its load; see [`module_load`].
    loads: Vec<(String, u64)>,
    /// Devlink parameters, sorted by device.
    parameters: Vec<Parameter>,
    physical: Vec<PhysicalFunction>,
}

/// A physical function and its virtual functions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct PhysicalFunction {
    /// Device name in devlink, for example `pci/0000:08:00.0`.
    device: String,
    up: bool,
    /// `-` without an interface: InfiniBand without IPoIB, or an interface in a pod's network namespace.
    mtu: String,
    switchdev: bool,
    /// Value of `sriov_numvfs`.
    number: usize,
    functions: Vec<VirtualFunction>,
    /// Arguments of `ip link set dev INTERFACE vf`.
    vf_settings: Vec<String>,
    representors: Vec<Representor>,
    links: Vec<LinkSetting>,
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
struct VirtualFunction {
    pci: String,
    up: bool,
    /// `mtu`, `mac` and `guid` are `-` if the function has none, for example because another driver is bound to it.
    mtu: String,
    mac: String,
    guid: String,
    /// Name of another driver, such as `vfio-pci`; `-` for none and for `mlx5_core`.
    driver: String,
    links: Vec<LinkSetting>,
}

impl NetworkState {
    /// Reads the current state. `defaults_file` has the parameters that were recorded when this driver was loaded.
    pub(crate) fn read(node: &Node<'_>, defaults_file: &str) -> Self {
        Self::read_of_devices(node, defaults_file, &devices(node), &["mlx5_core"])
    }

    /// Like [`read`](Self::read), for the PCI devices that these modules drive.
    pub(crate) fn read_of_modules(node: &Node<'_>, defaults_file: &str, modules: &[String]) -> Self {
        let (mut devices, mut drivers) = (Vec::new(), Vec::new());
        for module in modules {
            let addresses = bound_to_module(&node.paths, module);
            drivers.extend((!addresses.is_empty()).then_some(module.as_str()));
            devices.extend(addresses.iter().map(|address| format!("pci/{address}")));
        }
        devices.sort();
        devices.dedup();
        Self::read_of_devices(node, defaults_file, &devices, &drivers)
    }

    fn read_of_devices(node: &Node<'_>, defaults_file: &str, devices: &[String], drivers: &[&str]) -> Self {
        // Read first, so that a driver that is reloaded during the read does not count as still loaded.
        let loads = loads(node, drivers);
        let physical = devices.iter().map(|device| PhysicalFunction::read(node, device)).collect();
        let parameters = Devlink::of(node).map(|devlink| devlink.parameters(devices)).unwrap_or_default();
        let defaults = text(node.paths.at(defaults_file)).map(|text| Self::parse(&text));
        let defaults = defaults.filter(|defaults| defaults.are_drivers_loaded(node));
        let parameters = changed_parameters(parameters, &defaults.unwrap_or_default().parameters);
        Self { loads, parameters, physical }
    }

    /// Whether the drivers that this state was read from have stayed loaded since.
    fn are_drivers_loaded(&self, node: &Node<'_>) -> bool {
        !self.loads.is_empty()
            && self.loads.iter().all(|(module, load)| module_load(node, module) == Some(*load))
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
    pub(crate) fn save(&self, node: &Node<'_>, path: &str) -> Result<(), Error> {
        files::write(node, path, &self.to_text())
    }

    /// Reads the state saved by this container or an earlier one.
    pub(crate) fn load(node: &Node<'_>, path: &str) -> Option<Self> {
        text(node.paths.at(path)).map(|text| Self::parse(&text)).filter(|state| !state.is_empty())
    }

    /// Reads the state saved by an earlier container that was killed or could not restore it. If the driver has not
    /// been unloaded since, the saved state is ignored: users may have changed the devices.
    pub(crate) fn load_if_unloaded(node: &Node<'_>, path: &str) -> Option<Self> {
        Self::load(node, path).filter(|state| !state.are_drivers_loaded(node))
    }

    fn to_text(&self) -> String {
        // Containers of version 0.2.0 read only loads of `mlx5_core`, without a name.
        let loads = self.loads.iter().map(|(module, load)| {
            if module == "mlx5_core" { format!("load {load}\n") } else { format!("load {module} {load}\n") }
        });
        let mut lines: Vec<String> = loads.collect();
        lines.extend(self.parameters.iter().map(Parameter::to_line));
        for physical in &self.physical {
            let PhysicalFunction { device, up, mtu, switchdev, number, .. } = physical;
            let PhysicalFunction { functions, vf_settings, representors, links, .. } = physical;
            lines.push(format!("physical {device} {up} {mtu} {switchdev} {number}\n"));
            lines.extend(links.iter().map(LinkSetting::to_line));
            lines.extend(vf_settings.iter().map(|words| format!("vf {words}\n")));
            for VirtualFunction { pci, up, mtu, mac, guid, driver, links } in functions {
                lines.push(format!("virtual {pci} {up} {mtu} {mac} {guid} {driver}\n"));
                lines.extend(links.iter().map(LinkSetting::to_line));
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
                (["load", module @ .., load], _) => {
                    let module = module.first().copied().unwrap_or("mlx5_core");
                    state.loads.push((module.to_owned(), load.parse().unwrap_or_default()));
                }
                (&["physical", device, up, mtu, switchdev, number], _) if is_device(device) => {
                    let [device, mtu] = [device, mtu].map(str::to_owned);
                    let (up, switchdev) = (up == "true", switchdev == "true");
                    let number = number.parse().unwrap_or_default();
                    let default = PhysicalFunction::default();
                    state.physical.push(PhysicalFunction { device, up, mtu, switchdev, number, ..default });
                }
                (["link", link @ ..], Some(physical)) => {
                    let function = physical.functions.last_mut().map(|function| &mut function.links);
                    function.unwrap_or(&mut physical.links).extend(LinkSetting::of_fields(link));
                }
                (["vf", words @ ..], Some(physical)) => physical.vf_settings.push(words.join(" ")),
                (&["representor", port, up, mtu], Some(physical)) => {
                    let [port, mtu] = [port, mtu].map(str::to_owned);
                    physical.representors.push(Representor { port, up: up == "true", mtu });
                }
                (&["virtual", pci, up, mtu, mac, guid, ref driver @ ..], Some(physical)) if is_pci(pci) => {
                    let [pci, mtu, mac, guid] = [pci, mtu, mac, guid].map(str::to_owned);
                    // A container of an earlier version did not save the driver.
                    let driver = driver.first().map_or_else(no_value, |driver| (*driver).to_owned());
                    let (up, links) = (up == "true", Vec::new());
                    physical.functions.push(VirtualFunction { pci, up, mtu, mac, guid, driver, links });
                }
                (fields, _) => state.parameters.extend(Parameter::of_fields(fields)),
            }
        }
        state
    }

    /// Restores the state after a reload. Failures are logged and the rest continues: a partly restored network is
    /// better than none. First records the current parameters of the devices in the file `defaults_file`.
    pub(crate) fn restore(&self, node: &Node<'_>, wait_seconds: u32, defaults_file: &str) {
        let restorer = Restorer { node, polls: wait_seconds * POLLS_PER_SECOND };
        // The driver was not unloaded; only interfaces that other modules created on its devices are gone.
        if self.are_drivers_loaded(node) {
            let mut polls = restorer.polls;
            for physical in &self.physical {
                restorer.restore_interfaces(physical, &mut polls);
            }
            restorer.restore_links(&self.physical);
            return;
        }
        // Restore the parameters first: a device that is reinitialized for them loses its virtual functions.
        self.restore_parameters(node, defaults_file);
        for physical in &self.physical {
            restorer.restore_function(physical);
        }
        // All functions of a card share one switch, so its representors appear only after all of its functions are
        // restored.
        for PhysicalFunction { device, representors, .. } in
            self.physical.iter().filter(|physical| !physical.representors.is_empty())
        {
            if let Some(interface) = restorer.wait_for_interface(device) {
                restorer.restore_representors(&interface, representors);
            }
        }
        restorer.restore_links(&self.physical);
    }

    /// Gives bonds whose ports are gone the addresses that they had, before the ports come back.
    pub(crate) fn keep_bond_addresses(&self, node: &Node<'_>) {
        for physical in &self.physical {
            let virtual_links = physical.functions.iter().flat_map(|function| &function.links);
            links::keep_bond_addresses(node, physical.links.iter().chain(virtual_links));
        }
    }

    /// Records the current devlink parameters of the devices in the file `defaults_file`, and then restores the saved ones.
    fn restore_parameters(&self, node: &Node<'_>, defaults_file: &str) {
        let Some(devlink) = Devlink::of(node) else {
            if !self.parameters.is_empty() {
                node.log.warn("this image has no devlink: parameters of devices are not restored");
            }
            return;
        };
        let mut parameters = devlink.parameters(&devices(node));
        for parameter in &mut parameters {
            // Set even if this driver has the same default, because the next driver may have another one.
            parameter.set =
                self.parameters.iter().any(|wanted| wanted.set && wanted.is_same_parameter(parameter));
        }
        let defaults = Self { loads: loads(node, &["mlx5_core"]), parameters, physical: Vec::new() };
        node.log.warn_of(defaults.save(node, defaults_file));
        devlink.restore(&self.parameters);
    }
}

impl PhysicalFunction {
    fn read(node: &Node<'_>, device: &str) -> Self {
        let path = sysfs_path(node, device);
        let interface = own_interface(&path);
        let number = text(path.join("sriov_numvfs")).and_then(|number| number.parse().ok());
        let number = number.unwrap_or_default();
        let representors = interface.iter().flat_map(|interface| representors(node, interface));
        let representors: Vec<Representor> = representors.map(|(_, representor)| representor).collect();
        // mlx5 also has a switch ID in legacy mode (since Linux 5.10), but representors only in switchdev mode.
        let mode = Devlink::of(node).and_then(|devlink| devlink.is_switchdev(device));
        let attribute = |name: &str| interface.as_ref().and_then(|path| text(path.join(name)));
        let compat_mode = || attribute("compat/devlink/mode").map(|mode| mode == "switchdev");
        Self {
            device: device.to_owned(),
            up: interface.as_deref().is_some_and(is_up),
            mtu: attribute("mtu").unwrap_or_else(no_value),
            switchdev: mode.or_else(compat_mode).unwrap_or(!representors.is_empty()),
            number,
            functions: (0..number).filter_map(|index| virtual_function(node, &path, index)).collect(),
            vf_settings: interface.iter().flat_map(|path| vf_settings::read(node, path)).collect(),
            representors,
            links: interface.map(|interface| links::read(node, &interface)).unwrap_or_default(),
        }
    }
}

/// Lists the physical functions bound to the driver by their devlink names, sorted. Virtual functions are created again
/// when their physical function is restored.
fn devices(node: &Node<'_>) -> Vec<String> {
    let devices_of_bus = |bus: PathBuf| {
        let mut devices = entries(bus.join("drivers/mlx5_core"));
        devices.retain(|path| path.is_dir() && !path.ends_with("module") && !path.join("physfn").exists());
        devices.into_iter().map(move |device| format!("{}/{}", name_of(&bus), name_of(&device)))
    };
    entries(node.paths.at("/sys/bus")).into_iter().flat_map(devices_of_bus).collect()
}

/// Waits until the interface of a device, by its devlink name, exists and udev has named it.
pub(crate) fn await_interface(node: &Node<'_>, device: &str, polls: u32) -> Option<PathBuf> {
    Restorer { node, polls }.wait_for_interface(device)
}

/// Runs the `ip` program of the image (iproute2); returns its standard output, or its error output if it failed.
fn run_ip(node: &Node<'_>, arguments: &[&str]) -> Result<String, String> {
    let ip = program(&node.paths, "ip").ok_or("this image has no ip (iproute2)")?;
    devlink::run(&ip, arguments)
}

/// Path in sysfs of a device by its devlink name.
fn sysfs_path(node: &Node<'_>, device: &str) -> PathBuf {
    let (bus, name) = device.split_once('/').unwrap_or(("pci", device));
    node.paths.at("/sys/bus").join(bus).join("devices").join(name)
}

/// Finds the interface of the function itself. Representors of other functions and IPoIB interfaces of other partitions are
/// below the same device. Port names of representors contain `pf`, such as `pf0vf3` and `c1pf0sf2`.
fn own_interface(device: &Path) -> Option<PathBuf> {
    let is_of_another = |path: &PathBuf| {
        text(path.join("phys_port_name")).is_some_and(|name| name.contains("pf")) || is_ipoib_child(path)
    };
    entries(device.join("net")).into_iter().find(|interface| !is_of_another(interface))
}

/// Whether this is an IPoIB interface (`ARPHRD_INFINIBAND`) of another partition, on top of the device's own. Those that
/// were created by netlink have no attribute `parent`.
fn is_ipoib_child(interface: &Path) -> bool {
    let attribute = |name: &str| text(interface.join(name));
    attribute("type").as_deref() == Some("32")
        && (interface.join("parent").exists() || attribute("iflink") != attribute("ifindex"))
}

/// Returns those of the modules that are loaded, each with its load.
fn loads(node: &Node<'_>, modules: &[&str]) -> Vec<(String, u64)> {
    let load_of = |module: &&str| Some(((*module).to_owned(), module_load(node, module)?));
    modules.iter().filter_map(load_of).collect()
}

/// Identifies the current load of a module; `None` if it is not loaded. The number is the inode of the module's directory,
/// because sysfs does not reuse inode numbers.
fn module_load(node: &Node<'_>, module: &str) -> Option<u64> {
    fs::metadata(node.paths.at("/sys/module").join(module)).ok().map(|module| module.ino())
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

fn virtual_function(node: &Node<'_>, device: &Path, index: usize) -> Option<VirtualFunction> {
    let function = device.join(format!("virtfn{index}"));
    let pci = link_name(&function)?;
    let interface = own_interface(&function);
    let attribute =
        |name: &str| interface.as_ref().and_then(|path| text(path.join(name))).unwrap_or_else(no_value);
    let guid = entries(function.join("infiniband")).first().and_then(|path| text(path.join("node_guid")));
    Some(VirtualFunction {
        pci,
        up: interface.as_deref().is_some_and(is_up),
        mtu: attribute("mtu"),
        mac: Some(attribute("address")).filter(|mac| is_mac(mac)).unwrap_or_else(no_value),
        guid: guid.map_or_else(no_value, |guid| with_colons(&guid)),
        driver: link_name(function.join("driver"))
            .filter(|driver| driver != "mlx5_core")
            .unwrap_or_else(no_value),
        links: interface.map(|interface| links::read(node, &interface)).unwrap_or_default(),
    })
}

/// Whether this is an Ethernet address; addresses of InfiniBand are longer.
fn is_mac(address: &str) -> bool {
    address.len() == 17
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

fn no_value() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests;
