//! What an interface and its virtual functions have after a driver was replaced, and after the container was killed in the
//! middle of that while its pod was deleted. The kernel's netdevsim simulates the device under the name `mlx5_core`.

use super::{LIMIT, MOFED, newest};
use crate::support::{
    node_vm::{ContainerSpec, Node, NodeTree, image_tree},
    ofed,
    packages::kernel_image,
    virtual_machine::entrypoint,
};

/// Runs the image's `ip` on the node.
const IP: &str = "ip() { chroot /images/mofed /sbin/ip \"$@\"; }\n\
                  device=/sys/bus/netdevsim/devices/netdevsim1\nname=$(ls $device/net)\n";

const SET_UP: &str = "echo 2 > $device/sriov_numvfs\n\
    ip link set $name vf 0 mac 02:00:00:00:00:07\nip link set $name vf 0 vlan 5 qos 3\n\
    ip link set $name vf 0 max_tx_rate 100 min_tx_rate 10\nip link set $name vf 0 spoofchk on\n\
    ip link set $name vf 1 trust on\nip link set $name vf 1 state enable\n\
    ip link set $name mtu 1400 txqueuelen 2222 alias 'rack 7' up\n\
    ip link add link $name name $name.7 type vlan id 7\nip link set $name.7 mtu 1300 up\n\
    echo 2 > /proc/sys/net/ipv4/conf/$name/rp_filter\necho 1 > /proc/sys/net/ipv4/conf/$name.7/arp_ignore\n\
    ip address add 10.9.0.2/24 dev $name\nip address add 10.7.0.2/24 dev $name.7\n\
    ip route add default via 10.9.0.1 table 100\nip rule add from 10.9.0.2 lookup 100\n\
    ip neighbor add 10.9.0.9 lladdr 02:00:00:00:00:09 dev $name nud permanent";

const FACTS: &str = "ip link show dev $name | grep ' vf '\n\
    for each in $name $name.7; do\n\
    for file in mtu tx_queue_len ifalias; do echo $each $file $(cat /sys/class/net/$each/$file); done\n\
    for file in rp_filter arp_ignore; do echo $each $file $(cat /proc/sys/net/ipv4/conf/$each/$file); done\n\
    ip -4 -o address show dev $each | sed 's/^[0-9]*: //'\ndone\n\
    ip neighbor show dev $name nud permanent\nip route show table 100 | sed 's/ rt_trap//'\nip rule";

/// Build IDs of modules tell the host's driver from the image's.
const BUILD_ID: &str = "/sys/module/mlx5_core/notes/.note.gnu.build-id";
const GONE: &str = "[ ! -e /sys/module/mlx5_core ]";

#[test]
fn interfaces_outlive_swaps_that_are_killed_while_the_pod_is_deleted() {
    let release = newest();
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["psample", "8021q"]);
    tree.module(&ofed::netdevsim(&release).join("host/mlx5_core.ko"));
    let image = image_tree(&entrypoint());
    ofed::program(image.path(), "/sbin/ip");
    // An image without drivers for this kernel, such as the one of the node's next pod after an upgrade.
    tree.image("broken", image.path());
    ofed::add_other_netdevsim(image.path(), &release, &kernel);
    tree.image("mofed", image.path());
    let mut node = Node::boot(&kernel, tree);
    let spec = ContainerSpec::read("mofed.yaml", "mofed-container")
        .with_env("RESTORE_DRIVER_ON_POD_TERMINATION", "true")
        .with_env("BIND_DELAY_SEC", "1");
    node.sh(&format!("modprobe mlx5_core && modprobe 8021q && cat {BUILD_ID} > /tmp/host"));
    node.sh(&format!("set -e\n{IP}{SET_UP}"));
    let facts = |node: &mut Node| node.sh(&format!("set -e\n{IP}{FACTS}"));
    let before = facts(&mut node);
    println!("{before}");
    assert!(before.contains("vlan 5, qos 3") && before.contains("rp_filter 2"), "{before}");

    // The module may go while its build ID is read: only a whole one tells the two apart.
    let id = format!("cat {BUILD_ID} > /tmp/now 2> /dev/null && [ -s /tmp/now ]");
    let is_host = format!("{{ {id} && cmp -s /tmp/now /tmp/host; }}");
    let is_image = format!("{{ {id} && ! cmp -s /tmp/now /tmp/host; }}");
    for (is_stop, moment) in [(false, GONE), (false, &is_image), (true, GONE), (true, &is_host)] {
        let started = node.start(&spec, "mofed", &MOFED);
        if is_stop {
            node.await_startup(&started, LIMIT);
            assert_eq!(facts(&mut node), before, "{}", node.log(&started));
            node.signal(&started, "TERM");
        }
        node.kill_when(&started, moment, LIMIT);
        let log = node.log(&started);
        assert!(log.contains("unloading module mlx5_core"), "a hanging unload would be silent: {log}");
        // Nothing on the node repairs this: its interface is gone, or lacks its settings.
        assert!(node.succeeds("[ -e /run/mellanox/drivers/.sriov ]"), "the kill came too late: {log}");

        // The next container does, even if it cannot start.
        let next = node.start(&spec, "broken", &MOFED);
        assert_eq!(node.await_end(&next), 1, "{}", node.log(&next));
        let log = node.log(&next);
        println!("{log}");
        // Without a driver, the kill may have come a moment after its condition.
        assert!(node.succeeds(if moment == GONE { "[ -e /sys/module/mlx5_core ]" } else { moment }), "{log}");
        assert_eq!(facts(&mut node), before, "{log}");
        assert!(!node.succeeds("[ -L /etc/modprobe.d/blacklist-ofed-modules.conf ]"), "{log}");
    }
}
