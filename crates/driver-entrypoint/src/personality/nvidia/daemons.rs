//! Adapter: the driver's daemons and tools that the image may have: started if they are there, stopped by
//! their pid files. None of them is needed for the modules to work.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    error::Error,
    files::{entries, program, text},
    node::{Node, Paths},
};

/// How often and how long a daemon is looked at after SIGTERM: five seconds, as the operators' images wait.
const LOOKS: usize = 50;
const BETWEEN_LOOKS: Duration = Duration::from_millis(100);

/// Those that leave a pid file below `/run`, in the order in which they are stopped.
const DAEMONS: &[Daemon] = &[
    Daemon { name: "nvidia-persistenced", pid_file: "nvidia-persistenced/nvidia-persistenced.pid" },
    Daemon { name: "nvidia-gridd", pid_file: "nvidia-gridd/nvidia-gridd.pid" },
    Daemon { name: "nvidia-topologyd", pid_file: "nvidia-topologyd/nvidia-topologyd.pid" },
    Daemon { name: "nv-fabricmanager", pid_file: "nvidia-fabricmanager/nv-fabricmanager.pid" },
    Daemon { name: "nvlsm", pid_file: "nvidia-fabricmanager/nvlsm.pid" },
];

struct Daemon {
    name: &'static str,
    pid_file: &'static str,
}

/// What became of a program that was to be started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Started {
    /// It went into the background, or did its work.
    Yes(&'static str),
    /// The image has none.
    Absent(&'static str),
    /// It ended with this.
    Failed(&'static str, String),
}

/// The program that sets up the switches between this machine's GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FabricManager {
    program: &'static str,
    arguments: &'static [&'static str],
    /// The switches are behind the management port of an InfiniBand adapter: the fifth NVLink generation.
    pub(crate) needs_infiniband: bool,
}

/// For switches that the NVIDIA driver itself drives.
const OF_SWITCHES: FabricManager = FabricManager {
    program: "nv-fabricmanager",
    arguments: &["-c", "/usr/share/nvidia/nvswitch/fabricmanager.cfg"],
    needs_infiniband: false,
};

/// For those of the fifth generation, with their subnet manager.
const OF_INFINIBAND: FabricManager = FabricManager {
    program: "nvidia-fabricmanager-start.sh",
    arguments: &[
        "--mode",
        "start",
        "--fm-config-file",
        "/usr/share/nvidia/nvswitch/fabricmanager.cfg",
        "--fm-pid-file",
        "/var/run/nvidia-fabricmanager/nv-fabricmanager.pid",
        "--nvlsm-config-file",
        "/usr/share/nvidia/nvlsm/nvlsm.conf",
        "--nvlsm-pid-file",
        "/var/run/nvidia-fabricmanager/nvlsm.pid",
    ],
    needs_infiniband: true,
};

impl FabricManager {
    pub(crate) fn is_there(self, paths: &Paths) -> bool {
        program(paths, self.program).is_some()
    }

    pub(crate) fn start(self, paths: &Paths) -> Started {
        run(paths, self.program, self.arguments)
    }
}

/// Starts what the image has, in order. A program that fails does not keep the next from starting.
pub(crate) fn start_tools(paths: &Paths) -> [Started; 2] {
    [
        // Device nodes. Without it the first user of the driver's libraries makes them.
        run(paths, "nvidia-modprobe", &["-c", "0", "-u"]),
        run(paths, "nvidia-persistenced", &["--persistence-mode"]),
    ]
}

/// The fabric manager that this machine wants: none, without switches.
pub(crate) fn fabric_manager(paths: &Paths) -> Option<FabricManager> {
    let is_managed = |adapter: &PathBuf| {
        let product_data = fs::read(adapter.join("device/vpd")).unwrap_or_default();
        product_data.windows(6).any(|word| word == b"SW_MNG")
    };
    if entries(paths.at("/sys/class/infiniband")).iter().any(is_managed) {
        return Some(OF_INFINIBAND);
    }
    let has_switches = !entries(paths.at("/proc/driver/nvidia-nvswitch/devices")).is_empty();
    has_switches.then_some(OF_SWITCHES)
}

/// Stops whatever runs, and says so. One that does not end is an error: it holds the driver.
pub(crate) fn stop(node: &Node<'_>) -> Result<(), Error> {
    for daemon @ Daemon { name, .. } in DAEMONS {
        let Some(pid) = running(&node.paths, daemon) else { continue };
        // One that ends by itself meanwhile is as good as stopped.
        let _ = kill_process(pid, Signal::TERM);
        let is_gone = (0..LOOKS).any(|look| {
            if look > 0 {
                node.kernel.pause(BETWEEN_LOOKS);
            }
            running(&node.paths, daemon).is_none()
        });
        if !is_gone {
            return Err(Error::new(
                format!("{name} (process {pid}) does not end at SIGTERM, and holds the driver"),
                "look at that process on the node; it may wait for a GPU that does not answer (dmesg, NVRM: Xid)",
            ));
        }
        node.log.step(format!("stopped {name}"));
    }
    Ok(())
}

