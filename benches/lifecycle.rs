//! Measures the time from the start of a driver container until it is ready, on a node in a virtual machine, compared
//! with `modprobe` of the same modules there. Prints lines of `<what> <seconds>` by the node's clock; `ci/bench` turns
//! them into table rows.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

#[path = "../tests/it/support/mod.rs"]
mod support;

use std::time::Duration;

use support::{
    node_vm::{ContainerSpec, Node, NodeTree},
    ofed,
    packages::{kernel_image, releases},
};

/// The first run only warms up the emulator's translation cache; the others are reported.
const RUNS: usize = 4;
const READY: &str = "/run/mellanox/drivers/.driver-ready";

fn main() {
    let release = releases("6.1.0-", "-amd64").pop().expect("the host's suites have a 6.1 kernel");
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["mlx5_ib"]);
    tree.image("mofed", ofed::image(&kernel).path());
    let mut node = Node::boot(&kernel, tree);
    let spec = ContainerSpec::read("mofed.yaml", "mofed-container")
        .with_env("RESTORE_DRIVER_ON_POD_TERMINATION", "true");
    for run in 0..RUNS {
        let plain = plain(&mut node);
        let begun = node.run("modprobe mlx5_ib").uptime;
        let started = node.start(&spec, "mofed", &["driver-entrypoint", "mofed"]);
        assert!(
            node.await_that(&format!("[ -e {READY} ]"), Duration::from_mins(1)),
            "{}",
            node.log(&started)
        );
        let ready = node.run("true").uptime.checked_sub(begun).unwrap();
        assert_eq!(node.terminate(&started), 0, "{}", node.log(&started));
        node.sh("rmmod mlx5_ib ib_uverbs ib_core mlx5_core");
        if run > 0 {
            println!("start-to-ready {:.2}", ready.as_secs_f64());
            println!("modprobe {:.2}", plain.as_secs_f64());
        }
    }
}

/// Loads the image's modules with busybox's modprobe, with no other driver to unload first.
fn plain(node: &mut Node) -> Duration {
    // The in-tree modules that the image's modules need are loaded, as before the start of a container.
    node.sh("mount --bind /proc /images/mofed/proc && modprobe psample");
    let begun = node.run("true").uptime;
    let done = node.run("chroot /images/mofed /bin/busybox modprobe mlx5_ib");
    assert_eq!(done.status, 0, "{}", done.text);
    node.sh("umount /images/mofed/proc && rmmod mlx5_ib ib_uverbs ib_core mlx5_core mlx_compat");
    done.uptime.checked_sub(begun).unwrap()
}
