//! A Kubernetes node in a virtual machine: the distribution's kernel, some of its modules, images, and an agent. The agent
//! starts containers as their DaemonSets specify, runs their probes and ends them.

mod container;
mod daemon_set;
mod machine;
mod tree;

use std::time::Duration;

use farrier_inputs::KernelImage;

pub use daemon_set::ContainerSpec;
pub use machine::Output;
pub use tree::{NodeTree, depmod, files, image_tree};

use container::{directory, exec, start};
use machine::Machine;

/// Time limit for a short step.
const STEP: Duration = Duration::from_mins(1);
/// Time limit for a container's end. An emulated node on a busy machine is many times slower than a real one, so the grace period
/// of the manifest says nothing here.
const END: Duration = Duration::from_mins(6);

/// Address and port of the only server in the network of [`Node::boot_with_network`].
pub const ECHO_SERVER: &str = "10.0.2.100:6443";

/// A running node.
pub struct Node {
    machine: Machine,
}

/// A started container.
#[derive(Clone, Debug)]
pub struct Started {
    spec: ContainerSpec,
}

impl Node {
    /// Boots the node.
    pub fn boot(kernel: &KernelImage, tree: NodeTree) -> Self {
        Self::boot_with(kernel, tree, &[])
    }

    /// Boots the node with a network card of type e1000. Its network has no way out; at [`ECHO_SERVER`], a server sends back
    /// what it receives.
    pub fn boot_with_network(kernel: &KernelImage, tree: NodeTree) -> Self {
        let network = format!("user,id=network,restrict=on,guestfwd=tcp:{ECHO_SERVER}-cmd:cat");
        // No ROM: the firmware boots nothing from this card.
        Self::boot_with(kernel, tree, &["-netdev", &network, "-device", "e1000,netdev=network,romfile="])
    }

    fn boot_with(kernel: &KernelImage, tree: NodeTree, devices: &[&str]) -> Self {
        let (directory, initramfs) = tree.pack();
        // During unpacking, the archive is in memory twice.
        let size = directory.path().join(initramfs).metadata().unwrap().len() >> 20;
        let memory = 448 + 3 * u32::try_from(size).unwrap();
        Self { machine: Machine::boot(&kernel.vmlinuz, directory, initramfs, memory, devices) }
    }

    /// Runs a script on the node, regardless of its exit status.
    pub fn run(&mut self, script: &str) -> Output {
        self.machine.run(script, STEP)
    }

    /// Runs a script that must succeed, and returns its output.
    pub fn sh(&mut self, script: &str) -> String {
        let output = self.run(script);
        assert_eq!(output.status, 0, "{script}: {}", output.text);
        output.text
    }

    /// Returns whether a command succeeds.
    pub fn succeeds(&mut self, command: &str) -> bool {
        self.run(command).status == 0
    }

    /// Waits until a command succeeds; returns false at the limit.
    pub fn await_that(&mut self, condition: &str, limit: Duration) -> bool {
        // No notification exists; the sleep only limits the polling rate.
        let script = format!("until {condition}; do usleep 10000; done > /dev/null 2>&1");
        self.machine.run(&script, limit).status == 0
    }

    /// Returns the names of the loaded modules.
    pub fn loaded(&mut self) -> Vec<String> {
        let text = self.sh("cat /proc/modules");
        text.lines().filter_map(|line| Some(line.split_once(' ')?.0.to_owned())).collect()
    }

    /// Returns the `srcversion` of a loaded module.
    pub fn source_version(&mut self, module: &str) -> Option<String> {
        let output = self.run(&format!("cat /sys/module/{module}/srcversion"));
        (output.status == 0).then(|| output.text.trim().to_owned())
    }

    /// Starts a container of an image on the node; `entrypoint` comes from the image's configuration.
    pub fn start(&mut self, spec: &ContainerSpec, image: &str, entrypoint: &[&str]) -> Started {
        let output = self.run(&start(spec, image, entrypoint));
        assert_eq!(output.status, 0, "{} of {image} does not start: {}", spec.name, output.text);
        Started { spec: spec.clone() }
    }

    /// Runs a probe of the container once.
    pub fn probe(&mut self, started: &Started, command: Option<&Vec<String>>) -> Output {
        let command = command.expect("the manifest has this probe");
        self.machine.run(&exec(&started.spec, command), STEP)
    }

    /// Waits until the startup probe passes; on failure, the panic contains the container's log.
    pub fn await_startup(&mut self, started: &Started, limit: Duration) {
        let probe = started.spec.startup.clone().expect("the manifest has a startup probe");
        let ended = format!("{}/status", directory(&started.spec));
        let script = format!(
            "until ( {} ); do [ ! -e {ended} ] || exit 1; usleep 100000; done > /dev/null 2>&1",
            exec(&started.spec, &probe).trim_end()
        );
        let output = self.machine.run(&script, limit);
        assert_eq!(output.status, 0, "{} does not get ready: {}", started.spec.name, self.report(started));
    }

    /// Asserts that the liveness and readiness probes pass.
    pub fn assert_probes_pass(&mut self, started: &Started) {
        for probe in [&started.spec.liveness, &started.spec.readiness].into_iter().flatten() {
            let output = self.probe(started, Some(probe));
            assert_eq!(output.status, 0, "{probe:?}: {}; {}", output.text, self.log(started));
        }
    }

    /// Returns the process id of the container's first process on the node.
    pub fn process(&mut self, started: &Started) -> String {
        self.sh(&format!("cat {}/pid", directory(&started.spec))).trim().to_owned()
    }

    /// Sends a signal to the container's first process, such as `TERM`.
    pub fn signal(&mut self, started: &Started, signal: &str) {
        let directory = directory(&started.spec);
        self.sh(&format!("kill -{signal} $(cat {directory}/pid)"));
    }

    /// Waits for the container's end, and returns its exit status.
    pub fn await_end(&mut self, started: &Started) -> i32 {
        let status = format!("{}/status", directory(&started.spec));
        let ended = self.await_that(&format!("[ -e {status} ]"), END);
        assert!(ended, "{} does not end: {}", started.spec.name, self.report(started));
        self.sh(&format!("cat {status}")).trim().parse().unwrap()
    }

    /// Terminates the container like a kubelet.
    pub fn terminate(&mut self, started: &Started) -> i32 {
        self.signal(started, "TERM");
        self.await_end(started)
    }

    /// Kills the container, like the kernel when memory is short.
    pub fn kill(&mut self, started: &Started) {
        self.signal(started, "KILL");
        self.await_end(started);
    }

    /// Kills the container as soon as a command succeeds on the node. The whole script runs there and does not sleep, because
    /// some states last less than the start of a program.
    pub fn kill_when(&mut self, started: &Started, condition: &str, limit: Duration) {
        let directory = directory(&started.spec);
        let script = format!(
            "read pid < {directory}/pid; until {condition}; do :; done > /dev/null 2>&1; kill -KILL $pid"
        );
        let output = self.machine.run(&script, limit);
        assert_eq!(output.status, 0, "{condition}: {}", self.report(started));
        self.await_end(started);
    }

    /// Returns the container's output.
    pub fn log(&mut self, started: &Started) -> String {
        self.sh(&format!("cat {}/log", directory(&started.spec)))
    }

    /// Returns diagnostics for a misbehaving container.
    fn report(&mut self, started: &Started) -> String {
        let log = self.log(started);
        let kernel = self.sh("dmesg | tail -n 40; lsmod; cat /proc/self/mountinfo");
        format!("its log:\n{log}\nthe node:\n{kernel}")
    }
}
