//! The life cycle of a driver container on a node. A virtual machine with the distribution's kernel starts the containers as
//! their DaemonSets specify, and probes, terminates, kills and restarts them.
use std::{fs, os::unix::fs::PermissionsExt as _, path::Path, process::Command, time::Duration};

use farrier_core::kernel::KernelRelease;
use farrier_inputs::KernelImage;
use tempfile::TempDir;

use crate::support::{
    node_vm::{ContainerSpec, Node, NodeTree, Started, depmod, image_tree},
    ofed,
    packages::{fixture_modules, kernel_image, releases, run},
    virtual_machine::entrypoint,
};

mod connectivity;
mod eviction;
mod gpu;
mod guard;
mod network;
mod safety;
mod swap;

/// Time limit for a container to become ready in an emulated machine on a busy host.
const LIMIT: Duration = Duration::from_mins(3);

/// Creates a driver's image with these test modules in `updates`, which takes precedence over the host's modules.
fn image_with(release: &KernelRelease, kernel: &KernelImage, modules: &[&str]) -> TempDir {
    let image = image_tree(&entrypoint());
    let updates = image.path().join("lib/modules").join(release.as_str()).join("updates");
    fs::create_dir_all(&updates).unwrap();
    for module in modules {
        fs::copy(fixture_modules(release).join(module), updates.join(module)).unwrap();
    }
    depmod(kernel, image.path());
    image
}

fn newest() -> KernelRelease {
    releases("6.1.0-", "-amd64").pop().expect("the host's suites have a 6.1 kernel")
}

/// Tests the emulated node itself: processes see what the manifest specifies, so that the other tests can rely on the node.
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
    // The process has a PID namespace and its environment variables, and /run/udev is read-only.
    let log = node.log(&started);
    assert!(log.starts_with("1 mofed it's here\n") && log.ends_with("read-only\n"), "{log}");
    // Mounts inside a bidirectional mount and files in a host path reach the node, and nothing else does.
    assert_eq!(node.sh("ls /run/mellanox/drivers/usr/bin/driver-entrypoint /usr/written").lines().count(), 2);
    assert!(!node.succeeds("[ -e /only-here ]"));
    let mounts = node.sh("cat /proc/self/mountinfo");
    assert_eq!(mounts.matches(" - overlay ").count(), 1, "{mounts}");
    let probe = node.probe(&started, spec.liveness.as_ref());
    assert_eq!((probe.status, probe.text.as_str()), (1, ""), "no mlx5_core is loaded");
    assert_eq!(node.terminate(&started), 7);

    // A killed container leaves its mount on the node and restarts with a fresh layer.
    let again = node.start(&spec, "script", &["driver-entrypoint", "mofed"]);
    node.await_startup(&again, Duration::from_secs(20));
    node.kill(&again);
    assert!(node.succeeds("[ -e /run/mellanox/drivers/usr/bin/driver-entrypoint ]"));
}

/// Modules from the image and from the host in every compression format, module parameters, and a module in use.
#[test]
fn a_drivers_modules_come_from_the_image_and_from_the_host() {
    let release = newest();
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["mlx5_core", "rdma_ucm"]);
    tree.compress_modules();
    let image = image_with(&release, &kernel, &["farrier_good.ko"]);
    tree.image("site", image.path());
    let mut node = Node::boot(&kernel, tree);
    let before = node.loaded();

    let spec = ContainerSpec::read("generic.yaml", "site-driver");
    let started = node.start(&spec, "site", &["driver-entrypoint"]);
    node.await_startup(&started, LIMIT);
    node.assert_probes_pass(&started);
    let loaded = node.loaded();
    for module in
        ["farrier_good", "mlx5_core", "mlxfw", "psample", "rdma_ucm", "rdma_cm", "ib_uverbs", "ib_core"]
    {
        assert!(loaded.iter().any(|name| name == module), "{module} is not loaded: {loaded:?}");
    }

    // While a process has the device open, the log names the process, modules that others need stay loaded, and the node keeps
    // working.
    node.sh("sleep 600 < /dev/infiniband/rdma_cm > /dev/null 2>&1 & echo $! > /tmp/user");
    let user = node.sh("cat /tmp/user");
    let status = node.terminate(&started);
    let log = node.log(&started);
    assert_ne!(status, 0, "{log}");
    let who = format!("process {} (sleep) with /dev/infiniband/rdma_cm open", user.trim());
    assert!(log.contains("unload rdma_ucm") && log.contains(&who), "{log}");
    assert!(node.loaded().contains(&"rdma_ucm".to_owned()));
    assert!(!node.succeeds("ls /run/farrier/*.ready"), "a stopping driver is ready");

    // A restarted container adopts the loaded modules. Once the device is closed, termination unloads all of the driver's
    // modules.
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

