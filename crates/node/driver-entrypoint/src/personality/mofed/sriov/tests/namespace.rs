//! Interfaces of the running kernel in a network namespace. A pair of virtual interfaces is deleted and created again, as
//! the interface of a device whose driver is replaced.

use std::{
    io::{BufRead as _, BufReader},
    os::fd::AsFd as _,
    process::{Child, Command, Stdio},
    thread,
};

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use super::*;

/// A network namespace with its own view of `/sys`, which ends with its keeper.
struct Namespace(Child);

impl Namespace {
    /// Creates a namespace, and moves this thread into it. Requires root. Addresses are usable at once there.
    fn enter() -> Self {
        let mut keeper = Command::new("unshare")
            .args(["--net", "--mount", "sh", "-c", "mount -t sysfs sysfs /sys && echo up && exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("run unshare (Debian package util-linux)");
        let mut said = String::new();
        BufReader::new(keeper.stdout.as_mut().unwrap()).read_line(&mut said).unwrap();
        assert_eq!(said, "up\n", "no network namespace: root is needed");
        let namespace = fs::File::open(format!("/proc/{}/ns/net", keeper.id())).unwrap();
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        sh("echo 0 > /proc/sys/net/ipv6/conf/default/accept_dad\nip link set lo up");
        Self(keeper)
    }

    /// A node with these interfaces, each of a device with the driver.
    fn bench(&self, names: &[&str]) -> Bench {
        let bench = Bench::new();
        let outside = |to: &str, at: &str| {
            fs::create_dir_all(bench.at(at).parent().unwrap()).unwrap();
            symlink(to, bench.at(at)).unwrap();
        };
        let interfaces = format!("/proc/{}/root/sys/class/net", self.0.id());
        outside(&interfaces, "/sys/class/net");
        outside("/proc/sys", "/proc/sys");
        for (number, name) in names.iter().enumerate() {
            let device = format!("/sys/bus/pci/devices/0000:08:00.{number}");
            outside(&format!("{interfaces}/{name}"), &format!("{device}/net/{name}"));
            link(&bench, &device, &format!("/sys/bus/pci/drivers/mlx5_core/0000:08:00.{number}"));
        }
        bench.program("ip", "exec ip \"$@\"");
        bench
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs a script in the namespace of this thread.
fn sh(script: &str) -> String {
    let output = Command::new("sh").args(["-ec", script]).output().unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    assert!(output.status.success(), "{script}: {}", text(output.stderr));
    text(output.stdout)
}

/// Runs a test in a new thread, because the thread stays in the namespace.
fn in_namespace(test: impl FnOnce(&Namespace) + Send) {
    thread::scope(|scope| scope.spawn(|| test(&Namespace::enter())).join().unwrap());
}

const CREATE: &str = "n=0\nfor name in v w; do\nn=$((n + 1))\n\
                      ip link add name ${name}0 address 02:00:00:00:0$n:00 type veth peer name ${name}1\n\
                      ip link set ${name}1 up\ndone";

/// All that the kernel shows of the interfaces.
fn facts(bench: &Bench) -> Vec<String> {
    let interfaces = bench.at("/sys/class/net");
    // The kernel sends a few packets before it uses an IPv6 address.
    sh(
        "for i in $(seq 100); do [ -n \"$(ip -6 address show tentative)\" ] || exit 0; sleep 0.1; done; exit 1",
    );
    let shown = sh(&format!(
        "cd {}\nfor name in v0 w0; do\n\
         for file in mtu tx_queue_len ifalias netdev_group flags; do echo $name $file $(cat $name/$file); done\n\
         echo $name master $(readlink $name/master | sed 's/.*[/]//')\n\
         cd /proc/sys/net; grep -s . ipv?/conf/$name/* ipv?/neigh/$name/* || :; cd - > /dev/null\n\
         ip -o address show dev $name | sed 's/^[0-9]*: //'\n\
         ip neighbor show dev $name nud permanent | sed \"s/^/$name neighbor /\"\n\
         ip neighbor show proxy dev $name | sed \"s/^/$name /\"\ndone\n\
         ip -o -4 route show table all; ip -o -6 route show table all; ip -4 rule; ip -6 rule",
        interfaces.display()
    ));
    // The peers have other addresses each time. A nexthop object is lost with its interface; its route has the same gateway
    // afterwards.
    let lines = shown.lines().filter(|line| !line.contains("dev v1") && !line.contains("dev w1"));
    let lines = lines.map(|line| line.replace("nhid 5 ", ""));
    let mut lines: Vec<String> = lines.collect();
    lines.sort();
    lines
}

/// Lines that only one of the lists has.
fn difference(before: &[String], after: &[String]) -> Vec<String> {
    let only = |sign: char, of: &[String], other: &[String]| {
        of.iter()
            .filter(|line| !other.contains(line))
            .map(|line| format!("{sign} {line}"))
            .collect::<Vec<_>>()
    };
    [only('-', before, after), only('+', after, before)].concat()
}

#[test]
fn an_interface_that_comes_back_has_all_that_it_had() {
    in_namespace(|namespace| {
        sh(CREATE);
        let bench = namespace.bench(&["v0", "w0"]);
        sh("ip link set v0 mtu 1400 txqueuelen 2222 alias 'uplink of rack 7' group 7 up\n\
            cd /proc/sys/net\n\
            echo 2 > ipv4/conf/v0/rp_filter; echo 1 > ipv4/conf/v0/arp_ignore; echo 2 > ipv4/conf/v0/arp_announce\n\
            echo 1 > ipv4/conf/v0/forwarding; echo 0 > ipv6/conf/v0/accept_ra; echo 99 > ipv4/neigh/v0/gc_stale_time\n\
            echo 4321 > ipv6/neigh/v0/base_reachable_time_ms; echo 1 > ipv6/conf/w0/disable_ipv6\n\
            ip link set w0 up");
        sh("ip address add 10.9.0.2/24 dev v0 metric 77\nip address add 10.9.0.3/24 dev v0 label v0:1\n\
            ip address add 10.7.0.1 peer 10.7.0.2 dev v0\nip address add 10.6.0.2/24 noprefixroute dev v0\n\
            ip address add 2001:db8::2/64 dev v0\nip address add 10.8.0.2/24 dev w0\n\
            ip route add 10.6.0.0/24 dev v0 proto kernel src 10.6.0.2 metric 100\n\
            ip route add 10.6.1.0/24 via 10.6.0.1\n\
            ip route add default via 10.9.0.1 table 100\nip route add 10.70.0.0/16 dev w0 table 100\nip -6 route add default via 2001:db8::1 dev v0 table 103\n\
            ip route add 10.50.0.0/16 nexthop via 10.9.0.8 dev v0 nexthop via 10.8.0.9 dev w0 weight 3\n\
            ip nexthop add id 5 via 10.9.0.1 dev v0\nip route add 10.60.0.0/16 nhid 5\n\
            ip route add 10.61.0.0/24 dev w0\nip route add default via 10.61.0.1 metric 5 proto static\n\
            ip rule add from 10.9.0.2 lookup 100\nip rule add iif v0 lookup 101 priority 50\n\
            ip -6 rule add oif v0 lookup 102 protocol static\nip rule add fwmark 7 lookup 200\n\
            ip neighbor add 10.9.0.9 lladdr 02:00:00:00:00:09 dev v0 nud permanent\n\
            ip neighbor add proxy 10.9.0.50 dev v0\n\
            ip -6 neighbor add 2001:db8::7 lladdr 02:00:00:00:00:07 router dev v0 nud permanent");
        let before = facts(&bench);
        let state = saved(&bench);
        assert_eq!(NetworkState::parse(&state.to_text()), state);

        sh("ip link del v0; ip link del w0");
        sh(CREATE);
        // As a network manager does for an interface that is unplugged. The other rules stay in the kernel.
        sh("ip rule del from 10.9.0.2 lookup 100");
        state.restore(&bench.node(), 1, FRESH);
        assert_eq!(difference(&before, &facts(&bench)), [""; 0], "{}", bench.log());
        assert!(!bench.log().contains("WARN"), "{}", bench.log());
        assert!(
            bench.log().contains("restored route -4 default via 10.9.0.1 table 100 of v0"),
            "{}",
            bench.log()
        );
    });
}

/// A network manager chooses other metrics and priorities.
#[test]
fn an_interface_that_a_network_manager_sets_up_is_left_to_it() {
    in_namespace(|namespace| {
        sh(CREATE);
        let bench = namespace.bench(&["v0"]);
        let set_up = |metric: u32, priority: u32| {
            sh(&format!(
                "ip link set v0 up\nip address add 10.9.0.2/24 dev v0\necho 2 > /proc/sys/net/ipv4/conf/v0/rp_filter\n\
                 ip route add default via 10.9.0.1 table 100 metric {metric}\n\
                 ip rule add from 10.9.0.2 lookup 100 priority {priority}"
            ));
        };
        set_up(5, 50);
        let state = saved(&bench);
        sh("ip link del v0; ip link del w0\nip rule del from 10.9.0.2 lookup 100");
        sh(CREATE);
        set_up(7, 70);
        let before = facts(&bench);
        state.restore(&bench.node(), 1, FRESH);
        assert_eq!(difference(&before, &facts(&bench)), [""; 0], "{}", bench.log());
        assert!(!bench.log().contains("no network manager"), "{}", bench.log());
    });
}

#[test]
fn an_interface_comes_back_to_its_bridge() {
    in_namespace(|namespace| {
        sh(CREATE);
        let bench = namespace.bench(&["v0"]);
        sh("ip link add name br0 type bridge; ip link set v0 master br0 up");
        let state = saved(&bench);
        sh("ip link del v0; ip link del w0");
        sh(CREATE);
        state.restore(&bench.node(), 1, FRESH);
        assert!(facts(&bench).contains(&"v0 master br0".to_owned()), "{}", bench.log());
    });
}

#[test]
fn interfaces_on_top_that_do_not_come_back_are_named() {
    in_namespace(|namespace| {
        sh(CREATE);
        let bench = namespace.bench(&["v0"]);
        sh("ip link add link v0 name mac0 type macvlan");
        assert_eq!(lost_settings(&bench.node()), ["mac0 on v0"]);
    });
}
