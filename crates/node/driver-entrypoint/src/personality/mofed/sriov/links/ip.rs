//! Reads addresses, neighbors, routes and rules with the image's `ip` program, as the arguments that set them.

use std::path::PathBuf;

use super::{Node, devlink, program};

/// Protocols of routes that the kernel or a DHCP client adds again.
const AUTOMATIC_PROTOCOLS: [&str; 4] = ["kernel", "dhcp", "ra", "redirect"];

/// Routing tables of every node.
const COMMON_TABLES: [&str; 3] = ["local", "main", "default"];

/// States of a route that are shown, and not set.
const ROUTE_STATES: [&str; 8] =
    ["linkdown", "dead", "pervasive", "offload", "trap", "rt_offload", "rt_trap", "rt_offload_failed"];

const FAMILIES: [&str; 2] = ["-4", "-6"];

/// The `ip` program of the image.
pub(super) struct Ip<'a> {
    node: &'a Node<'a>,
    pub(super) program: PathBuf,
}

/// Routes of all tables, and rules; each line has its address family.
#[derive(Default)]
pub(super) struct Tables {
    routes: Vec<(&'static str, String)>,
    rules: Vec<(&'static str, String)>,
}

impl<'a> Ip<'a> {
    pub(super) fn of(node: &'a Node<'a>) -> Option<Self> {
        Some(Self { node, program: program(&node.paths, "ip")? })
    }

    /// Static addresses of an interface.
    pub(super) fn addresses(&self, name: &str) -> Vec<String> {
        let shown = self.show(&["-o", "address", "show"], name);
        shown.lines().filter_map(|line| parse_address(line, name)).collect()
    }

    /// Permanent neighbors of an interface, and those that it answers for.
    pub(super) fn neighbors(&self, name: &str) -> Vec<String> {
        let permanent = self.show(&["neighbor", "show", "nud", "permanent"], name);
        let permanent = permanent.lines().filter(|line| !line.contains("extern_learn"));
        let permanent = permanent
            .filter_map(|line| Some(format!("{} nud permanent", line.trim().strip_suffix(" PERMANENT")?)));
        let proxies = self.show(&["neighbor", "show", "proxy"], name);
        let proxies = proxies.lines().filter_map(|line| Some(format!("proxy {}", line.split(' ').next()?)));
        permanent.chain(proxies).collect()
    }

    pub(super) fn tables(&self) -> Tables {
        let lines = |words: &[&str]| {
            let of_family = |family: &'static str| {
                let shown = devlink::run(&self.program, &[&["-o", family], words].concat());
                let lines = shown.unwrap_or_default();
                lines.lines().map(|line| (family, line.to_owned())).collect::<Vec<_>>()
            };
            FAMILIES.into_iter().flat_map(of_family).collect()
        };
        Tables { routes: lines(&["route", "show", "table", "all"]), rules: lines(&["rule", "show"]) }
    }

    /// Output for an interface; empty if it does not exist.
    fn show(&self, words: &[&str], name: &str) -> String {
        if !self.node.paths.at("/sys/class/net").join(name).exists() {
            return String::new();
        }
        devlink::run(&self.program, &[words, &["dev", name]].concat()).unwrap_or_default()
    }
}

impl Tables {
    /// Routes of an interface that people or a network manager set, and the rules that name the interface or a table
    /// with such a route.
    pub(super) fn of_interface(&self, name: &str, addresses: &[String]) -> (Vec<String>, Vec<String>) {
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
            let named = ["iif", "oif"].iter().any(|word| attribute(words, word) == Some(name));
            named || table.is_some_and(has_route)
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

/// What identifies a route: family, destination, table and gateways.
pub(super) fn route_key(words: &str) -> Vec<&str> {
    let words: Vec<&str> = words.split(' ').collect();
    let values =
        words.windows(2).filter(|pair| matches!(pair[0], "via" | "table" | "inet6")).map(|pair| pair[1]);
    words.iter().take(2).copied().chain(values).collect()
}

/// What identifies a rule: all but its priority.
pub(super) fn rule_key(words: &str) -> (&str, &str) {
    let (family, rest) = words.split_once(' ').unwrap_or_default();
    (family, rest.split_once(' ').unwrap_or_default().1)
}

fn attribute<'a>(words: &[&'a str], name: &str) -> Option<&'a str> {
    words.iter().skip_while(|word| **word != name).nth(1).copied()
}

/// Parses a line of `ip -o address show`: number, name, family, address, its attributes, and after a backslash its
/// lifetimes. The last attribute may be a label, such as `eth0:1`.
fn parse_address(line: &str, name: &str) -> Option<String> {
    let line = line.split('\\').next()?;
    let words: Vec<&str> =
        line.split_whitespace().skip_while(|word| !word.starts_with("inet")).skip(1).collect();
    if words.contains(&"dynamic") || attribute(&words, "scope") != Some("global") {
        return None;
    }
    let pairs = ["peer", "metric", "brd"];
    let pairs = pairs.into_iter().filter_map(|name| Some([name, attribute(&words, name)?]));
    let flag = words.iter().copied().filter(|word| *word == "noprefixroute");
    let label = words.last().filter(|word| word.strip_prefix(name).is_some_and(|rest| rest.starts_with(':')));
    let label = label.into_iter().flat_map(|label| ["label", label]);
    let words = words.first().copied().into_iter().chain(pairs.flatten()).chain(flag).chain(label);
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
        // Not by the kernel, but by the program that has set the address with `noprefixroute`.
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
    let mut kept = Vec::new();
    let mut rest = words.into_iter();
    while let Some(word) = rest.next() {
        match word {
            // Nexthop objects are lost with their interface; the route has their gateway and interface, too.
            "nhid" => _ = rest.next(),
            "dev" if !has_nexthops => _ = rest.next(),
            "" => {}
            word if ROUTE_STATES.contains(&word) => {}
            word => kept.push(word),
        }
    }
    Some(kept.join(" "))
}
