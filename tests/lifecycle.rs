//! The life of a driver container on a node: a virtual machine with the distribution's kernel, on which containers
//! are started as their DaemonSets say, probed, ended, killed and started again.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use farrier::kernel::KernelRelease;
use support::{
    node_vm::{ContainerSpec, Node, NodeTree, image_tree},
    packages::{kernel_image, releases},
};

fn newest() -> KernelRelease {
    releases("6.1.0-", "-amd64").pop().expect("the host's suites have a 6.1 kernel")
}

/// The node itself: what a manifest asks for is what a process finds, so that the other tests can rely on it.
#[test]
fn a_container_runs_as_its_manifest_says() {
    let kernel = kernel_image(&newest());
    let tree = NodeTree::new(&kernel, &[]);
    let script = Path::new("/bin/sh");
    let image = image_tree(script);
    let entrypoint = image.path().join("usr/bin/driver-entrypoint");
    fs::remove_file(&entrypoint).unwrap();
    fs::write(
        &entrypoint,
        "#!/bin/sh\ntrap 'exit 7' TERM\necho \"$$ $1 $SITE\"\n/bin/busybox mount --bind /usr /run/mellanox/drivers/usr\n\
         : > /host/usr/written\n: > /only-here\n/bin/busybox touch /run/udev/x 2> /dev/null || echo read-only\n\
         : > /run/mellanox/drivers/.driver-ready\nwhile :; do /bin/busybox usleep 10000; done\n",
    )
    .unwrap();
    fs::set_permissions(&entrypoint, fs::Permissions::from_mode(0o755)).unwrap();
    tree.image("script", image.path());
    tree.write("/run/placeholder", "");
    let mut node = Node::boot(&kernel, tree);

    let spec = ContainerSpec::read("mofed.yaml", "mofed-container").with_env("SITE", "it's here");
    node.sh("mkdir -p /run/mellanox/drivers/usr");
    let started = node.start(&spec, "script", &["driver-entrypoint", "mofed"]);
    node.await_startup(&started, Duration::from_secs(20));
    // Its process has a namespace of its own, and its variables; /run/udev is read-only.
    let log = node.log(&started);
    assert!(log.starts_with("1 mofed it's here\n") && log.ends_with("read-only\n"), "{log}");
    // A bidirectional mount's own mounts are the node's too, another mount's files, and nothing else.
    assert_eq!(node.sh("ls /run/mellanox/drivers/usr/bin/driver-entrypoint /usr/written").lines().count(), 2);
    assert!(!node.holds("[ -e /only-here ]"));
    let mounts = node.sh("cat /proc/self/mountinfo");
    assert_eq!(mounts.matches(" - overlay ").count(), 1, "{mounts}");
    let probe = node.probe(&started, spec.liveness.as_ref());
    assert_eq!((probe.status, probe.text.as_str()), (1, ""), "no mlx5_core is loaded");
    assert_eq!(node.terminate(&started), 7);

    // Killed, it leaves its mount on the node, and starts with a fresh layer.
    let again = node.start(&spec, "script", &["driver-entrypoint", "mofed"]);
    node.await_startup(&again, Duration::from_secs(20));
    node.kill(&again);
    assert!(node.holds("[ -e /run/mellanox/drivers/usr/bin/driver-entrypoint ]"));
}
