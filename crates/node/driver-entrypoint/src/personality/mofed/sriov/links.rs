//! Settings that an interface loses with its driver: the membership of a bond or bridge, interfaces on top of it, sysctls,
//! addresses, neighbors, routes and rules. On most nodes a network manager restores them. After a while, this module
//! restores the missing ones with the image's `ip` program (iproute2). Addresses and routes of DHCP and router
//! advertisements are left to their client.

mod ip;
mod settings;

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use self::ip::IpOutput;
use super::{super::devlink, flags, is_mac, run_ip};
use crate::{
    files::{entries, link_name, name_of, names_after, program, text},
    node::Node,
};

/// Polling interval while a network manager may still be at work.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Datapath of Open vSwitch, which adds its ports itself.
const OVS_DATAPATH: &str = "ovs-system";

/// A setting of an interface, or of a VLAN on top of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LinkSetting {
    kind: Kind,
    /// Name of the bond or bridge, or of the VLAN on top; `-` for the interface itself.
    device: String,
    /// MAC address of a bond, ID of a VLAN, file and value of a setting, or the arguments of `ip address replace` and the like;
    /// the address family first for routes and rules.
    words: String,
}

/// Kinds of settings, in the order in which they are restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    /// Bond, bridge or VRF that the interface is a member of.
    Master,
    Vlan,
    /// Sysctl, or attribute in `/sys/class/net`.
    Setting,
    Address,
    Neighbor,
    Route,
    Rule,
}

impl Kind {
    const ALL: [(Self, &str); 7] = [
        // The name that containers of earlier versions wrote.
        (Self::Master, "bond"),
        (Self::Vlan, "vlan"),
        (Self::Setting, "setting"),
        (Self::Address, "address"),
        (Self::Neighbor, "neighbor"),
        (Self::Route, "route"),
        (Self::Rule, "rule"),
    ];

    fn name(self) -> &'static str {
        Self::ALL.iter().find(|(kind, _)| *kind == self).map_or("", |(_, name)| name)
    }

    fn of(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, other)| *other == name).map(|(kind, _)| *kind)
    }
}

impl LinkSetting {
    fn new(kind: Kind, device: &str, words: impl Into<String>) -> Self {
        Self { kind, device: device.to_owned(), words: words.into() }
    }

    pub(super) fn to_line(&self) -> String {
        let Self { kind, device, words } = self;
        format!("{}\n", format!("link {} {device} {words}", kind.name()).trim_end())
    }

    /// Parses the fields after `link`; `None` for a line of another form.
    pub(super) fn of_fields(fields: &[&str]) -> Option<Self> {
        let [kind, device, ref words @ ..] = *fields else { return None };
        let is_name = !device.is_empty() && !device.contains('/') && !device.starts_with('.');
        is_name.then(|| Some(Self::new(Kind::of(kind)?, device, words.join(" "))))?
    }

    /// Whether this current setting makes the `saved` one unnecessary. A network manager may choose the metric of a route
    /// and the priority of a rule itself.
    fn covers(&self, saved: &Self) -> bool {
        let is_same = match self.kind {
            Kind::Master | Kind::Vlan => true,
            Kind::Setting | Kind::Neighbor => self.words == saved.words,
            Kind::Address => self.words.split(' ').next() == saved.words.split(' ').next(),
            Kind::Route => ip::route_key(&self.words) == ip::route_key(&saved.words),
            Kind::Rule => ip::rule_key(&self.words) == ip::rule_key(&saved.words),
        };
        is_same && self.kind == saved.kind && self.device == saved.device
    }

    /// Position in the order of restoration. Routes through a gateway need the routes to the gateway.
    fn order(&self) -> (Kind, bool) {
        (self.kind, self.kind == Kind::Route && self.words.contains(" via "))
    }
}

/// An interface with the settings that it had.
pub(super) type Saved<'a> = (PathBuf, &'a [LinkSetting]);

/// Reads the settings of an interface.
pub(super) fn read(node: &Node<'_>, interface: &Path) -> Vec<LinkSetting> {
    let output = IpOutput::read(node);
    let mut links = read_with(node, &output, interface);
    for (device, name) in names(interface, &vlans(node, interface)) {
        for address in output.virtual_addresses(&name) {
            node.log.step(format!("{address} of {name} is left to the program that moves it between nodes"));
        }
        let settings_of_device = settings::read(node, &name, device != "-").into_iter();
        links.extend(settings_of_device.map(|words| LinkSetting::new(Kind::Setting, &device, words)));
    }
    links
}

