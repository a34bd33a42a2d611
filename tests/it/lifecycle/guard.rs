//! A guard on the node swaps the driver of the node's uplink. Container, guard and both are killed in the middle. The network
//! card is QEMU's e1000, whose driver has the name `mlx5_core` here. ci/node-swap has more cases, with systemd.

use std::{fs, path::Path};

use k8s_openapi::api::apps::v1::DaemonSet;

use super::{LIMIT, newest};
use crate::support::{
    node_vm::{ContainerSpec, ECHO_SERVER, Node, NodeTree, Started, image_tree},
    ofed,
    packages::kernel_image,
    virtual_machine::entrypoint,
};

const SET_UP: &str = "modprobe mlx5_core && ip link set eth0 up && ip address add 10.0.2.15/24 dev eth0\n\
    ip route add default via 10.0.2.2 && echo 2 > /proc/sys/net/ipv4/conf/eth0/rp_filter\n\
    for path in usr/sbin lib/x86_64-linux-gnu lib64; do mkdir -p /$path; done\n\
    cp /images/other/sbin/ip /usr/sbin/ip\n\
    cp -r /images/other/lib/x86_64-linux-gnu/. /lib/x86_64-linux-gnu\n\
    cp -r /images/other/lib64/. /lib64";

/// Starts the guard again when it is killed, as systemd does.
const GUARD: &str = "mkdir -p /var/lib/farrier && cp /images/other/usr/bin/driver-entrypoint /var/lib/farrier/swap-guard\n\
    ( set +e; while :; do\n\
    /var/lib/farrier/swap-guard swap-guard serve & echo $! > /run/guard.pid; wait $!; sleep 1\n\
    done ) > /run/guard.log 2>&1 < /dev/null &";

const FACTS: &str = "ip -4 -o address show dev eth0 | sed 's/^[0-9]*: //'\nip route\n\
    cat /proc/sys/net/ipv4/conf/eth0/rp_filter";

/// Build IDs of modules tell the drivers apart.
const DRIVER: &str = "od -An -tx1 /sys/module/mlx5_core/notes/.note.gnu.build-id";

const REQUEST: &str = "/run/farrier/swap/mlx5_core";
const JOURNAL: &str = "/run/farrier/swap/mlx5_core/journal";

/// Processes that a case kills.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Killed {
    Nothing,
    Container,
    Guard,
    Both,
}

/// A node with a guard, and with the facts before a swap.
struct Guarded {
    node: Node,
    facts: String,
    host: String,
    answers: String,
}

impl Guarded {
    fn boot() -> Self {
        let release = newest();
        let kernel = kernel_image(&release);
        let drivers = ofed::e1000(&release);
        let tree = NodeTree::new(&kernel, &[]);
        tree.module(&drivers.join("host/mlx5_core.ko"));
        tree.write("/etc/kubernetes/kubelet.conf", &format!("    server: https://{ECHO_SERVER}\n"));
        for kind in ["other", "deaf"] {
            let image = image_tree(&entrypoint());
            ofed::program(image.path(), "/sbin/ip");
            ofed::add_driver(image.path(), &drivers.join(kind).join("mlx5_core.ko"), &kernel);
            tree.image(kind, image.path());
        }
        let mut node = Node::boot_with_network(&kernel, tree);
        node.sh(&format!("set -e\n{SET_UP}\n{GUARD}"));
        let server = ECHO_SERVER.replace(':', " ");
        let answers = format!("[ \"$(echo here | nc -w 3 {server})\" = here ]");
        assert!(node.await_that(&answers, LIMIT), "the server does not answer before the swap");
        assert!(node.await_that("[ -e /run/farrier/swap/lock ]", LIMIT), "{}", node.sh("cat /run/guard.log"));
        let (facts, host) = (node.sh(FACTS), node.sh(DRIVER));
        Self { node, facts, host, answers }
    }

    fn start(&mut self, image: &str, limit: &str) -> Started {
        let mut spec = ContainerSpec::read("generic.yaml", "site-driver")
            .with_env("ALLOW_DISRUPTION", "uplink")
            .with_env("SWAP_GUARD", "/run/farrier/swap")
            .with_env("API_SERVER_TIMEOUT_SEC", limit);
        spec.args = ["generic", "--replace", "mlx5_core", "mlx5_core"].map(str::to_owned).to_vec();
        spec.startup = Some(["sh", "-c", "ls /run/farrier/mlx5_core.ready"].map(str::to_owned).to_vec());
        self.node.start(&spec, image, &["driver-entrypoint"])
    }

