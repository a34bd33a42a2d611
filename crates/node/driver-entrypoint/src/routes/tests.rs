//! Tests of routes and of the connections to API servers, over recorded `/proc` and `/sys`.

use std::os::unix::fs::symlink;

use super::*;
use crate::testing::Bench;

fn uses(bench: &Bench, name: &str) -> Vec<String> {
    let uses = Network::read(&bench.node().paths).uses(&bench.at(&format!("/sys/class/net/{name}")));
    uses.into_iter().map(|found| found.description).collect()
}

const HEAD: &str = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n";

#[test]
fn traffic_of_a_bond_and_its_vlan_counts_for_the_devices_below() {
    let bench = Bench::new();
    for (lower, upper) in [("eth0", "bond0"), ("eth1", "bond0"), ("bond0", "bond0.7"), ("bond0.7", "bond0")] {
        let place = bench.at(&format!("/sys/class/net/{lower}"));
        fs::create_dir_all(&place).unwrap();
        symlink(format!("../{upper}"), place.join(format!("upper_{upper}"))).unwrap();
    }
    bench.write(
        "/proc/1/net/route",
        &format!("{HEAD}bond0.7\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"),
    );
    bench.write(
        "/proc/1/net/tcp",
        "  sl  local_address rem_address   st\n   0: 0100007F:9C40 0907A8C0:192B 01 0:0 0:0 0 0 0 77\n",
    );
    for name in ["eth0", "eth1"] {
        assert_eq!(
            uses(&bench, name),
            ["the node's default route by bond0.7", "the connection to the API server at 192.168.7.9:6443"]
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
    bench.write("/proc/1/net/ipv6_route", &routes.concat());
    // Remote address: 2001:db8::9, port 6443.
    let remote = "B80D0120000000000000000009000000:192B";
    bench.write("/proc/1/net/tcp6", &format!("head\n 0: {zero}:9C40 {remote} 01 0:0 0:0 0 0 0 77\n"));
    assert_eq!(uses(&bench, "eth0"), ["the node's default route"]);
    assert_eq!(uses(&bench, "eth1"), ["routes", "the connection to the API server at [2001:db8::9]:6443"]);
    assert_eq!(uses(&bench, "eth2"), [""; 0]);
}

/// Line of `/proc/net/tcp` for a connection from port 40000 that root owns.
fn line(remote: &str, inode: u32) -> String {
    format!("0: 0700000A:9C40 {remote} 01 0:0 0:0 0 0 0 {inode}\n")
}

/// A bench whose default route is by `eth0`, with these connections.
fn connected(lines: &[String]) -> Bench {
    let bench = Bench::new();
    bench.write(
        "/proc/1/net/route",
        &format!("{HEAD}eth0\t00000000\t0100000A\t0003\t0\t0\t0\t00000000\t0\t0\t0\n"),
    );
    bench.write("/proc/1/net/tcp", &format!("head\n{}", lines.concat()));
    bench
}

/// Only the connections that the kubelet opened to other hosts lead to the API server, at any port. Connections from other
/// programs to the kubelet, and connections of the kubelet to its own node, do not count.
#[test]
fn an_api_server_at_any_port_is_found_by_the_kubelets_connection() {
    let listening = "0: 00000000:280A 00000000:0000 0A 0:0 0:0 0 0 0 70\n".to_owned();
    let incoming = "0: 0700000A:280A 0300000A:8000 01 0:0 0:0 0 0 0 71\n".to_owned();
    let to_itself = line("0700000A:2378", 72);
    let bench =
        connected(&[listening, incoming, to_itself, line("0100000A:01BB", 76), line("0200000A:20FB", 77)]);
    bench.write("/proc/9/comm", "kubelet\n");
    fs::create_dir_all(bench.at("/proc/9/fd")).unwrap();
    for inode in [70, 71, 72, 77] {
        symlink(format!("socket:[{inode}]"), bench.at(&format!("/proc/9/fd/{inode}"))).unwrap();
    }
    assert_eq!(
        uses(&bench, "eth0"),
        ["the node's default route", "the connection to the API server at 10.0.0.2:8443"]
    );
}

/// Without hostPID.
#[test]
fn an_api_server_is_known_without_the_kubelets_process() {
    let at = |bench: &Bench| uses(bench, "eth0").get(1).cloned();
    let served = |address: &str| Some(format!("the connection to the API server at {address}"));
    let bench = connected(&[line("0100000A:01BB", 76)]);
    assert_eq!(at(&bench), served("10.0.0.1:443"), "root's connection to the web's port may be it");
    let of_user = line("0100000A:01BB", 76).replace("0 0 0 76", "0 1000 0 76");
    assert_eq!(at(&connected(&[of_user])), None);

    let bench = connected(&[line("0200000A:20FB", 77)]);
    assert_eq!(at(&bench), None);
    for (server, address) in
        [("https://api.example:8443", "10.0.0.2:8443"), ("https://10.9.9.9:6444/x", "10.9.9.9:6444")]
    {
        bench.write(
            "/host/etc/kubernetes/kubelet.conf",
            &format!("clusters:\n- cluster:\n    server: {server}\n"),
        );
        assert_eq!(at(&bench), served(address), "{server}");
    }
}

/// The node has one default route: that with the lowest metric.
#[test]
fn a_second_default_route_is_no_uplink() {
    let bench = Bench::new();
    let route = |name: &str, flags: &str, metric: u32| {
        format!("{name}\t00000000\t0100000A\t{flags}\t0\t0\t{metric}\t00000000\t0\t0\t0\n")
    };
    let routes = [route("eth0", "0003", 100), route("eth1", "0003", 200), route("*", "0200", 0)];
    bench.write("/proc/1/net/route", &format!("{HEAD}{}", routes.concat()));
    assert_eq!(uses(&bench, "eth0"), ["the node's default route"]);
    assert_eq!(uses(&bench, "eth1"), ["routes"]);
}

/// OpenShift's and OVN's layout: the uplink is a port of Open vSwitch, and the routes are those of `br-ex`.
#[test]
fn routes_of_open_vswitch_go_through_its_ports() {
    let bench = connected(&[]);
    let text = bench.read("/proc/1/net/route").unwrap();
    bench.write("/proc/1/net/route", &text.replace("eth0", "br-ex"));
    for (name, file) in
        [("br-ex", "ifindex"), ("br-ex", "iflink"), ("eth0", "device/vendor"), ("eth1", "device/vendor")]
    {
        bench.write(&format!("/sys/class/net/{name}/{file}"), "5\n");
    }
    assert_eq!(uses(&bench, "eth0"), [""; 0]);
    fs::create_dir_all(bench.at("/sys/class/net/ovs-system")).unwrap();
    symlink("../ovs-system", bench.at("/sys/class/net/eth0/upper_ovs-system")).unwrap();
    assert_eq!(uses(&bench, "eth0"), ["the node's default route by br-ex"]);
    assert_eq!(uses(&bench, "eth1"), [""; 0]);
    // A tunnel of a program is not on the datapath.
    bench.write("/sys/class/net/br-ex/tun_flags", "0x1001\n");
    assert_eq!(uses(&bench, "eth0"), [""; 0]);
}
