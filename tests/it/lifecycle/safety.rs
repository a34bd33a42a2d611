//! What a driver's container must not take from the node: its uplink, mounted storage and pods' interfaces.
use std::time::Duration;

use super::{LIMIT, MOFED, newest, sorted};
use crate::support::{
    node_vm::{ContainerSpec, Node, NodeTree, image_tree},
    ofed,
    packages::kernel_image,
    virtual_machine::entrypoint,
};

/// Starts a container that must refuse to run and leave the node's modules alone; returns its log.
fn refused(node: &mut Node, spec: &ContainerSpec) -> String {
    let before = sorted(node.loaded());
    let started = node.start(spec, "mofed", &MOFED);
    let status = node.await_end(&started);
    let log = node.log(&started);
    println!("{log}");
    assert_eq!(status, 1, "{log}");
    assert_eq!(sorted(node.loaded()), before, "{log}");
    log
}

/// The interface of `netdevsim`, under the name `mlx5_core`, carries the default route: by itself, by a bond, and in another
/// network namespace. The host's `/etc` is read-only.
#[test]
fn a_driver_stays_while_the_node_or_a_pod_needs_its_interface() {
    let release = newest();
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["psample", "bonding"]);
    tree.module(&ofed::netdevsim(&release).join("host/mlx5_core.ko"));
    // An option that only the host has; the kernel ignores unknown ones with a warning.
    tree.write("/etc/modprobe.d/site.conf", "options mlx5_core farrier_of_host=1\n");
    let image = image_tree(&entrypoint());
    ofed::program(image.path(), "/sbin/ip");
    ofed::add_other_netdevsim(image.path(), &release, &kernel);
    tree.image("mofed", image.path());
    let mut node = Node::boot(&kernel, tree);
    let careful = ContainerSpec::read("mofed.yaml", "mofed-container")
        .with_env("RESTORE_DRIVER_ON_POD_TERMINATION", "true");
    let uplink = careful.clone().with_env("ALLOW_DISRUPTION", "uplink");
    let name = "name=$(ls /sys/bus/netdevsim/devices/netdevsim1/net)\n";
    node.sh(
        "mount --bind /etc /etc && mount -o remount,bind,ro /etc && modprobe mlx5_core && modprobe bonding",
    );
    node.sh(&format!(
        "{name}ip link set $name up && ip addr add 10.9.0.2/24 dev $name && ip route add default via 10.9.0.1"
    ));

    let log = refused(&mut node, &careful);
    assert!(log.contains("(the node's default route)") && log.contains("ALLOW_DISRUPTION=uplink"), "{log}");
    let mut job = careful.clone().named("forecast");
    job.command = ["driver-entrypoint", "forecast", "mlx5_core"].map(str::to_owned).to_vec();
    let log = refused(&mut node, &job);
    assert!(log.contains("the unload of module mlx5_core would disrupt interface"), "{log}");

    // The same by a bond.
    node.sh(&format!(
        "{name}ip addr flush dev $name; ip link set $name down\n\
         [ -e /sys/class/net/bond0 ] || echo +bond0 > /sys/class/net/bonding_masters\n\
         echo +$name > /sys/class/net/bond0/bonding/slaves\n\
         ip link set bond0 up && ip addr add 10.9.0.2/24 dev bond0 && ip route add default via 10.9.0.1"
    ));
    let log = refused(&mut node, &careful);
    assert!(log.contains("(the node's default route by bond0)"), "{log}");

    // With leave, the drivers are replaced and come back. Each time, the interface has a new address, but is in its bond, which keeps
    // the old one.
    let bond = "cat /sys/class/net/bond0/bonding/slaves /sys/class/net/bond0/address";
    let before = node.sh(bond);
    let started = node.start(&uplink, "mofed", &MOFED);
    node.await_startup(&started, LIMIT);
    let log = node.log(&started);
    println!("{log}");
    assert!(log.contains("continuing without a blacklist") && !log.contains("WARN  remove /host"), "{log}");
    assert_eq!(node.sh(bond), before, "{log}");
    assert!(node.succeeds("ip route | grep -q '^default.*bond0'"), "{log}");
    assert!(!log.contains("farrier_of_host"), "{log}");
    assert_eq!(node.terminate(&started), 0, "{}", node.log(&started));
    let log = node.log(&started);
    println!("{log}");
    assert_eq!(node.sh(bond), before, "{log}");
    assert!(log.contains("with \"farrier_of_host=1\""), "the host's driver has the host's options: {log}");

    // A pod's interface, which the operators' container cannot see: only its absence. The namespace ends with the test.
    node.sh(&format!(
        "{name}echo -$name > /sys/class/net/bond0/bonding/slaves\n\
         unshare -n sleep 600 > /dev/null 2>&1 & pod=$!\n{name}\
         until [ \"$(readlink /proc/$pod/ns/net)\" != \"$(readlink /proc/1/ns/net)\" ]; do usleep 10000; done\n\
         ip link set $name netns $pod"
    ));
    let log = refused(&mut node, &careful);
    assert!(log.contains("the interface of netdevsim1 in another network namespace"), "{log}");
    assert!(log.contains("ALLOW_DISRUPTION=pods"), "{log}");
}

