//! SR-IOV of the node's NVIDIA network devices over a reload of their driver: virtual functions, addresses, MTU and
//! whether interfaces are up. Through sysfs alone.
//!
//! What sysfs cannot do is said in the log: the address that the in-tree driver's physical function gives to a virtual
//! one (only OFED has a file for it), and switchdev mode without OFED's file for that; representors are left to
//! the host's network manager.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

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
pub(crate) struct State(Vec<Physical>);

/// A physical function with virtual ones.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Physical {
    /// Such as `0000:08:00.0`.
    pci: String,
    up: bool,
    mtu: String,
    switchdev: bool,
    functions: Vec<Virtual>,
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
                let number: usize = text(device.join("sriov_numvfs"))?.parse().ok()?;
                if number == 0 {
                    return None;
                }
                Some(Physical {
                    pci: target(&device)?,
                    up: is_up(&interface),
                    mtu: text(interface.join("mtu")).unwrap_or_else(none),
                    // In legacy mode the kernel does not answer.
                    switchdev: text(interface.join("phys_switch_id")).is_some_and(|id| !id.is_empty()),
                    functions: (0..number).filter_map(|index| virtual_function(&device, index)).collect(),
                })
            })
            .collect();
        physical.sort_by(|one, other| one.pci.cmp(&other.pci));
        physical.dedup_by(|one, other| one.pci == other.pci);
        Self(physical)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many virtual functions there are.
    pub(crate) fn functions(&self) -> usize {
        self.0.iter().map(|physical| physical.functions.len()).sum()
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
        for Physical { pci, up, mtu, switchdev, functions } in &self.0 {
            lines.push(format!("physical {pci} {up} {mtu} {switchdev}\n"));
            for Virtual { pci, up, mtu, mac, guid } in functions {
                lines.push(format!("virtual {pci} {up} {mtu} {mac} {guid}\n"));
            }
        }
        lines.concat()
    }

    fn parse(text: &str) -> Self {
        let mut state = Self::default();
        for line in text.lines() {
            let fields: Vec<&str> = line.split(' ').collect();
            match (fields.as_slice(), state.0.last_mut()) {
                (["physical", pci, up, mtu, switchdev], _) if is_pci(pci) => state.0.push(Physical {
                    pci: (*pci).to_owned(),
                    up: *up == "true",
                    mtu: (*mtu).to_owned(),
                    switchdev: *switchdev == "true",
                    functions: Vec::new(),
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
        let restoring = Restoring { node, looks: wait_seconds * LOOKS };
        for physical in &self.0 {
            restoring.physical(physical);
        }
    }
}

struct Restoring<'a> {
    node: &'a Node<'a>,
    looks: u32,
}

impl Restoring<'_> {
    fn physical(&self, physical: &Physical) {
        let Physical { pci, up, mtu, switchdev, functions } = physical;
        let device = self.device(pci);
        let Some(interface) = self.interface(pci) else {
            self.node
                .log
                .warn(format!("{pci} has no network interface: its virtual functions are not restored"));
            return;
        };
        if text(device.join("sriov_numvfs")) != Some(functions.len().to_string()) {
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
        self.node.log.step(format!("restored {} virtual function(s) of {pci}", functions.len()));
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
        } else {
            self.node.log.warn(format!(
                "{pci} was in switchdev mode, and is in legacy mode now: devlink dev eswitch set pci/{pci} mode switchdev"
            ));
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
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::Bench;

    const PF: &str = "/sys/bus/pci/devices/0000:08:00.0";
    const VF: &str = "/sys/bus/pci/devices/0000:08:00.2";

    fn link(bench: &Bench, to: &str, at: &str) {
        let at = bench.at(at);
        fs::create_dir_all(at.parent().unwrap()).unwrap();
        symlink(bench.at(to), at).unwrap();
    }

    /// A device with a virtual function, as sysfs shows it.
    fn bench() -> Bench {
        let bench = Bench::new();
        for (device, name, mac) in
            [(PF, "enp8s0f0", "00:00:00:00:00:01"), (VF, "enp8s0f0v0", "02:00:00:00:00:02")]
        {
            let interface = format!("{device}/net/{name}");
            bench.file(&format!("{device}/vendor"), "0x15b3\n");
            bench.file(&format!("{interface}/address"), &format!("{mac}\n"));
            bench.file(&format!("{interface}/flags"), "0x1003\n");
            bench.file(&format!("{interface}/mtu"), "9000\n");
            link(&bench, device, &format!("{interface}/device"));
            link(&bench, &interface, &format!("/sys/class/net/{name}"));
            link(&bench, "/sys/bus/pci/drivers/mlx5_core", &format!("{device}/driver"));
        }
        bench.file(&format!("{PF}/sriov_numvfs"), "1\n");
        bench.file(&format!("{VF}/infiniband/mlx5_2/node_guid"), "0011:2233:4455:6677\n");
        bench.file("/sys/bus/pci/drivers/mlx5_core/bind", "");
        bench.file("/sys/bus/pci/drivers/mlx5_core/unbind", "");
        link(&bench, VF, &format!("{PF}/virtfn0"));
        link(&bench, PF, &format!("{VF}/physfn"));
        // Another vendor's.
        bench.file("/sys/class/net/eth0/device/vendor", "0x8086\n");
        bench
    }

    /// What a reload leaves of it.
    fn reload(bench: &Bench) {
        bench.file(&format!("{PF}/sriov_numvfs"), "0\n");
        bench.file(&format!("{PF}/net/enp8s0f0/mtu"), "1500\n");
        bench.file(&format!("{PF}/net/enp8s0f0/flags"), "0x1002\n");
        bench.file(&format!("{VF}/net/enp8s0f0v0/mtu"), "1500\n");
        bench.file(&format!("{VF}/net/enp8s0f0v0/flags"), "0x1002\n");
    }

    #[test]
    fn a_device_is_after_a_reload_what_it_was() {
        let bench = bench();
        for file in ["mac", "node", "port"] {
            bench.file(&format!("{PF}/sriov/0/{file}"), "");
        }
        let node = bench.node();
        let state = State::read(&node);
        assert_eq!((state.is_empty(), state.functions()), (false, 1));
        assert_eq!(State::parse(&state.to_text()), state);
        reload(&bench);
        state.restore(&node, 4);
        let text = |path: String| bench.text(&path).unwrap();
        assert_eq!(text(format!("{PF}/sriov_numvfs")), "1");
        assert_eq!(text(format!("{PF}/net/enp8s0f0/mtu")), "9000");
        assert_eq!(text(format!("{PF}/net/enp8s0f0/flags")), "0x1003");
        assert_eq!(text(format!("{VF}/net/enp8s0f0v0/mtu")), "9000");
        assert_eq!(text(format!("{VF}/net/enp8s0f0v0/flags")), "0x1003");
        assert_eq!(text(format!("{PF}/sriov/0/mac")), "02:00:00:00:00:02");
        assert_eq!(text(format!("{PF}/sriov/0/node")), "00:11:22:33:44:55:66:77");
        assert_eq!(text("/sys/bus/pci/drivers/mlx5_core/unbind".into()), "0000:08:00.2");
        assert_eq!(text("/sys/bus/pci/drivers/mlx5_core/bind".into()), "0000:08:00.2");
        assert_eq!(bench.log(), "INFO  restored 1 virtual function(s) of 0000:08:00.0");
    }

    #[test]
    fn what_sysfs_cannot_do_is_said() {
        let bench = bench();
        bench.file(&format!("{PF}/net/enp8s0f0/phys_switch_id"), "ec0d9a\n");
        let state = State::read(&bench.node());
        reload(&bench);
        state.restore(&bench.node(), 4);
        let log = bench.log();
        assert!(log.contains("WARN  0000:08:00.0: this driver has no files for the addresses"), "{log}");
        assert!(log.contains("devlink dev eswitch set pci/0000:08:00.0 mode switchdev"), "{log}");
    }

    #[test]
    fn a_device_that_does_not_come_up_is_waited_for_and_said() {
        let bench = bench();
        let state = State::read(&bench.node());
        fs::remove_dir_all(bench.at(&format!("{PF}/net"))).unwrap();
        state.restore(&bench.node(), 2);
        assert_eq!(bench.kernel.pauses.get(), 20);
        assert!(bench.log().contains("WARN  0000:08:00.0 has no network interface"));
    }

    #[test]
    fn text_of_another_form_is_left_out() {
        assert!(
            State::parse("physical ../../x true 1500 false\nvirtual 0000:08:00.2 true 1 - -\n").is_empty()
        );
    }
}
