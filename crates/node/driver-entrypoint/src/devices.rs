//! Finds PCI devices that a module should drive but does not, and PCI devices that lost their driver.

use std::path::{Path, PathBuf};

use crate::{
    error::Error,
    files::{self, entries, name_of, text},
    node::{Node, Paths},
};

const DEVICES: &str = "/sys/bus/pci/devices";

/// Lists devices that match the aliases (`modules.alias`) and have no driver. Skips virtual functions and devices that
/// `driver_override` reserves for another driver, because these devices may have no driver on purpose.
pub(crate) fn without_driver(paths: &Paths, aliases: &[String]) -> Vec<String> {
    let is_reserved = |device: &PathBuf| {
        let reserved = text(device.join("driver_override"));
        device.join("physfn").exists() || reserved.is_some_and(|name| !matches!(name.as_str(), "" | "(null)"))
    };
    let devices = entries(paths.at(DEVICES)).into_iter().filter(|device| !is_reserved(device));
    let devices = devices.filter(|device| driver(device).is_none() && matches_any(device, aliases));
    devices.map(|device| name_of(&device)).collect()
}

/// Lists NVIDIA's graphics processors.
pub(crate) fn gpus(paths: &Paths) -> Vec<PathBuf> {
    let is_gpu = |device: &PathBuf| {
        let starts_with =
            |file: &str, start: &str| text(device.join(file)).is_some_and(|text| text.starts_with(start));
        starts_with("vendor", "0x10de") && starts_with("class", "0x03")
    };
    entries(paths.at(DEVICES)).into_iter().filter(is_gpu).collect()
}

/// Lists the entries of a module's drivers: the devices that are bound to them, and files such as `bind`.
pub(crate) fn driver_entries(paths: &Paths, module: &str) -> Vec<PathBuf> {
    entries(paths.at(&format!("/sys/module/{module}/drivers"))).into_iter().flat_map(entries).collect()
}

/// Addresses of the physical PCI devices that a module drives.
pub(crate) fn bound_to_module(paths: &Paths, module: &str) -> Vec<String> {
    let names = driver_entries(paths, module).into_iter().map(|device| name_of(&device));
    let is_physical = |name: &String| {
        let device = paths.at(DEVICES).join(name);
        device.is_dir() && !device.join("physfn").exists()
    };
    names.filter(is_physical).collect()
}

/// The PCI devices that must have a driver after a replacement of drivers.
pub(crate) struct BoundDevices<'a> {
    pub(crate) node: &'a Node<'a>,
    /// File with the devices' addresses, one per line. The file outlives a container that is killed before the check.
    pub(crate) file: String,
}

impl BoundDevices<'_> {
    /// Adds the devices that these modules drive to the record.
    pub(crate) fn record(&self, modules: &[String]) -> Result<(), Error> {
        let bound = modules.iter().flat_map(|name| bound_to_module(&self.node.paths, name)).collect();
        files::add_lines(self.node, &self.file, bound).map(|_| ())
    }

    /// Fails if a recorded device has no driver now.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let is_unbound = |address: &String| {
            let device = self.node.paths.at(DEVICES).join(address);
            device.is_dir() && driver(&device).is_none()
        };
        let mut unbound = files::lines(self.node, &self.file);
        unbound.retain(is_unbound);
        if unbound.is_empty() {
            return Ok(());
        }
        Err(Error::new(
            format!("no driver is bound to {}, which had one before the replacement", unbound.join(", ")),
            "dmesg on the node has the driver's messages: its probe of the device failed, or it does not know the device",
        ))
    }

    /// Removes the record.
    pub(crate) fn forget(&self) -> Result<(), Error> {
        files::remove(self.node, &self.file).map(|_| ())
    }
}

/// Name of the driver that a device is bound to.
pub(crate) fn driver(device: &Path) -> Option<String> {
    files::link_name(device.join("driver"))
}

fn matches_any(device: &Path, aliases: &[String]) -> bool {
    text(device.join("modalias")).is_some_and(|device| aliases.iter().any(|alias| matches(alias, &device)))
}

/// Whether a text matches a pattern with `*`, the only wildcard in the aliases of PCI drivers.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((start, rest)) = pattern.split_once('*') else { return pattern == text };
    let Some(mut text) = text.strip_prefix(start) else { return false };
    let (middle, end) = rest.rsplit_once('*').map_or(("", rest), |(middle, end)| (middle, end));
    for part in middle.split('*').filter(|part| !part.is_empty()) {
        let Some(index) = text.find(part) else { return false };
        text = text.get(index + part.len()..).unwrap_or_default();
    }
    text.ends_with(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn aliases_match_as_in_modprobe() {
        let device = "pci:v000015B3d00001013sv000015B3sd00000050bc02sc00i00";
        for (alias, wanted) in [
            ("pci:v000015B3d00001013sv*sd*bc*sc*i*", true),
            ("pci:v000015B3d00001015sv*sd*bc*sc*i*", false),
            ("pci:v000010DEd*sv*sd*bc03sc*i*", false),
            ("pci:v000015B3d*sv*sd*bc02sc*i*", true),
            ("pci:v000015B3d*i01", false),
            (device, true),
            ("pci:v000015B3", false),
        ] {
            assert_eq!(matches(alias, device), wanted, "{alias}");
        }
    }
}
