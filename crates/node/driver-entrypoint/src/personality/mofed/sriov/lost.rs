//! Settings of devices that a replacement of the driver loses, and that this program does not restore: the log names
//! them before they are lost.

use std::path::{Path, PathBuf};

use super::{super::devlink, devices, link_target_name, own_interface, sysfs_path};
use crate::{
    files::{entries, program, text},
    node::Node,
};

/// Attributes of a virtual function in the output of `ip link show` that are not defaults.
const CUSTOM_ATTRIBUTES: [&str; 6] =
    [", vlan ", ", qos ", "max_tx_rate", "min_tx_rate", "trust on", "link-state enable"];

/// Lists what is lost.
pub(super) fn lost_settings(node: &Node<'_>) -> Vec<String> {
    let mut lost = Vec::new();
    let functions = entries(node.paths.at("/sys/bus/auxiliary/devices"));
    let is_sub = |path: &&PathBuf| base_name(path).starts_with("mlx5_core.sf.");
    let count = functions.iter().filter(is_sub).count();
    if count > 0 {
        lost.push(format!("{count} sub-function(s)"));
    }
    for interface in entries(node.paths.at("/sys/class/net")) {
        let name = base_name(&interface);
        if text(interface.join("type")).as_deref() != Some("32") {
            continue;
        }
        if interface.join("parent").exists() {
            lost.push(format!("IPoIB interface {name}"));
        } else if text(interface.join("mode")).as_deref() == Some("connected") {
            lost.push(format!("connected mode of {name}"));
        }
    }
    let ip = program(&node.paths, "ip");
    for device in devices(node) {
        let Some(interface) = own_interface(&sysfs_path(node, &device)) else { continue };
        if let Some(bridge) =
            link_target_name(&interface.join("master")).filter(|_| !interface.join("master/bonding").is_dir())
        {
            lost.push(format!("the membership of {} in {bridge}", base_name(&interface)));
        }
        let Some(ip) = &ip else { continue };
        let shown = devlink::run(ip, &["link", "show", "dev", &base_name(&interface)]).unwrap_or_default();
        for line in shown.lines().map(str::trim).filter(|line| line.starts_with("vf ")) {
            if CUSTOM_ATTRIBUTES.iter().any(|attribute| line.contains(attribute)) {
                let number = line.split_whitespace().nth(1).unwrap_or_default();
                lost.push(format!(
                    "VLAN, trust, rate or link state of virtual function {number} of {device}"
                ));
            }
        }
    }
    lost
}

fn base_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