    /// Kills processes as soon as the guard has begun a phase. The whole script runs on the node, because phases are short.
    fn kill_in(&mut self, phase: &str, killed: Killed, container: &Started) {
        let pid = self.node.process(container);
        let processes = match killed {
            Killed::Nothing => return,
            Killed::Container => pid,
            Killed::Guard => "$(cat /run/guard.pid)".to_owned(),
            Killed::Both => format!("{pid} $(cat /run/guard.pid)"),
        };
        let kill = format!("{{ grep -q ' {phase}' {JOURNAL} && kill -KILL {processes}; }}");
        assert!(self.node.await_that(&kill, LIMIT), "{}", self.log());
    }

    /// Waits until the guard has left the request, and returns the last phase.
    fn await_end(&mut self) -> String {
        assert!(self.node.await_that(&format!("[ -e {REQUEST}/done ]"), LIMIT), "{}", self.log());
        self.node.sh(&format!("tail -n 1 {JOURNAL} | cut -d ' ' -f 2")).trim().to_owned()
    }

    fn log(&mut self) -> String {
        self.node.sh(&format!("cat /run/guard.log {JOURNAL}; dmesg | tail -n 20"))
    }

    /// Asserts that the node has its addresses, routes and settings, and reaches the server.
    fn assert_connected(&mut self, case: &str) {
        let log = self.log();
        assert_eq!(self.node.sh(FACTS), self.facts, "{case}: {log}");
        assert!(self.node.await_that(&self.answers.clone(), LIMIT), "{case}: {log}");
    }
}

#[test]
fn a_swap_ends_without_the_container_and_after_a_kill_of_the_guard() {
    let mut guarded = Guarded::boot();
    for (image, limit, killed, phase, end) in [
        ("other", "120", Killed::Nothing, "", "committed"),
        ("other", "120", Killed::Both, "unloading", "committed"),
        ("other", "120", Killed::Container, "confirming", "committed"),
        ("other", "120", Killed::Both, "confirming", "committed"),
        ("deaf", "15", Killed::Guard, "confirming", "undone"),
    ] {
        let case = format!("{image}, {killed:?} killed in {phase:?}");
        // The phases of the case before are in the same journal.
        guarded.node.sh(&format!("rm -rf {REQUEST}"));
        let container = guarded.start(image, limit);
        guarded.kill_in(phase, killed, &container);
        let last = guarded.await_end();
        let log = guarded.log();
        println!("{case}:\n{log}");
        assert_eq!(last, end, "{case}: {log}");
        guarded.assert_connected(&case);
        let is_host = guarded.node.sh(DRIVER) == guarded.host;
        assert_eq!(is_host, end == "undone", "{case}: {log}");
        let container = match killed {
            Killed::Container | Killed::Both => {
                assert_eq!(guarded.node.await_end(&container), 137, "{case}");
                // The next container finds the swap done, and restores the host's driver at its end.
                guarded.start(image, limit)
            }
            Killed::Nothing | Killed::Guard => container,
        };
        if end == "undone" {
            assert_eq!(guarded.node.await_end(&container), 1, "{}", guarded.node.log(&container));
            let log = guarded.node.log(&container);
            let expected =
                format!("the guard undid the swap: the API server at {ECHO_SERVER} did not answer");
            assert!(log.contains(&expected), "{case}: {log}");
        } else {
            guarded.node.await_startup(&container, LIMIT);
            assert_eq!(guarded.node.terminate(&container), 0, "{}", guarded.node.log(&container));
        }
        assert_eq!(guarded.node.sh(DRIVER), guarded.host, "{case}");
        guarded.assert_connected(&case);
    }
}

/// The pod writes the node's root, so that it is root there. It has nothing that it does not need for that.
#[test]
fn the_installer_has_few_rights() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kustomize/swap-guard/daemon-set.yaml");
    let set: DaemonSet = serde_saphyr::from_str(&fs::read_to_string(path).unwrap()).unwrap();
    let pod = set.spec.template.spec.unwrap();
    assert_eq!(pod.automount_service_account_token, Some(false));
    assert_eq!((pod.host_pid, pod.host_network, pod.host_ipc), (Some(true), None, None));
    let [container] = pod.containers.as_slice() else { panic!("{:?}", pod.containers) };
    assert_eq!(
        container.command,
        Some(["driver-entrypoint", "swap-guard", "install"].map(str::to_owned).to_vec())
    );
    assert_eq!(container.env, None, "no Secret, and nothing to configure");
    let rights = container.security_context.as_ref().unwrap();
    assert_eq!((rights.privileged, rights.allow_privilege_escalation), (None, Some(false)));
    let capabilities = rights.capabilities.as_ref().unwrap();
    assert_eq!(capabilities.drop, Some(vec!["ALL".to_owned()]));
    assert_eq!(capabilities.add, Some(vec!["SYS_CHROOT".to_owned()]));
    let volumes: Vec<_> = pod.volumes.iter().flatten().map(|volume| volume.host_path.as_ref()).collect();
    assert!(matches!(volumes.as_slice(), [Some(host)] if host.path == "/"), "{volumes:?}");
}
