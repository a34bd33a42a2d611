//! Traffic of a node's network interfaces: routes, and the connection to the API server.

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::Path,
};

use crate::{
    files::{entries, text},
    node::Paths,
};

/// Default port of API servers.
const API_PORT: u16 = 6443;
/// HTTPS port, which API servers of managed clusters use. Other servers use it, too, so only a kubelet's connections
/// count.
const WEB_PORT: u16 = 443;
/// Programs that are or contain a kubelet.
const KUBELETS: [&str; 5] = ["kubelet", "k3s-agent", "k3s-server", "rke2", "kubelite"];

/// Routes of a node, and its connections to API servers.
pub(crate) struct Network {
    routes: Vec<Route>,
    servers: Vec<(IpAddr, u16)>,
}

struct Route {
    interface: String,
    network: IpAddr,
    /// Prefix length in bits.
    prefix: u32,
}

impl Route {
    fn leads_to(&self, address: IpAddr) -> bool {
        let differ = match (self.network, address) {
            (IpAddr::V4(network), IpAddr::V4(address)) => {
                u128::from(network.to_bits() ^ address.to_bits()) << 96
            }
            (IpAddr::V6(network), IpAddr::V6(address)) => network.to_bits() ^ address.to_bits(),
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => return false,
        };
        differ.leading_zeros() >= self.prefix
    }
}

impl Network {
    /// Reads the network state of process 1; with `hostPID` that is the node's.
    pub(crate) fn read(paths: &Paths) -> Self {
        let lines = |name: &str| {
            let text = fs::read_to_string(paths.at(&format!("/proc/1/net/{name}"))).unwrap_or_default();
            text.lines().map(str::to_owned).collect::<Vec<_>>()
        };
        let mut routes: Vec<Route> = lines("route").iter().filter_map(|line| route(line)).collect();
        routes.extend(lines("ipv6_route").iter().filter_map(|line| route_v6(line)));
        let connections: Vec<Connection> = ["tcp", "tcp6"]
            .iter()
            .flat_map(|name| lines(name))
            .filter_map(|line| connection(&line))
            .collect();
        let of_kubelet =
            if connections.iter().any(|to| to.port == WEB_PORT) { sockets(paths) } else { BTreeSet::new() };
        let is_api =
            |to: &&Connection| to.port == API_PORT || to.port == WEB_PORT && of_kubelet.contains(&to.inode);
        let servers = connections.iter().filter(is_api).map(|to| (to.address, to.port)).collect();
        Self { routes, servers }
    }

    /// Lists the uses of an interface, directly or through a bond, a VLAN or a bridge on top of it.
    pub(crate) fn uses(&self, interface: &Path) -> Vec<String> {
        let mut names = BTreeSet::new();
        stack_up(interface, &mut names);
        let by = |name: &str| {
            let is_itself = interface.file_name().is_some_and(|device| device == name);
            if is_itself { String::new() } else { format!(" by {name}") }
        };
        let own = self.routes.iter().filter(|route| names.contains(&route.interface));
        let mut uses = Vec::new();
        if let Some(route) = own.clone().find(|route| route.prefix == 0) {
            uses.push(format!("the node's default route{}", by(&route.interface)));
        } else if let Some(route) = own.clone().next() {
            uses.push(format!("routes{}", by(&route.interface)));
        }
        let best = |server: IpAddr| {
            let routes = self.routes.iter().filter(|route| route.leads_to(server));
            routes.max_by_key(|route| route.prefix)
        };
        let carried = |(address, _): &&(IpAddr, u16)| {
            best(*address).is_some_and(|route| names.contains(&route.interface))
        };
        if let Some((address, port)) = self.servers.iter().find(carried) {
            let server = std::net::SocketAddr::new(*address, *port);
            uses.push(format!("the connection to the API server at {server}"));
        }
        uses
    }
}

/// Collects the names of an interface and of all interfaces on top of it.
fn stack_up(interface: &Path, names: &mut BTreeSet<String>) {
    let Some(name) = interface.file_name().and_then(|name| name.to_str()) else { return };
    if !names.insert(name.to_owned()) {
        return;
    }
    for link in entries(interface) {
        let upper =
            link.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix("upper_"));
        if let Some(upper) = upper {
            stack_up(&interface.with_file_name(upper), names);
        }
    }
}

/// Parses a line of `/proc/net/route`; addresses are hexadecimal, in the processor's byte order (proc_net(5)).
fn route(line: &str) -> Option<Route> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let address = |index: usize| word(fields.get(index)?).map(Ipv4Addr::from);
    let prefix = address(7)?.to_bits().leading_ones();
    Some(Route { interface: (*fields.first()?).to_owned(), network: address(1)?.into(), prefix })
}

/// Parses a line of `/proc/net/ipv6_route`: network, its length, source, its length, next hop, metric, counters, flags,
/// interface (`net/ipv6/route.c`). Skips link-local and multicast routes, which every interface has, and the loopback
/// interface.
fn route_v6(line: &str) -> Option<Route> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let network = Ipv6Addr::from(u128::from_str_radix(fields.first()?, 16).ok()?);
    let prefix = u32::from_str_radix(fields.get(1)?, 16).ok()?;
    let interface = (*fields.get(9)?).to_owned();
    let is_told = !network.is_unicast_link_local() && !network.is_multicast() && interface != "lo";
    is_told.then_some(Route { interface, network: network.into(), prefix })
}

