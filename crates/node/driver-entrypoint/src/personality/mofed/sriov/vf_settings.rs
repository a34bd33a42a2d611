//! Settings that a physical function has for its virtual functions, which the image's `ip` program reads and sets.

use std::path::Path;

use super::run_ip;
use crate::{files::name_of, node::Node};

/// Reads the settings, each as the arguments that follow `ip link set dev INTERFACE vf`.
pub(super) fn read(node: &Node<'_>, interface: &Path) -> Vec<String> {
    let output = run_ip(node, &["link", "show", "dev", &name_of(interface)]).unwrap_or_default();
    output.lines().filter_map(|line| parse(line.trim())).flatten().collect()
}

/// Sets the settings that differ from the saved ones. Logs those that a device does not support.
pub(super) fn restore(node: &Node<'_>, interface: &Path, saved: &[String]) {
    let current = read(node, interface);
    for words in saved.iter().filter(|words| !current.contains(words)) {
        let name = name_of(interface);
        let args: Vec<_> = ["link", "set", "dev", &name, "vf"].into_iter().chain(words.split(' ')).collect();
        match run_ip(node, &args) {
            Ok(_) => node.log.step(format!("ip {}", args.join(" "))),
            Err(error) => node.log.warn(format!("ip {}: {error}", args.join(" "))),
        }
    }
}

/// Parses a line of `ip link show`, such as `vf 0     link/ether 02:00:00:00:00:02 brd ff:ff:ff:ff:ff:ff, vlan 5, qos 3,
/// vlan protocol 802.1ad, max_tx_rate 100Mbps, spoof checking off, link-state auto, trust off`.
fn parse(line: &str) -> Option<Vec<String>> {
    let mut parts = line.strip_prefix("vf ")?.split(", ");
    let address_words: Vec<&str> = parts.next()?.split_whitespace().collect();
    let parts: Vec<&str> = parts.collect();
    let value = |name: &str| parts.iter().find_map(|part| part.strip_prefix(name)?.strip_prefix(' '));
    let rate =
        |name: &str| value(name).and_then(|value| value.strip_suffix("Mbps")).filter(|rate| *rate != "0");
    let is_set = |address: &&str| !address.chars().all(|c| "0:".contains(c));
    let number = address_words.first()?;
    // The address of an InfiniBand function is longer, and follows from its GUIDs.
    let mac = address_words.get(2).copied().filter(|mac| mac.len() == 17).filter(is_set);
    let groups: [&[(&str, Option<&str>)]; 9] = [
        &[("mac", mac)],
        &[("vlan", value("vlan")), ("qos", value("qos")), ("proto", value("vlan protocol"))],
        &[("max_tx_rate", rate("max_tx_rate")), ("min_tx_rate", rate("min_tx_rate"))],
        &[("spoofchk", value("spoof checking"))],
        &[("node_guid", value("NODE_GUID").filter(is_set))],
        &[("port_guid", value("PORT_GUID").filter(is_set))],
        &[("state", value("link-state"))],
        &[("trust", value("trust"))],
        &[("query_rss", value("query_rss"))],
    ];
    let words = |group: &[(&str, Option<&str>)]| {
        let set = group.iter().filter_map(|(name, value)| Some(format!(" {name} {}", (*value)?)));
        Some(set.collect::<String>()).filter(|words| !words.is_empty())
    };
    Some(groups.into_iter().filter_map(words).map(|words| format!("{number}{words}")).collect())
}
