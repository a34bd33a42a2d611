//! Restores saved devices: virtual functions first, then the switch's mode, then interfaces.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{
    super::devlink::{self, Devlink},
    LinkSetting, POLL_INTERVAL, PhysicalFunction, Representor, VirtualFunction, flags, links, own_interface,
    representors, sysfs_path, vf_settings,
};
use crate::{
    files::{link_name, name_of, program, text},
    node::Node,
};

/// Restores the devices of a node.
pub(super) struct Restorer<'a> {
    pub(super) node: &'a Node<'a>,
    /// Polls while a device comes up.
    pub(super) polls: u32,
}

impl Restorer<'_> {
    pub(super) fn restore_function(&self, physical: &PhysicalFunction) {
        let PhysicalFunction { device, switchdev, number, functions, .. } = physical;
        let path = sysfs_path(self.node, device);
        let count = number.to_string();
        // Virtual functions that were created in the meantime stay.
        if *number > 0 && text(path.join("sriov_numvfs")).as_ref() != Some(&count) {
            self.write(&path.join("sriov_numvfs"), &count);
        }
        if !physical.vf_settings.is_empty()
            && let Some(interface) = self.wait_for_interface(device)
        {
            vf_settings::restore(self.node, &interface, &physical.vf_settings);
        }
        let mut has_addresses = true;
        for (index, function) in functions.iter().enumerate() {
            has_addresses &= self.set_addresses(&path, index, function);
            self.write_bind_file(&function.pci, "unbind");
            self.bind_to_saved_driver(function);
            if !switchdev {
                self.write_bind_file(&function.pci, "bind");
            }
        }
        if !has_addresses {
            self.node.log.warn(format!(
                "{device}: this driver has no files for the addresses of virtual functions, and ip does not set them; they keep those that they have now"
            ));
        }
        if *switchdev {
            self.enable_switchdev(physical);
            for function in functions {
                self.write_bind_file(&function.pci, "bind");
            }
        }
        let mut polls = self.polls;
        self.restore_interfaces(physical, &mut polls);
        self.node.log.step(format!("restored {device} with {number} virtual function(s)"));
    }

    /// Restores attributes, sysctls, MTU and up state of the interfaces of a device and of its virtual functions. Missing
    /// interfaces share one wait of at most `polls`.
    pub(super) fn restore_interfaces(&self, physical: &PhysicalFunction, polls: &mut u32) {
        let PhysicalFunction { device, up, mtu, functions, .. } = physical;
        let log = &self.node.log;
        for function in functions.iter().filter(|function| function.mtu != "-") {
            let VirtualFunction { pci, up, mtu, links, .. } = function;
            match self.poll_interface(&format!("pci/{pci}"), polls) {
                Some(interface) => self.restore_interface(&interface, *up, mtu, links),
                None => log.warn(format!("virtual function {pci} has no network interface")),
            }
        }
        if mtu == "-" {
            return;
        }
        match self.poll_interface(device, polls) {
            Some(interface) => self.restore_interface(&interface, *up, mtu, &physical.links),
            None => {
                log.warn(format!("{device} has no network interface: its MTU and state are not restored"));
            }
        }
    }

    fn restore_interface(&self, interface: &Path, up: bool, mtu: &str, links: &[LinkSetting]) {
        links::restore_settings(self.node, interface, links);
        self.write(&interface.join("mtu"), mtu);
        // Leave a port to its bond, which takes only interfaces that are down, and brings them up.
        if !links::is_bond_port(self.node, links) {
            self.set_up_state(interface, up);
        }
    }

    /// Restores the settings that no network manager restores. All interfaces share one wait, and a route may use two of them.
    pub(super) fn restore_links(&self, physical: &[PhysicalFunction]) {
        let devices = physical.iter().map(|physical| (physical.device.clone(), &physical.links));
        let functions = physical.iter().flat_map(|physical| &physical.functions);
        let functions = functions.map(|function| (format!("pci/{}", function.pci), &function.links));
        let saved = devices.chain(functions).filter_map(|(device, links)| {
            Some((own_interface(&sysfs_path(self.node, &device))?, links.as_slice()))
        });
        links::restore(self.node, &saved.collect::<Vec<_>>(), self.polls);
    }

    /// Writes OFED's files `sriov/<index>/{mac,node,port}`, or runs the `ip` program if this driver has no such files. Returns
    /// whether the function has its address.
    fn set_addresses(&self, device: &Path, index: usize, function: &VirtualFunction) -> bool {
        let directory = device.join(format!("sriov/{index}"));
        let guid = Some(function.guid.as_str())
            .filter(|guid| *guid != "-" && !guid.chars().all(|c| "0:".contains(c)));
        let mac = Some(function.mac.as_str()).filter(|mac| *mac != "-");
        let values = [("mac", "mac", mac), ("node", "node_guid", guid), ("port", "port_guid", guid)];
        let mut have_addresses = true;
        for (file, word, value) in values {
            let Some(value) = value else { continue };
            let path = directory.join(file);
            if path.exists() {
                self.write(&path, value);
            } else if file == "mac" || mac.is_none() {
                // The node and port GUIDs of an Ethernet device are not essential.
                have_addresses &= self.set_address_with_ip(device, index, word, value);
            }
        }
        have_addresses
    }

    fn set_address_with_ip(&self, device: &Path, index: usize, word: &str, value: &str) -> bool {
        let interface = own_interface(device);
        let Some((interface, ip)) = interface.zip(program(&self.node.paths, "ip")) else { return false };
        let words = ["link", "set", "dev", &name_of(&interface), "vf", &index.to_string(), word, value];
        let result = devlink::run(&ip, &words);
        result.inspect_err(|error| self.node.log.warn(format!("ip {}: {error}", words.join(" ")))).is_ok()
    }

    fn enable_switchdev(&self, physical: &PhysicalFunction) {
        let PhysicalFunction { device, mtu, .. } = physical;
        let interface = if mtu == "-" { None } else { self.wait_for_interface(device) };
        let mode = interface.map(|interface| interface.join("compat/devlink/mode"));
        if let Some(mode) = mode.filter(|mode| mode.exists()) {
            self.write(&mode, "switchdev");
        } else if !Devlink::of(self.node).is_some_and(|devlink| devlink.set_switchdev(device)) {
            self.node.log.warn(format!(
                "{device} was in switchdev mode, and is in legacy mode now: devlink dev eswitch set {device} mode switchdev"
            ));
        }
    }

    /// Restores the representors. They appear after the change to switchdev mode, one for each function.
    pub(super) fn restore_representors(&self, interface: &Path, saved: &[Representor]) {
        let mut current = Vec::new();
        self.node.poll(self.polls + 1, POLL_INTERVAL, || {
            current = representors(self.node, interface);
            current.len() >= saved.len() && current.iter().all(|(path, _)| self.is_named(path))
        });
        for Representor { port, up, mtu } in saved {
            match current.iter().find(|(_, current)| current.port == *port) {
                Some((path, _)) => {
                    self.write(&path.join("mtu"), mtu);
                    self.set_up_state(path, *up);
                }
                None => self.node.log.warn(format!("no interface appeared for {port}")),
            }
        }
    }

    fn write_bind_file(&self, pci: &str, file: &str) {
        let driver_link = sysfs_path(self.node, &format!("pci/{pci}")).join("driver");
        let driver = link_name(&driver_link).unwrap_or_else(|| "mlx5_core".to_owned());
        // A function that is bound to another driver, for example for a virtual machine, is left to that driver.
        if driver == "mlx5_core" && (file == "bind" || driver_link.exists()) {
            self.write(&self.node.paths.at(&format!("/sys/bus/pci/drivers/{driver}/{file}")), pci);
        }
    }

    /// Gives a function to the driver that it had before, such as `vfio-pci` for a virtual machine.
    fn bind_to_saved_driver(&self, function: &VirtualFunction) {
        let VirtualFunction { pci, driver, .. } = function;
        if driver != "-" {
            let device = sysfs_path(self.node, &format!("pci/{pci}"));
            self.write(&device.join("driver_override"), driver);
            self.write(&self.node.paths.at("/sys/bus/pci/drivers_probe"), pci);
        }
    }

    fn set_up_state(&self, interface: &Path, up: bool) {
        let flags = flags(interface);
        let new_flags = if up { flags | 1 } else { flags & !1 };
        if new_flags != flags {
            self.write(&interface.join("flags"), &format!("{new_flags:#x}"));
        }
    }

    /// Whether udev has named the interface. Before Linux 6.2 an interface that is up cannot be renamed.
    fn is_named(&self, interface: &Path) -> bool {
        let udev = |path: &str| self.node.paths.at(&format!("/run/udev/{path}"));
        let data = text(interface.join("ifindex")).and_then(|number| text(udev(&format!("data/n{number}"))));
        data.is_some_and(|data| !data.contains("ID_RENAMING=1")) || !udev("control").exists()
    }

    /// Waits until the interface of a device exists and udev has named it.
    pub(super) fn wait_for_interface(&self, device: &str) -> Option<PathBuf> {
        let mut polls = self.polls;
        self.poll_interface(device, &mut polls)
    }

    /// Like [`wait_for_interface`](Self::wait_for_interface), for at most `polls`. Subtracts the polls that the wait takes. An
    /// interface that appears gives all polls back, because the next one may appear after it.
    fn poll_interface(&self, device: &str, polls: &mut u32) -> Option<PathBuf> {
        let device = sysfs_path(self.node, device);
        while *polls > 0 {
            let interface = own_interface(&device).filter(|interface| self.is_named(interface));
            if interface.is_some() {
                *polls = self.polls;
                return interface;
            }
            self.node.kernel.pause(POLL_INTERVAL);
            *polls -= 1;
        }
        own_interface(&device)
    }

    fn write(&self, path: &Path, value: &str) {
        if let Err(error) = fs::write(path, value) {
            self.node.log.warn(format!("write {value} to {}: {error}", self.node.paths.container_path(path)));
        }
    }
}
