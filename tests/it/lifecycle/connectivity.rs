//! A swap of the driver of the node's uplink is kept only if the API server answers with the image's driver. The network card is
//! QEMU's e1000, whose driver has the name `mlx5_core` here.

use super::{LIMIT, MOFED, newest};
use crate::support::{
    node_vm::{ContainerSpec, ECHO_SERVER, Node, NodeTree, image_tree},
    ofed,
    packages::kernel_image,
    virtual_machine::entrypoint,
};

const SET_UP: &str = "modprobe mlx5_core && ip link set eth0 up && ip address add 10.0.2.15/24 dev eth0\n\
    ip route add default via 10.0.2.2 && echo 2 > /proc/sys/net/ipv4/conf/eth0/rp_filter";

const FACTS: &str = "ip -4 -o address show dev eth0 | sed 's/^[0-9]*: //'\nip route\n\
    cat /proc/sys/net/ipv4/conf/eth0/rp_filter";

/// Build IDs of modules tell the drivers apart.
const DRIVER: &str = "od -An -tx1 /sys/module/mlx5_core/notes/.note.gnu.build-id";

#[test]
fn a_driver_with_which_the_api_server_does_not_answer_does_not_stay() {
    let release = newest();
    let kernel = kernel_image(&release);
    let drivers = ofed::e1000(&release);
    let tree = NodeTree::new(&kernel, &[]);
    tree.module(&drivers.join("host/mlx5_core.ko"));
    tree.write("/etc/kubernetes/kubelet.conf", &format!("    server: https://{ECHO_SERVER}\n"));
    for kind in ["deaf", "other"] {
        let image = image_tree(&entrypoint());
        ofed::program(image.path(), "/sbin/ip");
        ofed::add_driver(image.path(), &drivers.join(kind).join("mlx5_core.ko"), &kernel);
        tree.image(kind, image.path());
    }
    let mut node = Node::boot_with_network(&kernel, tree);
    node.sh(&format!("set -e\n{SET_UP}"));
    let server = ECHO_SERVER.replace(':', " ");
    let answers = format!("[ \"$(echo here | nc -w 3 {server})\" = here ]");
    assert!(node.await_that(&answers, LIMIT), "the server does not answer before the swap");
    let (facts, host) = (node.sh(FACTS), node.sh(DRIVER));
    let patient = ContainerSpec::read("mofed.yaml", "mofed-container")
        .with_env("BIND_DELAY_SEC", "1")
        .with_env("ALLOW_DISRUPTION", "uplink");
    let impatient = patient.clone().with_env("API_SERVER_TIMEOUT_SEC", "15");
    let host_is_back = |node: &mut Node, log: &str| {
        assert_eq!(node.sh(DRIVER), host, "{log}");
        assert_eq!(node.sh(FACTS), facts, "{log}");
        assert!(node.await_that(&answers, LIMIT), "{log}");
        assert!(!node.succeeds("[ -e /run/mellanox/drivers/.api-servers ]"), "{log}");
    };

    let started = node.start(&impatient, "deaf", &MOFED);
    assert_eq!(node.await_end(&started), 1, "{}", node.log(&started));
    let log = node.log(&started);
    println!("{log}");
    assert!(log.contains(&format!("the API server at {ECHO_SERVER} did not answer within 15 s")), "{log}");
    host_is_back(&mut node, &log);
    let again = node.start(&impatient, "deaf", &MOFED);
    assert_eq!(node.await_end(&again), 1, "{}", node.log(&again));
    let log = node.log(&again);
    assert!(log.contains("failed on this node, and are not tried again: the API server"), "{log}");

    // A container that is killed while it waits leaves the decision to the next one.
    node.sh("rm /run/mellanox/drivers/.failed");
    let killed = node.start(&impatient, "deaf", &MOFED);
    node.kill_when(&killed, &format!("{{ [ -e /run/mellanox/drivers/.api-servers ] && [ -e /sys/class/net/eth0 ] && [ \"$({DRIVER})\" != \"{}\" ]; }}", host.trim_end()), LIMIT);
    assert!(!node.succeeds(&answers), "{}", node.log(&killed));
    let next = node.start(&impatient, "deaf", &MOFED);
    assert_eq!(node.await_end(&next), 1, "{}", node.log(&next));
    let log = node.log(&next);
    println!("{log}");
    host_is_back(&mut node, &log);

    let started = node.start(&patient, "other", &MOFED);
    node.await_startup(&started, LIMIT);
    let log = node.log(&started);
    println!("{log}");
    assert_ne!(node.sh(DRIVER), host, "{log}");
    assert_eq!(node.sh(FACTS), facts, "{log}");
    assert!(node.succeeds(&answers), "{log}");
    assert_eq!(node.terminate(&started), 0, "{}", node.log(&started));
}