/// The process of a pid file. The fabric manager's lies on the host and outlives its container, so that the
/// number can be another process's by now: the process must bear the daemon's name.
fn running(paths: &Paths, daemon: &Daemon) -> Option<Pid> {
    let Daemon { name, pid_file } = daemon;
    // One is a link to the other, in most images.
    let id = ["/run", "/var/run"].iter().find_map(|directory| text(paths.at(directory).join(pid_file)))?;
    let number: i32 = id.parse().ok().filter(|&number| number > 1)?;
    let status = text(paths.at(&format!("/proc/{number}/status")))?;
    let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    // The kernel keeps 15 bytes of a name (TASK_COMM_LEN).
    let is_it = field("Name:").is_some_and(|comm| comm == name.get(..15).unwrap_or(name));
    // Who ended and was not waited for still has its entry.
    let has_ended = field("State:").is_some_and(|state| state.starts_with(['Z', 'X']));
    if is_it && !has_ended { Pid::from_raw(number) } else { None }
}

/// Runs a program until it has gone into the background, its output in the container's log.
fn run(paths: &Paths, name: &'static str, arguments: &[&str]) -> Started {
    let Some(program) = program(paths, name) else { return Started::Absent(name) };
    match Command::new(program).args(arguments).stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Started::Yes(name),
        Ok(status) => Started::Failed(name, status.to_string()),
        Err(error) => Started::Failed(name, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::Bench;

    /// Processes are real ones here.
    fn with_real_processes() -> Bench {
        let bench = Bench::new();
        fs::remove_dir_all(bench.at("/proc")).unwrap();
        symlink("/proc", bench.at("/proc")).unwrap();
        bench
    }

    fn start(bench: &Bench) -> [Started; 2] {
        start_tools(&bench.node().paths)
    }

    #[test]
    fn what_the_image_has_not_is_not_needed() {
        let bench = with_real_processes();
        assert_eq!(start(&bench), ["nvidia-modprobe", "nvidia-persistenced"].map(Started::Absent));
        stop(&bench.node()).unwrap();
        assert_eq!(bench.log(), "");
    }

    #[test]
    fn one_that_fails_does_not_keep_the_next_from_starting() {
        let bench = Bench::new();
        let log = bench.at("/log");
        bench.program("nvidia-modprobe", "exit 3");
        bench.program("nvidia-persistenced", &format!("echo \"$@\" > {}", log.display()));
        let started = start(&bench);
        let failed = Started::Failed("nvidia-modprobe", "exit status: 3".into());
        assert_eq!(started, [failed, Started::Yes("nvidia-persistenced")]);
        assert_eq!(bench.text("/log").unwrap(), "--persistence-mode\n");
    }

    #[test]
    fn a_daemon_is_stopped_by_its_pid_file() {
        let bench = with_real_processes();
        let pid_file = "/run/nvidia-persistenced/nvidia-persistenced.pid";
        bench.file(pid_file, "");
        // The second process has the script's name, as the daemon's would.
        bench.program(
            "nvidia-persistenced",
            &format!(
                "if [ \"$1\" = stay ]; then echo $$ > {0}; while :; do sleep 0.1; done; fi\n\
                 \"$0\" stay > /dev/null 2>&1 &\nuntil [ -s {0} ]; do :; done",
                bench.at(pid_file).display()
            ),
        );
        assert_eq!(start(&bench).last(), Some(&Started::Yes("nvidia-persistenced")));
        let process = format!("/proc/{}", bench.text(pid_file).unwrap().trim());
        assert!(bench.at(&process).exists());
        // The bench's pauses take no time, and a process does: look as often as it takes.
        while stop(&bench.node()).is_err() {}
        let said = bench.log();
        stop(&bench.node()).unwrap();
        assert_eq!(bench.log(), said, "nothing is left to stop");
    }

    #[test]
    fn a_stale_or_broken_pid_file_kills_nobody() {
        let bench = with_real_processes();
        // This very process has another name; were it killed, there would be no result to see.
        for text in [std::process::id().to_string().as_str(), "-1", "0", "1", "none", "", "99999999999999"] {
            bench.file("/run/nvidia-fabricmanager/nv-fabricmanager.pid", text);
            stop(&bench.node()).unwrap();
            assert_eq!(bench.log(), "", "{text:?}");
        }
    }

    #[test]
    fn switches_are_seen_where_the_drivers_show_them() {
        let bench = Bench::new();
        let fabric = || fabric_manager(&bench.node().paths);
        assert_eq!(fabric(), None);
        bench.file("/proc/driver/nvidia-nvswitch/devices/0000:01:00.0/information", "");
        assert_eq!(fabric(), Some(OF_SWITCHES));
        bench.file("/sys/class/infiniband/mlx5_0/device/vpd", "\u{1}plain adapter");
        assert_eq!(fabric(), Some(OF_SWITCHES));
        bench.file("/sys/class/infiniband/mlx5_1/device/vpd", "\u{1}V0\tSW_MNG\u{0}");
        assert_eq!(fabric(), Some(OF_INFINIBAND));
    }
}
