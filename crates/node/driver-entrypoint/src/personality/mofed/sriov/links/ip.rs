//! Reads addresses, neighbors, routes and rules with the image's `ip` program, as the arguments that set them.

use std::net::IpAddr;

use super::{Node, run_ip};
use crate::routes::contains;

/// Protocols of routes that the kernel or a DHCP client adds again.
const AUTOMATIC_PROTOCOLS: [&str; 4] = ["kernel", "dhcp", "ra", "redirect"];

/// Routing tables of every node.
const COMMON_TABLES: [&str; 3] = ["local", "main", "default"];

/// States of a route that `ip` shows but does not accept as arguments.
const ROUTE_STATES: [&str; 8] =
    ["linkdown", "dead", "pervasive", "offload", "trap", "rt_offload", "rt_trap", "rt_offload_failed"];

const FAMILIES: [&str; 2] = ["-4", "-6"];

/// Lines of the program's output for all interfaces. Routes and rules come with their address family.
pub(super) struct IpOutput {
    addresses: Vec<String>,
    neighbors: Vec<String>,
    proxies: Vec<String>,
    routes: Vec<(&'static str, String)>,
    rules: Vec<(&'static str, String)>,
}

impl IpOutput {
    /// Runs the program. Without it, there are no lines.
    pub(super) fn read(node: &Node<'_>) -> Self {
        let lines = |words: &[&str]| -> Vec<String> {
            let output = run_ip(node, words).unwrap_or_default();
            output.lines().map(str::to_owned).collect()
        };
        let of_family = |family: &'static str, words: &[&str]| {
            let lines = lines(&[&["-o", family], words].concat()).into_iter();
            lines.map(|line| (family, line)).collect::<Vec<_>>()
        };
        let of_both =
            |words: &[&str]| FAMILIES.into_iter().flat_map(|family| of_family(family, words)).collect();
        Self {
            addresses: lines(&["-o", "address", "show"]),
            neighbors: lines(&["neighbor", "show", "nud", "permanent"]),
            proxies: lines(&["neighbor", "show", "proxy"]),
            routes: of_both(&["route", "show", "table", "all"]),
            rules: of_both(&["rule", "show"]),
        }
    }

    /// Static addresses of an interface, except the virtual ones.
    pub(super) fn addresses(&self, name: &str) -> Vec<String> {
        let all = self.address_words(name);
        let others = all.iter().filter(|words| !is_virtual(words, &all));
        others.filter_map(|words| parse_address(words, name)).collect()
    }

    /// Addresses of an interface that a program such as keepalived or kube-vip moves between nodes. They would count as static
    /// otherwise.
    pub(super) fn virtual_addresses(&self, name: &str) -> Vec<&str> {
        let all = self.address_words(name);
        let moved =
            all.iter().filter(|words| is_virtual(words, &all) && parse_address(words, name).is_some());
        moved.filter_map(|words| words.first().copied()).collect()
    }

    fn address_words(&self, name: &str) -> Vec<Vec<&str>> {
        self.addresses.iter().filter_map(|line| address_words(line, name)).collect()
    }

    /// Permanent neighbors of an interface, and its proxy entries.
    pub(super) fn neighbors(&self, name: &str) -> Vec<String> {
        let device = format!(" dev {name} ");
        let permanent = self.neighbors.iter().filter(|line| !line.contains("extern_learn"));
        let permanent = permanent.filter_map(|line| {
            let words = line.trim().strip_suffix(" PERMANENT")?.split_once(&device)?;
            Some(format!("{} {} nud permanent", words.0, words.1))
        });
        let proxies = self.proxies.iter().filter_map(|line| line.split_once(&device));
        permanent.chain(proxies.map(|(address, _)| format!("proxy {address}"))).collect()
    }

    /// Routes of an interface that people or a network manager set, and the rules that name the interface or a table
    /// with such a route.
    pub(super) fn routes_and_rules(&self, name: &str, addresses: &[String]) -> (Vec<String>, Vec<String>) {
        let routes: Vec<(&str, String)> = self
            .routes
            .iter()
            .filter_map(|(family, line)| Some((*family, parse_route(line, name, addresses)?)))
            .collect();
        let is_related = |family: &str, words: &[&str]| {
            let table = attribute(words, "lookup").filter(|table| !COMMON_TABLES.contains(table));
            let has_route = |table: &str| {
                routes.iter().any(|(other, route)| {
                    *other == family
                        && attribute(&route.split(' ').collect::<Vec<_>>(), "table") == Some(table)
                })
            };
            let names_interface = ["iif", "oif"].iter().any(|word| attribute(words, word) == Some(name));
            names_interface || table.is_some_and(has_route)
        };
        let rules = self.rules.iter().filter_map(|(family, line)| {
            let (priority, rule) = line.split_once(':')?;
            let words = rule.split_whitespace().filter(|word| !word.starts_with('['));
            let words: Vec<&str> = words.collect();
            is_related(family, &words).then(|| format!("{family} {priority} {}", words.join(" ")))
        });
        let rules = rules.collect();
        (routes.into_iter().map(|(family, route)| format!("{family} {route}")).collect(), rules)
    }
}

/// Identity of a route: family, destination, table and gateways.
pub(super) fn route_key(words: &str) -> Vec<&str> {
    let words: Vec<&str> = words.split(' ').collect();
    let values =
        words.windows(2).filter(|pair| matches!(pair[0], "via" | "table" | "inet6")).map(|pair| pair[1]);
    words.iter().take(2).copied().chain(values).collect()
}

/// Identity of a rule: everything except its priority.
pub(super) fn rule_key(words: &str) -> (&str, &str) {
    let (family, rest) = words.split_once(' ').unwrap_or_default();
    (family, rest.split_once(' ').unwrap_or_default().1)
}

fn attribute<'a>(words: &[&'a str], name: &str) -> Option<&'a str> {
    words.iter().skip_while(|word| **word != name).nth(1).copied()
}

