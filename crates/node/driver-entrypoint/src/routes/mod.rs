//! Traffic of a node's network interfaces: routes, and the connection to the API server.

mod api_server;

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    path::Path,
};

use crate::{
    files::{name_of, names_after, text},
    node::Paths,
};

/// Kernel datapath of Open vSwitch. Its bridges, such as `br-ex`, are not linked with their ports in sysfs.
const OVS_DATAPATH: &str = "ovs-system";

/// Routes of a node, and its connections to API servers.
pub(crate) struct Network {
    routes: Vec<Route>,
    servers: Vec<SocketAddr>,
}

/// A use of a network interface.
pub(crate) struct TrafficUse {
    pub(crate) description: String,
    /// Whether the node loses its connection to the cluster without it.
    pub(crate) is_uplink: bool,
}

struct Route {
    interface: String,
    network: IpAddr,
    /// Prefix length in bits.
    prefix: u32,
    metric: u32,
}

/// Whether a network with this prefix length contains an address.
pub(crate) fn contains(network: IpAddr, prefix: u32, address: IpAddr) -> bool {
    let common = match (network, address) {
        (IpAddr::V4(network), IpAddr::V4(address)) => (network.to_bits() ^ address.to_bits()).leading_zeros(),
        (IpAddr::V6(network), IpAddr::V6(address)) => (network.to_bits() ^ address.to_bits()).leading_zeros(),
        (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => return false,
    };
    common >= prefix
}

impl Network {
    /// Reads the network state of process 1; with `hostPID` that is the node's.
    pub(crate) fn read(paths: &Paths) -> Self {
        let lines = |name: &str| {
            let text = fs::read_to_string(paths.at(&format!("/proc/1/net/{name}"))).unwrap_or_default();
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let mut routes: Vec<Route> = lines("route").iter().filter_map(|line| parse_route(line)).collect();
        routes.extend(lines("ipv6_route").iter().filter_map(|line| parse_route_v6(line)));
        let sockets: Vec<String> = ["tcp", "tcp6"].iter().flat_map(|name| lines(name)).collect();
        Self { routes, servers: api_server::api_servers(paths, &sockets) }
    }

    /// Lists the uses of an interface, directly or through a bond, a VLAN or a bridge on top of it.
    pub(crate) fn uses(&self, interface: &Path) -> Vec<TrafficUse> {
        let names = self.with_stacked(interface);
        let via = |name: &str| {
            let is_itself = interface.file_name().is_some_and(|device| device == name);
            if is_itself { String::new() } else { format!(" by {name}") }
        };
        let interface_routes = self.routes.iter().filter(|route| names.contains(&route.interface));
        let mut uses = Vec::new();
        let mut add = |description: String, is_uplink: bool| uses.push(TrafficUse { description, is_uplink });
        if let Some(route) = interface_routes.clone().find(|route| self.is_default(route)) {
            add(format!("the node's default route{}", via(&route.interface)), true);
        } else if let Some(route) = interface_routes.clone().next() {
            add(format!("routes{}", via(&route.interface)), false);
        }
        if let Some(server) = self.servers_through(interface).next() {
            add(format!("the connection to the API server at {server}"), true);
        }
        uses
    }

    /// Lists the API servers whose route is an interface, or one on top of it.
    pub(crate) fn servers_through(&self, interface: &Path) -> impl Iterator<Item = SocketAddr> {
        let names = self.with_stacked(interface);
        self.servers.iter().filter(move |server| self.is_routed_by(&names, server.ip())).copied()
    }

    /// Whether an interface, or one on top of it, has the route to an address.
    pub(crate) fn carries(&self, interface: &Path, address: IpAddr) -> bool {
        self.is_routed_by(&self.with_stacked(interface), address)
    }

    /// Whether the kernel routes an address through one of these interfaces.
    fn is_routed_by(&self, names: &BTreeSet<String>, address: IpAddr) -> bool {
        let routes = self.routes.iter().filter(|route| contains(route.network, route.prefix, address));
        let best = routes.min_by_key(|route| (std::cmp::Reverse(route.prefix), route.metric));
        best.is_some_and(|route| names.contains(&route.interface))
    }

    /// Whether the route is a default route, and none of the same IP version has a lower metric.
    fn is_default(&self, route: &Route) -> bool {
        let default_routes = self
            .routes
            .iter()
            .filter(|other| other.prefix == 0 && other.network.is_ipv4() == route.network.is_ipv4());
        route.prefix == 0 && default_routes.map(|other| other.metric).min() == Some(route.metric)
    }

    /// Returns the names of an interface and of the interfaces on top of it. A port of Open vSwitch has no links to the bridges
    /// that use it, so all interfaces with routes and nothing below count.
    fn with_stacked(&self, interface: &Path) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        add_stacked(interface, &mut names);
        if names.contains(OVS_DATAPATH) {
            let route_names = self.routes.iter().map(|route| route.interface.as_str());
            let internal = route_names.filter(|name| has_nothing_below(&interface.with_file_name(name)));
            names.extend(internal.map(str::to_owned));
        }
        names
    }
}

/// Whether an interface has no device, no interface below it, and no program that drives it as a tunnel.
fn has_nothing_below(interface: &Path) -> bool {
    let is_peer = text(interface.join("iflink")) != text(interface.join("ifindex"));
    let has_other = ["device", "tun_flags"].iter().any(|name| interface.join(name).exists());
    !has_other && !is_peer && names_after(interface, "lower_").is_empty()
}

/// Collects the names of an interface and of all interfaces on top of it.
fn add_stacked(interface: &Path, names: &mut BTreeSet<String>) {
    if !names.insert(name_of(interface)) {
        return;
    }
    for upper in names_after(interface, "upper_") {
        add_stacked(&interface.with_file_name(upper), names);
    }
}

/// Parses a line of `/proc/net/route`; addresses are hexadecimal, in the processor's byte order (proc_net(5)). Skips
/// routes that reject packets.
fn parse_route(line: &str) -> Option<Route> {
    const REJECT: u32 = 0x200;
    let fields: Vec<&str> = line.split_whitespace().collect();
    let address = |index: usize| word(fields.get(index)?).map(Ipv4Addr::from);
    let prefix = address(7)?.to_bits().leading_ones();
    let flags = u32::from_str_radix(fields.get(3)?, 16).ok()?;
    let metric = fields.get(6)?.parse().ok()?;
    let interface = (*fields.first()?).to_owned();
    (flags & REJECT == 0).then_some(Route { interface, network: address(1)?.into(), prefix, metric })
}

/// Parses a line of `/proc/net/ipv6_route`: network, its length, source, its length, next hop, metric, counters, flags,
/// interface (`net/ipv6/route.c`). Skips link-local and multicast routes, which every interface has, and the loopback
/// interface.
fn parse_route_v6(line: &str) -> Option<Route> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let network = Ipv6Addr::from(u128::from_str_radix(fields.first()?, 16).ok()?);
    let prefix = u32::from_str_radix(fields.get(1)?, 16).ok()?;
    let metric = u32::from_str_radix(fields.get(5)?, 16).ok()?;
    let interface = (*fields.get(9)?).to_owned();
    let is_relevant = !network.is_unicast_link_local() && !network.is_multicast() && interface != "lo";
    is_relevant.then_some(Route { interface, network: network.into(), prefix, metric })
}

fn word(hexadecimal: &str) -> Option<[u8; 4]> {
    u32::from_str_radix(hexadecimal, 16).ok().map(u32::to_ne_bytes)
}

#[cfg(test)]
mod tests;