struct Connection {
    address: IpAddr,
    port: u16,
    inode: String,
}

/// Parses a line of `/proc/net/tcp` or `/proc/net/tcp6`; `None` if the connection is not established.
fn connection(line: &str) -> Option<Connection> {
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (address, port) = fields.get(2)?.split_once(':')?;
    let address = if address.len() == 32 {
        let words = (0..4).map(|index| word(address.get(index * 8..index * 8 + 8)?));
        let bytes: Vec<[u8; 4]> = words.collect::<Option<_>>()?;
        Ipv6Addr::from(<[u8; 16]>::try_from(bytes.concat()).ok()?).to_canonical()
    } else {
        Ipv4Addr::from(word(address)?).into()
    };
    let port = u16::from_str_radix(port, 16).ok()?;
    let inode = fields.get(9).copied().unwrap_or_default().to_owned();
    (*fields.get(3)? == "01").then_some(Connection { address, port, inode })
}

fn word(hexadecimal: &str) -> Option<[u8; 4]> {
    u32::from_str_radix(hexadecimal, 16).ok().map(u32::to_ne_bytes)
}

/// Lists the inodes of kubelets' sockets.
fn sockets(paths: &Paths) -> BTreeSet<String> {
    let processes = entries(paths.at("/proc")).into_iter();
    let kubelets = processes
        .filter(|process| text(process.join("comm")).is_some_and(|name| KUBELETS.contains(&name.as_str())));
    let files = kubelets.flat_map(|process| entries(process.join("fd")));
    let inode = |file: &Path| {
        let link = fs::read_link(file).ok()?;
        Some(link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.to_owned())
    };
    files.filter_map(|file| inode(&file)).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::Bench;

    fn uses(bench: &Bench, name: &str) -> Vec<String> {
        Network::read(&bench.node().paths).uses(&bench.at(&format!("/sys/class/net/{name}")))
    }

    const HEAD: &str = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";

    #[test]
    fn what_a_bond_and_its_vlan_carry_goes_through_the_devices_below() {
        let bench = Bench::new();
        for (lower, upper) in
            [("eth0", "bond0"), ("eth1", "bond0"), ("bond0", "bond0.7"), ("bond0.7", "bond0")]
        {
            let place = bench.at(&format!("/sys/class/net/{lower}"));
            fs::create_dir_all(&place).unwrap();
            symlink(format!("../{upper}"), place.join(format!("upper_{upper}"))).unwrap();
        }
        bench.file(
            "/proc/1/net/route",
            &format!("{HEAD}bond0.7\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"),
        );
        bench.file(
            "/proc/1/net/tcp",
            "  sl  local_address rem_address   st\n   0: 0100007F:9C40 0907A8C0:192B 01 0:0 0:0 0 0 0 77\n",
        );
        for name in ["eth0", "eth1"] {
            assert_eq!(
                uses(&bench, name),
                [
                    "the node's default route by bond0.7",
                    "the connection to the API server at 192.168.7.9:6443"
                ]
            );
        }
        assert_eq!(uses(&bench, "eth2"), [""; 0]);
    }

    #[test]
    fn routes_of_both_generations_count() {
        let bench = Bench::new();
        let (zero, host) = ("0".repeat(32), "20010db8000000000000000000000009");
        let route = |network: &str, prefix: &str, interface: &str| {
            format!("{network} {prefix} {zero} 00 {zero} 00000400 00000001 00000000 00000003 {interface}\n")
        };
        let routes = [
            route(&zero, "00", "eth0"),
            route("20010db8000000000000000000000000", "40", "eth1"),
            route("fe800000000000000000000000000000", "40", "eth2"),
            route("ff000000000000000000000000000000", "08", "eth2"),
            route(host, "80", "lo"),
        ];
        bench.file("/proc/1/net/ipv6_route", &routes.concat());
        // Remote address: 2001:db8::9, port 6443.
        let remote = "B80D0120000000000000000009000000:192B";
        bench.file("/proc/1/net/tcp6", &format!("head\n 0: {zero}:9C40 {remote} 01 0:0 0:0 0 0 0 77\n"));
        assert_eq!(uses(&bench, "eth0"), ["the node's default route"]);
        assert_eq!(
            uses(&bench, "eth1"),
            ["routes", "the connection to the API server at [2001:db8::9]:6443"]
        );
        assert_eq!(uses(&bench, "eth2"), [""; 0]);
    }

    /// Among all connections to port 443, only the kubelet's leads to the API server.
    #[test]
    fn an_api_server_at_the_webs_port_is_known_by_the_kubelet() {
        let bench = Bench::new();
        bench.file(
            "/proc/1/net/route",
            &format!("{HEAD}eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"),
        );
        let line =
            |address: &str, inode: u32| format!("0: 0100007F:9C40 {address}:01BB 01 0:0 0:0 0 0 0 {inode}\n");
        bench.file("/proc/1/net/tcp", &format!("head\n{}{}", line("0100000A", 76), line("0200000A", 77)));
        assert_eq!(uses(&bench, "eth0"), ["the node's default route"]);
        bench.file("/proc/9/comm", "kubelet\n");
        fs::create_dir_all(bench.at("/proc/9/fd")).unwrap();
        symlink("socket:[77]", bench.at("/proc/9/fd/5")).unwrap();
        assert_eq!(
            uses(&bench, "eth0"),
            ["the node's default route", "the connection to the API server at 10.0.0.2:443"]
        );
    }
}