/// NVMe over TCP with native multipath: the transport's module has no references while a file system is mounted.
#[test]
fn storage_over_fabrics_stays_while_it_is_mounted() {
    let release = newest();
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["nvmet-tcp", "nvme-tcp", "ext4", "crc32c_generic"]);
    let image = image_tree(&entrypoint());
    tree.image("mofed", image.path());
    let mut node = Node::boot(&kernel, tree);
    let target = "ip link set lo up && modprobe nvmet-tcp && modprobe crc32c_generic && modprobe ext4\n\
        mount -t configfs none /sys/kernel/config && cd /sys/kernel/config/nvmet\n\
        dd if=/dev/zero of=/run/disk bs=1M count=16 2> /dev/null\n\
        mkdir subsystems/disk && echo 1 > subsystems/disk/attr_allow_any_host\n\
        mkdir subsystems/disk/namespaces/1 && echo 1 > subsystems/disk/namespaces/1/buffered_io && echo /run/disk > subsystems/disk/namespaces/1/device_path\n\
        echo 1 > subsystems/disk/namespaces/1/enable\n\
        mkdir ports/1 && echo tcp > ports/1/addr_trtype && echo ipv4 > ports/1/addr_adrfam\n\
        echo 127.0.0.1 > ports/1/addr_traddr && echo 4420 > ports/1/addr_trsvcid\n\
        ln -s /sys/kernel/config/nvmet/subsystems/disk ports/1/subsystems/disk";
    node.sh(&format!("set -e\n{target}"));

    let mut spec = ContainerSpec::read("generic.yaml", "site-driver");
    spec.args = ["generic", "nvme_tcp"].map(str::to_owned).to_vec();
    spec.startup = Some(["ls", "/run/farrier/nvme_tcp.ready"].map(str::to_owned).to_vec());
    let started = node.start(&spec, "mofed", &["driver-entrypoint"]);
    node.await_startup(&started, LIMIT);
    node.sh("echo transport=tcp,traddr=127.0.0.1,trsvcid=4420,nqn=disk > /dev/nvme-fabrics");
    assert!(node.await_that("[ -b /dev/nvme0n1 ]", Duration::from_secs(20)));
    node.sh("mke2fs -b 4096 /dev/nvme0n1 > /dev/null 2>&1; mkdir -p /run/data && mount -t ext4 /dev/nvme0n1 /run/data && echo x > /run/data/file");
    assert!(
        node.succeeds("ls -d /sys/devices/virtual/nvme-subsystem/*/nvme0n1"),
        "the node has native multipath"
    );
    assert!(node.succeeds("grep -q '^nvme_tcp [0-9]* 0 ' /proc/modules"), "the module has no references");

    let mut job = spec.clone().named("forecast");
    job.args = ["forecast", "nvme_tcp"].map(str::to_owned).to_vec();
    let lost = "the file system mounted at /run/data";
    let log = refused(&mut node, &job);
    assert!(log.contains(&format!("the unload of module nvme_tcp would disrupt {lost}")), "{log}");
    assert_eq!(node.terminate(&started), 1, "{}", node.log(&started));
    let log = node.log(&started);
    assert!(
        log.contains(&format!("would disrupt {lost}")) && log.contains("ALLOW_DISRUPTION=storage"),
        "{log}"
    );
    assert_eq!(node.sh("cat /run/data/file").trim(), "x");

    // Once it is unmounted, the next container ends as usual.
    node.sh("umount /run/data");
    let started = node.start(&spec, "mofed", &["driver-entrypoint"]);
    node.await_startup(&started, LIMIT);
    assert_eq!(node.terminate(&started), 0, "{}", node.log(&started));
    assert!(!node.loaded().contains(&"nvme_tcp".to_owned()));
}