/// An image's module replaces the host's module and its dependents, and a further module requests firmware. After a kill at any
/// moment, the next container ends with the node in its original state.
#[test]
fn a_driver_of_ones_own_replaces_the_hosts_and_brings_its_firmware() {
    let release = newest();
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["mlx5_core"]);
    let image = image_with(&release, &kernel, &["farrier_firmware.ko", "mlxfw.ko"]);
    fs::create_dir_all(image.path().join("lib/firmware/acme")).unwrap();
    fs::write(image.path().join("lib/firmware/acme/card.fw"), "of the image").unwrap();
    let setup = image.path().join("usr/bin/setup");
    fs::write(&setup, "#!/bin/sh\necho \"set up: $*\"\n").unwrap();
    fs::set_permissions(&setup, fs::Permissions::from_mode(0o755)).unwrap();
    tree.image("site", image.path());
    let mut node = Node::boot(&kernel, tree);
    node.sh("modprobe mlx5_core; mkdir -p /run/modprobe.d");
    let before = sorted(node.loaded());
    let search_path = "/sys/module/firmware_class/parameters/path";

    let mut spec = ContainerSpec::read("generic.yaml", "site-driver")
        .with_host_path("/run/modprobe.d", "/host/run/modprobe.d");
    let words = "generic --replace mlxfw --firmware --then /usr/bin/setup --ready-when /sys/module/mlxfw/version=out-of-tree \
                 mlxfw farrier_firmware";
    spec.args = words.split_whitespace().map(str::to_owned).collect();
    spec.startup = Some(["ls", "/run/farrier/mlxfw.ready"].map(str::to_owned).to_vec());
    let refused = node.start(&spec, "site", &["driver-entrypoint"]);
    assert_eq!(node.await_end(&refused), 1);
    let log = node.log(&refused);
    assert!(
        log.contains("module mlx5_core uses modules to be replaced") && log.contains("--replace mlx5_core"),
        "{log}"
    );
    assert_eq!(sorted(node.loaded()), before, "{log}");

    spec.args.splice(1..1, ["--replace".to_owned(), "mlx5_core".to_owned()]);
    for moment in [None, Some("[ ! -e /sys/module/mlxfw ]"), Some("[ -e /sys/module/farrier_firmware ]")] {
        if let Some(moment) = moment {
            let killed = node.start(&spec, "site", &["driver-entrypoint"]);
            node.kill_when(&killed, moment, LIMIT);
        }
        let started = node.start(&spec, "site", &["driver-entrypoint"]);
        node.await_startup(&started, LIMIT);
        let log = node.log(&started);
        println!("{log}");
        assert!(log.contains("set up: mlxfw farrier_firmware"), "{log}");
        assert_eq!(node.sh("cat /sys/module/mlxfw/version").trim(), "out-of-tree");
        assert!(!node.loaded().contains(&"mlx5_core".to_owned()));
        assert!(node.succeeds("dmesg | grep 'runs \"of the image\"'"));
        assert_eq!(node.sh(&format!("cat {search_path}")).trim(), "/run/farrier/mlxfw.firmware");
        assert_eq!(node.terminate(&started), 0, "{}", node.log(&started));
        assert_eq!(sorted(node.loaded()), before, "{}", node.log(&started));
        assert!(!node.succeeds("[ -e /sys/module/mlxfw/version ]"), "the host's module is restored");
        assert_eq!(node.sh(&format!("tr -d '\\0\\n' < {search_path}")), "");
        assert_eq!(node.sh("ls /run/modprobe.d"), "");
    }
}

/// Upper-layer modules of both generations of the in-tree stack.
const IN_TREE: [&str; 6] = ["mlx5_core", "mlx5_ib", "rdma_ucm", "nvme-rdma", "9pnet_rdma", "rdma_rxe"];
const MOFED: [&str; 2] = ["driver-entrypoint", "mofed"];

/// Returns the `srcversion` of a module in an image.
fn source_version(image: &TempDir, release: &KernelRelease, module: &str) -> String {
    let base = image.path().to_str().unwrap();
    let arguments = ["-b", base, "-k", release.as_str(), "-F", "srcversion", module];
    run(Command::new("modinfo").args(arguments)).trim().to_owned()
}

/// A node with the in-tree drivers loaded, as after boot, and the container of a MOFED image.
struct MofedNode {
    node: Node,
    spec: ContainerSpec,
    /// Loaded modules before the first container.
    in_tree: Vec<String>,
    ours: String,
}

impl MofedNode {
    fn boot() -> Self {
        let release = newest();
        let kernel = kernel_image(&release);
        let image = ofed::image(&kernel);
        let tree = NodeTree::new(&kernel, &IN_TREE);
        tree.image("mofed", image.path());
        let mut node = Node::boot(&kernel, tree);
        node.sh("modprobe mlx5_ib && modprobe rdma_ucm");
        let spec = ContainerSpec::read("mofed.yaml", "mofed-container")
            .with_env("RESTORE_DRIVER_ON_POD_TERMINATION", "true");
        let in_tree = sorted(node.loaded());
        let ours = source_version(&image, &release, "mlx5_core");
        assert!(!ours.is_empty());
        Self { node, spec, in_tree, ours }
    }

