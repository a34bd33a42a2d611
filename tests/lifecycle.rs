//! The life of a driver container on a node: a virtual machine with the distribution's kernel, on which containers
//! are started as their DaemonSets say, probed, ended, killed and started again.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod support;

use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, time::Duration};

use farrier::kernel::KernelRelease;
use support::{
    node_vm::{ContainerSpec, Node, NodeTree, depmod, image_tree},
    packages::{fixture_modules, kernel_image, releases},
    virtual_machine::entrypoint,
};

/// For a container to get ready, on a busy host and in software.
const LIMIT: Duration = Duration::from_secs(60);

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

/// Modules of the image and of the host, those compressed in every way; parameters; and a module in use.
#[test]
fn a_drivers_modules_come_from_the_image_and_from_the_host() {
    let release = newest();
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["mlx5_core", "rdma_ucm"]);
    tree.compress_modules();
    let image = image_tree(&entrypoint());
    let updates = image.path().join("lib/modules").join(release.as_str()).join("updates");
    fs::create_dir_all(&updates).unwrap();
    fs::copy(fixture_modules(&release).join("farrier_good.ko"), updates.join("farrier_good.ko")).unwrap();
    depmod(&kernel, image.path());
    tree.image("site", image.path());
    let mut node = Node::boot(&kernel, tree);
    let before = node.loaded();

    let spec = ContainerSpec::read("generic.yaml", "site-driver");
    let started = node.start(&spec, "site", &["driver-entrypoint"]);
    node.await_startup(&started, LIMIT);
    node.assert_probes_pass(&started);
    let loaded = node.loaded();
    for module in ["farrier_good", "mlx5_core", "mlxfw", "psample", "rdma_ucm", "rdma_cm", "ib_uverbs", "ib_core"] {
        assert!(loaded.iter().any(|name| name == module), "{module} is not among {loaded:?}");
    }

    // A process has the device open: it is named, nothing that others need is gone, and the node goes on.
    node.sh("sleep 600 < /dev/infiniband/rdma_cm > /dev/null 2>&1 & echo $! > /tmp/user");
    let user = node.sh("cat /tmp/user");
    let status = node.terminate(&started);
    let log = node.log(&started);
    assert_ne!(status, 0, "{log}");
    let who = format!("process {} (sleep) with /dev/infiniband/rdma_cm open", user.trim());
    assert!(log.contains("unload rdma_ucm") && log.contains(&who), "{log}");
    assert!(node.loaded().contains(&"rdma_ucm".to_owned()));
    assert!(!node.holds("ls /run/farrier/*.ready"), "a driver that stops is not ready");

    // Started again it finds what is there; and once nothing is in the way, all of its modules go.
    let again = node.start(&spec, "site", &["driver-entrypoint"]);
    node.await_startup(&again, LIMIT);
    node.sh("kill $(cat /tmp/user)");
    let status = node.terminate(&again);
    assert_eq!(status, 0, "{}", node.log(&again));
    let left: Vec<String> = node.loaded().into_iter().filter(|name| !before.contains(name)).collect();
    for module in ["farrier_good", "mlx5_core", "rdma_ucm"] {
        assert!(!left.iter().any(|name| name == module), "{left:?}");
    }
}