/// Reads everything but the attributes and sysctls.
fn read_with(node: &Node<'_>, output: &IpOutput, interface: &Path) -> Vec<LinkSetting> {
    let vlans = vlans(node, interface);
    let mut links = vlans.clone();
    if let Some(name) = link_name(interface.join("master")).filter(|name| name != OVS_DATAPATH) {
        let address = bond_address(node, &name).unwrap_or_default();
        links.insert(0, LinkSetting::new(Kind::Master, &name, address));
    }
    for (device, name) in names(interface, &vlans) {
        let mut add = |kind: Kind, all: Vec<String>| {
            links.extend(all.into_iter().map(|words| LinkSetting::new(kind, &device, words)));
        };
        let addresses = output.addresses(&name);
        let (routes, rules) = output.routes_and_rules(&name, &addresses);
        add(Kind::Address, addresses);
        add(Kind::Neighbor, output.neighbors(&name));
        add(Kind::Route, routes);
        add(Kind::Rule, rules);
    }
    links
}

/// Returns [`LinkSetting::device`] and the interface name, for an interface and each of its VLANs.
fn names(interface: &Path, vlans: &[LinkSetting]) -> Vec<(String, String)> {
    let own = ("-".to_owned(), name_of(interface));
    let names = vlans.iter().map(|vlan| (vlan.device.clone(), vlan.device.clone()));
    std::iter::once(own).chain(names).collect()
}

/// Restores the attributes and sysctls of an interface that is still down, because some have no effect later. Ignores
/// failures: [`restore`] tries again and logs them.
pub(super) fn restore_settings(node: &Node<'_>, interface: &Path, saved: &[LinkSetting]) {
    for link in saved.iter().filter(|link| link.kind == Kind::Setting && link.device == "-") {
        let _ = settings::write(node, &name_of(interface), &link.words);
    }
}

/// Restores the missing settings of interfaces. First polls up to `polls` times, because a network manager may restore them. A
/// poll runs `ip` several times, which takes long on a slow node, so polling also ends after the time of `polls` intervals.
pub(super) fn restore(node: &Node<'_>, saved: &[Saved<'_>], polls: u32) {
    let start = Instant::now();
    for _ in 0..polls {
        if start.elapsed() >= POLL_INTERVAL * polls {
            break;
        }
        if missing_links(node, saved).is_empty() {
            return;
        }
        node.kernel.pause(POLL_INTERVAL);
    }
    let mut missing = missing_links(node, saved);
    while let Some(order) = missing.first().map(|(_, link)| link.order()) {
        for (interface, link) in missing.iter().take_while(|(_, link)| link.order() == order) {
            match set(node, interface, link) {
                Ok(message) => node.log.step(format!("{message}, because no network manager did")),
                Err(error) => {
                    node.log.warn(format!("{} of {}: {error}", link.to_line().trim(), name_of(interface)));
                }
            }
        }
        // The kernel adds some settings with others, such as routes with addresses.
        missing = missing_links(node, saved);
        missing.retain(|(_, link)| link.order() > order);
    }
}

/// Lists the saved settings that the interfaces do not have now, in the order in which they are restored.
fn missing_links<'a>(node: &Node<'_>, saved: &'a [Saved<'_>]) -> Vec<(&'a Path, &'a LinkSetting)> {
    let output = IpOutput::read(node);
    let mut missing: Vec<(&Path, &LinkSetting)> = Vec::new();
    for (interface, links) in saved.iter().filter(|(_, links)| !links.is_empty()) {
        let current = read_with(node, &output, interface);
        let is_set = |link: &LinkSetting| match link.kind {
            Kind::Setting => settings::is_set(node, &device_name(link, interface), &link.words),
            _ => current.iter().any(|current| current.covers(link)),
        };
        for link in links.iter().filter(|link| !is_set(link)) {
            // Two interfaces may have a rule in common.
            let is_listed = link.kind == Kind::Rule
                && missing.iter().any(|(_, other)| other.kind == Kind::Rule && other.words == link.words);
            if !is_listed {
                missing.push((interface.as_path(), link));
            }
        }
    }
    missing.sort_by_key(|(_, link)| link.order());
    missing
}

/// Names the interfaces on top of an interface that [`restore`] does not create again, such as macvlans.
pub(super) fn lost_uppers(node: &Node<'_>, interface: &Path) -> Vec<String> {
    let master = link_name(interface.join("master"));
    let vlans = vlans(node, interface);
    let mut uppers = names_after(interface, "upper_");
    uppers.retain(|name| master.as_ref() != Some(name) && vlans.iter().all(|vlan| vlan.device != *name));
    uppers
}