    fn start(&mut self) -> Started {
        let spec = self.spec.clone();
        self.node.start(&spec, "mofed", &MOFED)
    }

    /// Starts a container, waits until it is ready, and asserts the state that other containers rely on.
    fn run(&mut self) -> Started {
        let started = self.start();
        self.node.await_startup(&started, LIMIT);
        self.node.assert_probes_pass(&started);
        assert_eq!(self.node.source_version("mlx5_core").as_ref(), Some(&self.ours));
        self.node.sh("ls /run/mellanox/drivers/.driver-ready");
        // The headers for dependent drivers are exposed on the node exactly once, however often the container was started.
        self.node.sh("ls /run/mellanox/drivers/usr/src/ofa_kernel/default/Module.symvers");
        assert_eq!(self.exposed(), 1);
        started
    }

    fn exposed(&mut self) -> usize {
        self.node.sh("cat /proc/self/mountinfo").matches(" /run/mellanox/drivers/usr/src ").count()
    }

    /// Starts a container that must refuse to run, and returns its log.
    fn refused(&mut self) -> String {
        let before = sorted(self.node.loaded());
        let started = self.start();
        let status = self.node.await_end(&started);
        let log = self.node.log(&started);
        assert_eq!(status, 1, "{log}");
        assert_eq!(sorted(self.node.loaded()), before, "a refusal leaves the node unchanged: {log}");
        assert!(!self.node.succeeds("ls /run/mellanox/drivers/.driver-ready"));
        log
    }

    /// Terminates a container and asserts that the node is in its original state.
    fn stop(&mut self, started: &Started) {
        let status = self.node.terminate(started);
        let log = self.node.log(started);
        assert_eq!(status, 0, "{log}");
        assert_eq!(sorted(self.node.loaded()), self.in_tree, "{log}");
        assert_eq!(self.node.source_version("mlx5_core"), None, "Debian's own modules have no srcversion");
        assert!(!self.node.succeeds("ls /run/mellanox/drivers/.driver-ready"));
        assert_eq!(self.exposed(), 0, "{log}");
        assert_eq!(self.node.sh("ls /etc/modprobe.d"), "", "a blacklist would affect the node's next boot");
    }

    /// Lists the node's disk content: each file with its checksum, each link with its target.
    fn disk(&mut self) -> Vec<String> {
        let files = "find /etc /lib /usr /var -type f -print0 | xargs -0 md5sum";
        let links = "find /etc /lib /usr /var -type l | while read -r link; do echo \"$link -> $(readlink \"$link\")\"; done";
        sorted(self.node.sh(&format!("{files}; {links}")).lines().map(str::to_owned).collect())
    }

    /// Kills a starting container as soon as a command succeeds on the node.
    fn killed_when(&mut self, moment: &str) {
        let started = self.start();
        self.node.kill_when(&started, moment, LIMIT);
    }
}

fn sorted(mut names: Vec<String>) -> Vec<String> {
    names.sort();
    names
}

/// Start, stop, start, kill, start: each step fulfills the contract, and the final state equals the original one.
#[test]
fn mofed_replaces_the_in_tree_drivers_and_puts_them_back() {
    let mut mofed = MofedNode::boot();
    let started = mofed.run();
    let log = mofed.node.log(&started);
    println!("{log}");
    assert!(mofed.node.loaded().iter().any(|name| name == "mlx_compat"));
    mofed.stop(&started);
    println!("{}", mofed.node.log(&started));

    // A container that is killed while ready leaves everything in place. The next container finds its drivers loaded and keeps
    // them.
    let started = mofed.run();
    mofed.node.kill(&started);
    assert!(mofed.node.succeeds("ls /run/mellanox/drivers/.driver-ready"));
    let identity = "ls -di /sys/module/mlx5_core /sys/module/ib_core";
    let before = mofed.node.sh(identity);
    let started = mofed.run();
    assert_eq!(mofed.node.sh(identity), before, "{}", mofed.node.log(&started));
    mofed.stop(&started);

    // Kill the container during the exchange: with no driver loaded, with the first of its modules, and with several.
    for moment in
        ["[ ! -e /sys/module/mlx5_core ]", "[ -e /sys/module/mlx_compat ]", "[ -e /sys/module/ib_core ]"]
    {
        mofed.killed_when(moment);
        let started = mofed.run();
        mofed.stop(&started);
    }
}

