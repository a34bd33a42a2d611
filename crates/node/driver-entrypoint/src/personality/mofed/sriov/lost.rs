//! Settings of devices that a replacement of the driver loses, and that this program does not restore: the log and the
//! forecast name them before they are lost.

use std::path::PathBuf;

use super::{devices, is_ipoib_child, links, own_interface, sysfs_path};
use crate::{
    files::{entries, name_of, names_after, program},
    node::Node,
};

/// Lists the lost settings.
pub(crate) fn lost_settings(node: &Node<'_>) -> Vec<String> {
    let mut lost = Vec::new();
    let count = names_after(&node.paths.at("/sys/bus/auxiliary/devices"), "mlx5_core.sf.").len();
    if count > 0 {
        lost.push(format!("{count} sub-function(s)"));
    }
    let children = entries(node.paths.at("/sys/class/net")).into_iter().filter(|path| is_ipoib_child(path));
    lost.extend(children.map(|path| format!("IPoIB interface {}", name_of(&path))));
    let interfaces: Vec<PathBuf> =
        devices(node).iter().filter_map(|device| own_interface(&sysfs_path(node, device))).collect();
    for interface in &interfaces {
        let uppers = links::lost_uppers(node, interface).into_iter();
        lost.extend(uppers.map(|upper| format!("{upper} on {}", name_of(interface))));
    }
    if !interfaces.is_empty() && program(&node.paths, "ip").is_none() {
        let settings = "addresses, routes, neighbors and the settings of virtual functions";
        lost.push(format!("{settings}, because this image has no ip (iproute2)"));
    }
    lost
}
