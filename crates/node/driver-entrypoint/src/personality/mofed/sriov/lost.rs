//! Settings of devices that a replacement of the driver loses, and that this program does not restore: the log names
//! them before they are lost.

use std::path::{Path, PathBuf};

use super::{super::devlink, devices, path_of, target, uplink};
use crate::{
    files::{entries, program, text},
    node::Node,
};

/// Attributes of a virtual function in the output of `ip link show` that are not defaults.
const OF_FUNCTIONS: [&str; 6] =
    [", vlan ", ", qos ", "max_tx_rate", "min_tx_rate", "trust on", "link-state enable"];

/// Lists what is lost.
pub(super) fn list(node: &Node<'_>) -> Vec<String> {
    let mut lost = Vec::new();
    let functions = entries(node.paths.at("/sys/bus/auxiliary/devices"));
    let is_sub = |path: &&PathBuf| target_name(path).starts_with("mlx5_core.sf.");
    let count = functions.iter().filter(is_sub).count();
    if count > 0 {
        lost.push(format!("{count} sub-function(s)"));
    }
    for interface in entries(node.paths.at("/sys/class/net")) {
        let name = target_name(&interface);
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
        let Some(interface) = uplink(&path_of(node, &device)) else { continue };
        if let Some(bridge) =
            target(&interface.join("master")).filter(|_| !interface.join("master/bonding").is_dir())
        {
            lost.push(format!("the place of {} in {bridge}", target_name(&interface)));
        }
        let Some(ip) = &ip else { continue };
        let shown = devlink::run(ip, &["link", "show", "dev", &target_name(&interface)]).unwrap_or_default();
        for line in shown.lines().map(str::trim).filter(|line| line.starts_with("vf ")) {
            if OF_FUNCTIONS.iter().any(|attribute| line.contains(attribute)) {
                let number = line.split_whitespace().nth(1).unwrap_or_default();
                lost.push(format!(
                    "VLAN, trust, rate or link state of virtual function {number} of {device}"
                ));
            }
        }
    }
    lost
}

fn target_name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}