/// A container that is killed while it blacklists the host's drivers leaves no blacklist on the disk. Otherwise the node's next
/// boot would have no network.
#[test]
fn a_killed_mofed_container_leaves_the_next_boot_its_drivers() {
    let mut mofed = MofedNode::boot();
    let before = mofed.disk();
    let operators = mofed.spec.clone();
    let with_run = operators.clone().with_host_path("/run/modprobe.d", "/host/run/modprobe.d");
    let link = "/etc/modprobe.d/blacklist-ofed-modules.conf -> /run/mellanox/drivers/.blacklist";
    let written =
        |place: &str| format!("grep -q '^blacklist mlx5_core$' {place}/blacklist-ofed-modules.conf");
    for (spec, kept_away, left) in [
        (operators, written("/etc/modprobe.d"), &[link][..]),
        (with_run, written("/run/modprobe.d"), &[][..]),
    ] {
        mofed.spec = spec;
        for moment in [kept_away.as_str(), "[ ! -e /sys/module/mlx5_core ]"] {
            mofed.killed_when(moment);
            assert!(mofed.node.succeeds(&kept_away), "the kill came too late for this test: {moment}");
            let after: Vec<String> = mofed.disk().into_iter().filter(|line| !before.contains(line)).collect();
            assert_eq!(after, left, "{moment}");
            // Simulate the next boot: the disk's content and an empty /run.
            let boot = "mount -t tmpfs tmpfs /run && cat /etc/modprobe.d/* /run/modprobe.d/* 2> /dev/null | grep -c .";
            assert_eq!(mofed.node.run(&format!("unshare -m sh -c '{boot}'")).text.trim(), "0", "{moment}");
            let started = mofed.run();
            mofed.stop(&started);
            assert_eq!(mofed.disk(), before, "{moment}");
        }
    }
}

/// The container refuses to unload modules in use, names the user and the remedy, and leaves the node unchanged.
#[test]
fn mofed_refuses_what_would_hurt_and_says_who_is_in_the_way() {
    let mut mofed = MofedNode::boot();

    mofed.node.sh("modprobe nvme-rdma");
    let log = mofed.refused();
    assert!(log.contains("nvme_rdma") && log.contains("UNLOAD_STORAGE_MODULES"), "{log}");
    let careful = mofed.spec.clone();
    mofed.spec = careful.clone().with_env("UNLOAD_STORAGE_MODULES", "true");
    mofed.in_tree = sorted(mofed.node.loaded());
    let started = mofed.run();
    assert!(
        !mofed.node.loaded().iter().any(|name| name == "nvme_rdma"),
        "the process would use unloaded drivers"
    );
    mofed.stop(&started);
    mofed.node.sh("rmmod nvme-rdma && rmmod nvme-fabrics && rmmod nvme-core");
    mofed.spec = careful;

    mofed.node.sh("modprobe rdma_rxe");
    let log = mofed.refused();
    assert!(log.contains("rdma_rxe") && log.contains("UNLOAD_THIRD_PARTY_RDMA_MODULES"), "{log}");
    mofed.node.sh("rmmod rdma_rxe");

    // A module that is not on any list.
    mofed.node.sh("modprobe 9pnet_rdma");
    let log = mofed.refused();
    assert!(log.contains("module 9pnet_rdma uses rdma_cm"), "{log}");
    mofed.node.sh("rmmod 9pnet_rdma && rmmod 9pnet");

    // A process holds the device. The operator's pod cannot see the process; a pod with hostPID can.
    mofed.node.sh("sleep 600 < /dev/infiniband/rdma_cm > /dev/null 2>&1 & echo $! > /tmp/user");
    let log = mofed.refused();
    assert!(log.contains("unload rdma_ucm: 1 reference(s)") && log.contains("unknown user"), "{log}");
    mofed.spec.host_pid = true;
    let log = mofed.refused();
    let user = mofed.node.sh("cat /tmp/user");
    let who = format!("process {} (sleep) with /dev/infiniband/rdma_cm open", user.trim());
    assert!(log.contains(&who), "{log}");
    mofed.spec.host_pid = false;
    mofed.node.sh("kill $(cat /tmp/user)");

    // Dependencies of the unloaded modules are still loaded.
    mofed.in_tree = sorted(mofed.node.loaded());

    // A second container of the same kind exits immediately and changes nothing.
    let started = mofed.run();
    let own = mofed.spec.name.clone();
    mofed.spec.name = "mofed-container-2".to_owned();
    let second = mofed.start();
    let status = mofed.node.await_end(&second);
    let log = mofed.node.log(&second);
    assert_eq!(status, 1, "{log}");
    assert!(log.contains("/run/mellanox/drivers/.lock"), "{log}");
    mofed.spec.name = own;
    mofed.node.assert_probes_pass(&started);
    mofed.node.sh("ls /run/mellanox/drivers/.driver-ready");
    mofed.stop(&started);
}