/// Splits a line of `ip -o address show`: number, name, family, address, its attributes, and after a backslash its lifetimes.
/// Returns the address and its attributes; `None` for addresses of other interfaces.
fn address_words<'a>(line: &'a str, name: &str) -> Option<Vec<&'a str>> {
    let line = line.split('\\').next()?;
    let mut words = line.split_whitespace().skip(1);
    words.next().filter(|interface| *interface == name)?;
    Some(words.skip(1).collect())
}

/// Whether an address is keepalived's, or a single address in the subnet of another one of the interface. Other secondary
/// addresses may be static.
fn is_virtual(words: &[&str], all: &[Vec<&str>]) -> bool {
    // The number is RTPROT_KEEPALIVED (include/uapi/linux/rtnetlink.h), as `ip` prints a protocol that it has no name for.
    let is_keepalived = matches!(attribute(words, "proto"), Some("keepalived" | "0x12"));
    let single = parse_prefix(words).filter(|(address, length)| *length == bits(*address));
    // A network of one address is no subnet.
    let mut subnets = all
        .iter()
        .filter_map(|other| parse_prefix(other))
        .filter(|(network, length)| *length < bits(*network));
    is_keepalived
        || single
            .is_some_and(|(address, _)| subnets.any(|(network, length)| contains(network, length, address)))
}

/// Parses an address with the length of its prefix, such as `10.0.0.2/24`.
fn parse_prefix(words: &[&str]) -> Option<(IpAddr, u32)> {
    let (address, length) = words.first()?.split_once('/')?;
    Some((address.parse().ok()?, length.parse().ok()?))
}

fn bits(address: IpAddr) -> u32 {
    if address.is_ipv4() { 32 } else { 128 }
}

/// Returns the arguments that set a static address. The last attribute may be a label, such as `eth0:1`.
fn parse_address(words: &[&str], name: &str) -> Option<String> {
    if words.contains(&"dynamic") || attribute(words, "scope") != Some("global") {
        return None;
    }
    let attributes = ["peer", "metric", "brd"];
    let attributes = attributes.into_iter().filter_map(|name| Some([name, attribute(words, name)?]));
    let flag = words.iter().copied().filter(|word| *word == "noprefixroute");
    let label = words.last().filter(|word| word.strip_prefix(name).is_some_and(|rest| rest.starts_with(':')));
    let label = label.into_iter().flat_map(|label| ["label", label]);
    let words = words.first().copied().into_iter().chain(attributes.flatten()).chain(flag).chain(label);
    Some(words.collect::<Vec<_>>().join(" "))
}

/// Parses a line of `ip -o route show table all`, without the interface and the state that the kernel adds. `None` for
/// routes of other interfaces, and for those that the kernel or a client adds again.
fn parse_route(line: &str, name: &str, addresses: &[String]) -> Option<String> {
    let words: Vec<&str> = line.split_whitespace().map(|word| word.trim_start_matches('\\')).collect();
    // The kernel's table has the types `local`, `broadcast` and so on.
    let is_unicast = words.first()? == &"default"
        || words[0].contains(['.', ':'])
        || words[0].starts_with(|c: char| c.is_ascii_digit());
    let is_own = words.windows(2).any(|pair| pair == ["dev", name]);
    let is_automatic = match attribute(&words, "proto") {
        // With `noprefixroute`, the program that set the address also added this route, not the kernel.
        Some("kernel") => !attribute(&words, "src").is_some_and(|source| {
            let is_source = |address: &String| address.split(['/', ' ']).next() == Some(source);
            addresses.iter().any(|address| is_source(address) && address.contains(" noprefixroute"))
        }),
        protocol => protocol.is_some_and(|protocol| AUTOMATIC_PROTOCOLS.contains(&protocol)),
    };
    if !is_unicast || !is_own || is_automatic || words.contains(&"expires") {
        return None;
    }
    let has_nexthops = words.contains(&"nexthop");
    let mut arguments = Vec::new();
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        match word {
            // Nexthop objects are lost with their interface; the route also has their gateway and interface.
            "nhid" => _ = words.next(),
            "dev" if !has_nexthops => _ = words.next(),
            "" => {}
            word if ROUTE_STATES.contains(&word) => {}
            word => arguments.push(word),
        }
    }
    Some(arguments.join(" "))
}
