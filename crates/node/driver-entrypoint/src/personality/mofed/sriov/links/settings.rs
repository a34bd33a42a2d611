//! Attributes of an interface in `/sys/class/net`, and its sysctls, each as `FILE VALUE`.

use std::{fs, path::PathBuf};

use super::{Node, entries, name_of, text};

/// Attributes in `/sys/class/net`. The mode of IPoIB limits the MTU.
const ATTRIBUTES: [&str; 8] = [
    "mode",
    "umcast",
    "mtu",
    "tx_queue_len",
    "ifalias",
    "netdev_group",
    "gro_flush_timeout",
    "napi_defer_hard_irqs",
];

/// Directories of `/proc/sys/net` with a directory for each interface, and `default` for new ones.
const SYSCTLS: [&str; 4] = ["ipv4/conf", "ipv6/conf", "ipv4/neigh", "ipv6/neigh"];

/// Sysctls that follow the interface's MTU, or repeat another sysctl in other units.
const IGNORED: [&str; 4] = ["mtu", "base_reachable_time", "retrans_time", "unres_qlen"];

/// Reads the settings of an interface that differ from the defaults of new interfaces; the MTU only with `with_mtu`.
pub(super) fn read(node: &Node<'_>, interface: &str, with_mtu: bool) -> Vec<String> {
    let mut settings = Vec::new();
    for name in ATTRIBUTES.into_iter().filter(|name| with_mtu || *name != "mtu") {
        let value = text(node.paths.at("/sys/class/net").join(interface).join(name));
        // An alias may be any text.
        let value = value.filter(|value| !matches!(value.as_str(), "" | "0") && !value.contains('\n'));
        settings.extend(value.map(|value| format!("{name} {value}")));
    }
    for tree in SYSCTLS {
        let directory = node.paths.at("/proc/sys/net").join(tree);
        for path in entries(directory.join(interface)) {
            let name = name_of(&path);
            if IGNORED.contains(&name.as_str()) {
                continue;
            }
            let Some(value) = text(&path).filter(|value| !value.contains('\n')) else { continue };
            // Only the node's own network namespace has defaults for neighbors.
            if text(directory.join("default").join(&name)).as_ref() != Some(&value) {
                settings.push(format!("{tree}/{name} {value}"));
            }
        }
    }
    settings
}

/// Whether an interface has a setting.
pub(super) fn is_set(node: &Node<'_>, interface: &str, words: &str) -> bool {
    let (file, value) = words.split_once(' ').unwrap_or_default();
    path(node, interface, file).and_then(text).as_deref() == Some(value)
}

/// Writes a setting, unless the interface has it.
pub(super) fn write(node: &Node<'_>, interface: &str, words: &str) -> Result<(), String> {
    let (file, value) = words.split_once(' ').unwrap_or_default();
    let path = path(node, interface, file).ok_or_else(|| "no such setting".to_owned())?;
    if is_set(node, interface, words) {
        return Ok(());
    }
    fs::write(&path, value).map_err(|error| error.to_string())
}

fn path(node: &Node<'_>, interface: &str, file: &str) -> Option<PathBuf> {
    if ATTRIBUTES.contains(&file) {
        return Some(node.paths.at("/sys/class/net").join(interface).join(file));
    }
    let (tree, name) = file.rsplit_once('/')?;
    let is_known = SYSCTLS.contains(&tree) && !name.starts_with('.');
    is_known.then(|| node.paths.at("/proc/sys/net").join(tree).join(interface).join(name))
}
