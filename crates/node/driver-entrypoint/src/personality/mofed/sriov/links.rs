//! Settings that a device's interface loses with its driver: the membership of a bond, VLANs, static addresses and routes.
//! On most nodes a network manager restores them. After a while, this module restores the missing ones with the image's
//! `ip` program (iproute2). Addresses and routes of DHCP and router advertisements are left to their client.

use std::{
    fs,
    path::{Path, PathBuf},
    time::Duration,
};

use super::{super::devlink, flags, link_target_name};
use crate::{
    files::{program, text},
    node::Node,
};

/// Polling interval while a network manager may still be at work.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Protocols of routes that the kernel or a DHCP client adds again.
const AUTOMATIC_PROTOCOLS: [&str; 4] = ["kernel", "dhcp", "ra", "redirect"];

/// A setting of an interface, or of a VLAN on top of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Bond(String),
    Vlan {
        name: String,
        id: String,
    },
    /// Arguments of `ip address replace`; the VLAN's name, or `-` for the interface itself.
    Address {
        device: String,
        words: String,
    },
    /// Arguments of `ip route replace`, with the address family first.
    Route {
        device: String,
        words: String,
    },
}

impl Link {
    pub(super) fn to_line(&self) -> String {
        match self {
            Self::Bond(name) => format!("link bond {name}\n"),
            Self::Vlan { name, id } => format!("link vlan {name} {id}\n"),
            Self::Address { device, words } => format!("link address {device} {words}\n"),
            Self::Route { device, words } => format!("link route {device} {words}\n"),
        }
    }

    /// Parses the fields after `link`; `None` for a line of another form.
    pub(super) fn of_fields(fields: &[&str]) -> Option<Self> {
        let is_name = |name: &&str| !name.is_empty() && !name.contains('/') && !name.starts_with('.');
        match *fields {
            ["bond", name] => Some(Self::Bond(name.to_owned())),
            ["vlan", name, id] => Some(Self::Vlan { name: name.to_owned(), id: id.to_owned() }),
            ["address", device, ref words @ ..] => {
                Some(Self::Address { device: device.to_owned(), words: words.join(" ") })
            }
            ["route", device, ref words @ ..] => {
                Some(Self::Route { device: device.to_owned(), words: words.join(" ") })
            }
            _ => None,
        }
        .filter(|_| fields.get(1).is_some_and(is_name))
    }
}

/// Reads the settings of an interface.
pub(super) fn read(node: &Node<'_>, interface: &Path) -> Vec<Link> {
    let mut links = Vec::new();
    let bond =
        link_target_name(&interface.join("master")).filter(|_| interface.join("master/bonding").is_dir());
    links.extend(bond.map(Link::Bond));
    let vlans = vlans(node, interface);
    links.extend(vlans.iter().cloned());
    let Some(ip) = Ip::of(node) else { return links };
    let name = name_of(interface);
    let names = vlans.iter().filter_map(|vlan| match vlan {
        Link::Vlan { name, .. } => Some((name.clone(), name.clone())),
        _ => None,
    });
    for (device, name) in [("-".to_owned(), name)].into_iter().chain(names) {
        links.extend(
            ip.addresses(&name).into_iter().map(|words| Link::Address { device: device.clone(), words }),
        );
        for family in ["-4", "-6"] {
            let routes = ip.routes(family, &name).into_iter();
            links.extend(
                routes
                    .map(|route| Link::Route { device: device.clone(), words: format!("{family} {route}") }),
            );
        }
    }
    links
}

/// Restores what is missing of an interface. Polls up to `polls` times for a network manager to do so.
pub(super) fn restore(node: &Node<'_>, interface: &Path, wanted: &[Link], polls: u32) {
    let ip = Ip::of(node);
    let missing = || -> Vec<&Link> {
        wanted.iter().filter(|link| !is_set(node, ip.as_ref(), interface, link)).collect()
    };
    for _ in 0..polls {
        if missing().is_empty() {
            return;
        }
        node.kernel.pause(POLL_INTERVAL);
    }
    // In the order of `read`: addresses need their VLANs, and routes their addresses.
    for link in missing() {
        match set_link(node, ip.as_ref(), interface, link) {
            Ok(done) => node.log.step(format!("{done}, because no network manager did")),
            Err(error) => {
                node.log.warn(format!("{} of {}: {error}", link.to_line().trim(), name_of(interface)));
            }
        }
    }
}

fn is_set(node: &Node<'_>, ip: Option<&Ip<'_>>, interface: &Path, link: &Link) -> bool {
    // The same address, or a route to the same network by the same gateway: the metric may be the manager's own.
    let is_in = |words: &str, all: &[String]| {
        let first = words.split(' ').next();
        let gateway = words.split_once("via ").and_then(|(_, rest)| rest.split(' ').next());
        let has = |line: &String| {
            line.split(' ').next() == first
                && gateway.is_none_or(|gateway| line.split(' ').any(|word| word == gateway))
        };
        all.iter().any(has)
    };
    match link {
        Link::Bond(bond) => link_target_name(&interface.join("master")).as_ref() == Some(bond),
        Link::Vlan { name, .. } => node.paths.at("/sys/class/net").join(name).exists(),
        Link::Address { device, words } => {
            ip.is_some_and(|ip| is_in(words, &ip.addresses(&device_name(device, interface))))
        }
        Link::Route { device, words } => {
            let (family, words) = words.split_once(' ').unwrap_or_default();
            ip.is_some_and(|ip| is_in(words, &ip.routes(family, &device_name(device, interface))))
        }
    }
}