fn set(node: &Node<'_>, interface: &Path, link: &LinkSetting) -> Result<String, String> {
    let name = name_of(interface);
    let LinkSetting { kind, words, .. } = link;
    let device = &device_name(link, interface);
    let arguments: Vec<&str> = words.split(' ').collect();
    if *kind == Kind::Setting {
        settings::write(node, device, words)?;
        return Ok(format!("restored {} of {device}", words.replacen(' ', "=", 1)));
    }
    if *kind == Kind::Master && is_bond(node, device) {
        return add_to_bond(node, interface, device);
    }
    let ip = program(&node.paths, "ip").ok_or("not restored, because this image has no ip (iproute2)")?;
    let (family, rest) = arguments.split_first().unwrap_or((&"", &[]));
    // A route over several interfaces names them.
    let dev = if arguments.contains(&"nexthop") { vec![] } else { vec!["dev", device] };
    let command = match kind {
        Kind::Master => vec!["link", "set", "dev", &name, "master", device],
        Kind::Vlan => vec!["link", "add", "link", &name, "name", device, "type", "vlan", "id", words],
        Kind::Address => [&["address", "replace"], &arguments[..], &dev].concat(),
        Kind::Neighbor => [&["neighbor", "replace"], &arguments[..], &dev].concat(),
        Kind::Route => [&[family, "route", "replace"], rest, &dev].concat(),
        Kind::Rule | Kind::Setting => [&[family, "rule", "add", "priority"], rest].concat(),
    };
    devlink::run(&ip, &command)?;
    Ok(match kind {
        Kind::Vlan => {
            devlink::run(&ip, &["link", "set", device, "up"])?;
            format!("restored VLAN {device} of {name}")
        }
        Kind::Master => format!("added {name} to {device} again"),
        _ => format!("restored {} {words} of {device}", kind.name()),
    })
}

/// Gives bonds without ports the MAC addresses that they had. Otherwise, the kernel gives such a bond the address of the next port,
/// which may not be the port that was first before: a DHCP server would give the node another address.
pub(super) fn keep_bond_addresses<'a>(node: &Node<'_>, saved: impl Iterator<Item = &'a LinkSetting>) {
    for LinkSetting { device, words: address, .. } in saved.filter(|link| link.kind == Kind::Master) {
        let slaves = node.paths.at("/sys/class/net").join(device).join("bonding/slaves");
        let has_changed = bond_address(node, device).is_some_and(|current| current != *address);
        if !has_changed || address.is_empty() || text(slaves).is_some_and(|ports| !ports.is_empty()) {
            continue;
        }
        match run_ip(node, &["link", "set", "dev", device, "address", address]) {
            Ok(_) => node.log.step(format!("{device} keeps its address {address} without ports")),
            Err(error) => node.log.warn(format!("address {address} of {device} is not restored: {error}")),
        }
    }
}

/// MAC address of a bond; `None` for another interface.
fn bond_address(node: &Node<'_>, name: &str) -> Option<String> {
    let address =
        is_bond(node, name).then(|| text(node.paths.at("/sys/class/net").join(name).join("address")))?;
    address.filter(|address| is_mac(address))
}

fn is_bond(node: &Node<'_>, name: &str) -> bool {
    node.paths.at("/sys/class/net").join(name).join("bonding").is_dir()
}

/// Whether the interface with these settings goes back to a bond.
pub(super) fn is_bond_port(node: &Node<'_>, saved: &[LinkSetting]) -> bool {
    saved.iter().any(|link| link.kind == Kind::Master && is_bond(node, &link.device))
}

/// Adds an interface to a bond. Takes it down first, as bonds require; the bond brings it up.
fn add_to_bond(node: &Node<'_>, interface: &Path, bond: &str) -> Result<String, String> {
    let name = name_of(interface);
    let slaves = node.paths.at("/sys/class/net").join(bond).join("bonding/slaves");
    let down = fs::write(interface.join("flags"), format!("{:#x}", flags(interface) & !1));
    let result = down.and_then(|()| fs::write(slaves, format!("+{name}")));
    result.map(|()| format!("added {name} to {bond} again")).map_err(|error| error.to_string())
}

/// VLANs on top of an interface, from the kernel's table: name, ID, and the interface below.
fn vlans(node: &Node<'_>, interface: &Path) -> Vec<LinkSetting> {
    let table = text(node.paths.at("/proc/1/net/vlan/config")).unwrap_or_default();
    let interface_name = name_of(interface);
    let parse_vlan = |line: &str| {
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        let [name, id, below] = fields[..] else { return None };
        (below == interface_name).then(|| LinkSetting::new(Kind::Vlan, name, id))
    };
    table.lines().filter_map(parse_vlan).collect()
}

fn device_name(link: &LinkSetting, interface: &Path) -> String {
    if link.device == "-" { name_of(interface) } else { link.device.clone() }
}
