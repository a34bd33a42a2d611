//! A pod that holds a driver's device open blocks the unload until the pod is evicted.
use std::time::Duration;

use super::{LIMIT, image_with, newest};
use crate::support::{
    node_vm::{ContainerSpec, Node, NodeTree, Started},
    packages::kernel_image,
};

const ENTRYPOINT: [&str; 1] = ["driver-entrypoint"];
const USER: &str = "0f3a2b1c-0000-4000-8000-000000000001";
const DRIVER: &str = "0f3a2b1c-0000-4000-8000-000000000002";
/// Path of the forecast's termination message, as on a kubelet.
const TERMINATION_LOG: &str = "/run/termination-log";

/// Moves a container's process into the control group of a pod, like a kubelet with systemd.
fn into_pod(node: &mut Node, container: &Started, uid: &str) {
    let name = uid.replace('-', "_");
    let group = format!("/sys/fs/cgroup/kubepods.slice/kubepods-besteffort-pod{name}.slice/cri-1.scope");
    let process = node.process(container);
    node.sh(&format!("mkdir -p {group} && echo {process} > {group}/cgroup.procs"));
}

/// Runs the forecast Job on the node and returns its exit code and its termination message.
fn forecast(node: &mut Node, spec: &ContainerSpec) -> (i32, String) {
    node.sh(&format!(": > {TERMINATION_LOG}"));
    let job = node.start(spec, "site", &ENTRYPOINT);
    let status = node.await_end(&job);
    println!("{}", node.log(&job));
    (status, node.sh(&format!("cat {TERMINATION_LOG}")))
}

#[test]
fn a_driver_goes_when_the_pod_that_holds_its_device_is_evicted() {
    let release = newest();
    let kernel = kernel_image(&release);
    let tree = NodeTree::new(&kernel, &["mlx5_core", "rdma_ucm"]);
    let image = image_with(&release, &kernel, &["farrier_good.ko"]);
    tree.image("site", image.path());
    let mut node = Node::boot(&kernel, tree);
    node.sh("mount -t cgroup2 cgroup2 /sys/fs/cgroup");

    let driver_spec = ContainerSpec::read("generic.yaml", "site-driver");
    let driver = node.start(&driver_spec, "site", &ENTRYPOINT);
    node.await_startup(&driver, LIMIT);
    into_pod(&mut node, &driver, DRIVER);
    let mut job = driver_spec
        .clone()
        .named("forecast")
        .with_env("FARRIER_DRIVER_POD", DRIVER)
        .with_host_path(TERMINATION_LOG, "/dev/termination-log");
    job.args = ["forecast", "--message", "/dev/termination-log", "rdma_ucm", "mlx5_core"]
        .map(str::to_owned)
        .to_vec();
    assert_eq!(forecast(&mut node, &job), (0, String::new()), "no process has the device open");

    // A user's pod, which sees no other process and requested no device as a resource.
    let mut user_spec = driver_spec.clone().named("training");
    user_spec.host_pid = false;
    let program =
        "trap 'exit 3' TERM; exec 3< /dev/infiniband/rdma_cm; while :; do /bin/busybox usleep 10000; done";
    user_spec.command = ["sh", "-c", program].map(str::to_owned).to_vec();
    user_spec.args = Vec::new();
    let user = node.start(&user_spec, "site", &ENTRYPOINT);
    into_pod(&mut node, &user, USER);
    let process = node.process(&user);
    let held = format!("ls -l /proc/{process}/fd | grep -q /dev/infiniband/rdma_cm");
    assert!(node.await_that(&held, LIMIT));

    // The forecast names the pod. A driver that terminates anyway stays loaded with everything that depends on it.
    let holder = format!(
        "{USER} rdma_ucm: used by process {process} (sh) of pod {USER} with /dev/infiniband/rdma_cm open\n"
    );
    assert_eq!(forecast(&mut node, &job), (1, holder.clone()));
    let before = node.loaded();
    assert_ne!(node.terminate(&driver), 0, "{}", node.log(&driver));
    let log = node.log(&driver);
    assert!(log.contains("unload rdma_ucm") && log.contains(&format!("of pod {USER}")), "{log}");
    assert!(
        node.loaded().contains(&"rdma_ucm".to_owned()) && before.contains(&"rdma_ucm".to_owned()),
        "{log}"
    );
    let driver = node.start(&driver_spec, "site", &ENTRYPOINT);
    node.await_startup(&driver, LIMIT);
    into_pod(&mut node, &driver, DRIVER);
    assert_eq!(forecast(&mut node, &job), (1, holder));

    // The evicted pod ends on its signal, and then the driver is unloaded.
    assert_eq!(node.terminate(&user), 3);
    assert_eq!(forecast(&mut node, &job), (0, String::new()));
    assert_eq!(node.terminate(&driver), 0, "{}", node.log(&driver));
    let gone = "! grep -qE '^(rdma_ucm|mlx5_core|farrier_good) ' /proc/modules";
    assert!(node.await_that(gone, Duration::from_secs(1)), "{:?}", node.loaded());
}