fn set_link(node: &Node<'_>, ip: Option<&Ip<'_>>, interface: &Path, link: &Link) -> Result<String, String> {
    let name = name_of(interface);
    let run = |words: &[&str]| {
        let ip = ip.ok_or_else(|| "not restored, because this image has no ip (iproute2)".to_owned())?;
        devlink::run(&ip.program, words)
    };
    match link {
        Link::Bond(bond) => add_to_bond(node, interface, bond),
        Link::Vlan { name: vlan, id } => {
            run(&["link", "add", "link", &name, "name", vlan, "type", "vlan", "id", id])?;
            run(&["link", "set", vlan, "up"])?;
            Ok(format!("restored VLAN {vlan} of {name}"))
        }
        Link::Address { device, words } => {
            let device = device_name(device, interface);
            let arguments: Vec<&str> = words.split(' ').collect();
            run(&[&["address", "replace"], &arguments[..], &["dev", device.as_str()]].concat())?;
            Ok(format!("restored address {words} of {device}"))
        }
        Link::Route { device, words } => {
            let device = device_name(device, interface);
            let (family, route) = words.split_once(' ').unwrap_or_default();
            let arguments: Vec<&str> = route.split(' ').collect();
            run(&[&[family, "route", "replace"], &arguments[..], &["dev", device.as_str()]].concat())?;
            Ok(format!("restored route {route} of {device}"))
        }
    }
}

/// Adds an interface to a bond. Only one that is down can be added; the bond brings it up.
fn add_to_bond(node: &Node<'_>, interface: &Path, bond: &str) -> Result<String, String> {
    let name = name_of(interface);
    let slaves = node.paths.at("/sys/class/net").join(bond).join("bonding/slaves");
    let down = fs::write(interface.join("flags"), format!("{:#x}", flags(interface) & !1));
    let added = down.and_then(|()| fs::write(slaves, format!("+{name}")));
    added.map(|()| format!("added {name} to {bond} again")).map_err(|error| error.to_string())
}

/// VLANs on top of an interface, from the kernel's table: name, ID, and the interface below.
fn vlans(node: &Node<'_>, interface: &Path) -> Vec<Link> {
    let table = text(node.paths.at("/proc/1/net/vlan/config")).unwrap_or_default();
    let own = name_of(interface);
    let parse_vlan = |line: &str| {
        let fields: Vec<&str> = line.split('|').map(str::trim).collect();
        let [name, id, below] = fields[..] else { return None };
        (below == own).then(|| Link::Vlan { name: name.to_owned(), id: id.to_owned() })
    };
    table.lines().filter_map(parse_vlan).collect()
}

fn device_name(device: &str, interface: &Path) -> String {
    if device == "-" { name_of(interface) } else { device.to_owned() }
}

fn name_of(interface: &Path) -> String {
    interface.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// The `ip` program of the image.
struct Ip<'a> {
    node: &'a Node<'a>,
    program: PathBuf,
}

impl<'a> Ip<'a> {
    fn of(node: &'a Node<'a>) -> Option<Self> {
        Some(Self { node, program: program(&node.paths, "ip")? })
    }

    /// Static addresses of an interface, each as the arguments that set it.
    fn addresses(&self, name: &str) -> Vec<String> {
        self.show(&["-o", "address", "show"], name).lines().filter_map(parse_address).collect()
    }

    /// Routes of an interface in the main table that people or a network manager set.
    fn routes(&self, family: &str, name: &str) -> Vec<String> {
        self.show(&[family, "route", "show"], name).lines().filter_map(parse_route).collect()
    }

    /// Output for an interface; empty if it does not exist.
    fn show(&self, words: &[&str], name: &str) -> String {
        if !self.node.paths.at("/sys/class/net").join(name).exists() {
            return String::new();
        }
        devlink::run(&self.program, &[words, &["dev", name]].concat()).unwrap_or_default()
    }
}

/// Parses a line of `ip -o address show`: number, name, family, address, its attributes, and after a backslash its
/// lifetimes.
fn parse_address(line: &str) -> Option<String> {
    let line = line.split('\\').next()?;
    let words: Vec<&str> =
        line.split_whitespace().skip_while(|word| !word.starts_with("inet")).skip(1).collect();
    let attribute = |name: &str| words.iter().skip_while(|word| **word != name).nth(1).copied();
    if words.contains(&"dynamic") || attribute("scope") != Some("global") {
        return None;
    }
    let broadcast = attribute("brd").into_iter().flat_map(|broadcast| ["brd", broadcast]);
    let flag = words.iter().copied().filter(|word| *word == "noprefixroute");
    let words: Vec<&str> = words.first().copied().into_iter().chain(broadcast).chain(flag).collect();
    Some(words.join(" "))
}

/// Parses a line of `ip route show dev NAME`, without the state that the kernel adds.
fn parse_route(line: &str) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let attribute = |name: &str| words.iter().skip_while(|word| **word != name).nth(1).copied();
    if attribute("proto").is_some_and(|protocol| AUTOMATIC_PROTOCOLS.contains(&protocol))
        || words.contains(&"expires")
    {
        return None;
    }
    let words: Vec<&str> = words.into_iter().filter(|word| !matches!(*word, "linkdown" | "dead")).collect();
    (!words.is_empty()).then(|| words.join(" "))
}
