//! Optional daemons and tools of the driver. They are started if the image has them. The modules work without them.
//! Running daemons are found by their PID files, and stopped.

use std::{
    fs,
    path::PathBuf,
    process::{Command, Stdio},
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

use crate::{
    error::Error,
    files::{self, entries, program, text},
    node::{Node, Paths},
};

/// Polls after SIGTERM: five seconds in total, as in the operators' images.
const MAX_POLLS: u32 = 50;
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Daemons and their directories below `/run`, in stop order. The PID file in the directory has the daemon's name.
const DAEMONS: [(&str, &str); 5] = [
    ("nvidia-persistenced", "nvidia-persistenced"),
    ("nvidia-gridd", "nvidia-gridd"),
    ("nvidia-topologyd", "nvidia-topologyd"),
    ("nv-fabricmanager", "nvidia-fabricmanager"),
    ("nvlsm", "nvidia-fabricmanager"),
];

/// Result of starting a program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum StartResult {
    /// The program went into the background or finished its work.
    Success(&'static str),
    /// The image does not have the program.
    Absent(&'static str),
    /// The program failed with this error.
    Failed(&'static str, String),
}

/// Configuration of the fabric manager.
const FABRIC_CONFIG: &str = "/usr/share/nvidia/nvswitch/fabricmanager.cfg";

/// Program that sets up the switches between this machine's GPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FabricManager {
    program: &'static str,
    /// Options with their values.
    arguments: &'static [[&'static str; 2]],
    /// Whether the switches are behind the management port of an InfiniBand adapter (fifth NVLink generation).
    pub(crate) needs_infiniband: bool,
}

/// For switches that the NVIDIA driver itself drives.
const NVSWITCH_MANAGER: FabricManager = FabricManager {
    program: "nv-fabricmanager",
    arguments: &[["-c", FABRIC_CONFIG]],
    needs_infiniband: false,
};

/// For switches of the fifth NVLink generation; also starts their subnet manager.
const INFINIBAND_MANAGER: FabricManager = FabricManager {
    program: "nvidia-fabricmanager-start.sh",
    arguments: &[
        ["--mode", "start"],
        ["--fm-config-file", FABRIC_CONFIG],
        ["--fm-pid-file", "/var/run/nvidia-fabricmanager/nv-fabricmanager.pid"],
        ["--nvlsm-config-file", "/usr/share/nvidia/nvlsm/nvlsm.conf"],
        ["--nvlsm-pid-file", "/var/run/nvidia-fabricmanager/nvlsm.pid"],
    ],
    needs_infiniband: true,
};

impl FabricManager {
    pub(crate) fn is_installed(self, paths: &Paths) -> bool {
        program(paths, self.program).is_some()
    }

    pub(crate) fn start(self, paths: &Paths) -> StartResult {
        run(paths, self.program, self.arguments.as_flattened())
    }

    /// Resets the GPUs if these fields require it: GPUs of the fifth NVLink generation keep partitions of another fabric mode. The
    /// operators' images do the same.
    pub(crate) fn reset_gpus(self, paths: &Paths, fields: &[(String, String)]) -> Option<StartResult> {
        let is_partitioned = fields.iter().any(|(field, value)| field == "FABRIC_MODE" && value == "1");
        (self.needs_infiniband && is_partitioned).then(|| run(paths, "nvidia-smi", &["-r"]))
    }
}

/// Sets these fields in the fabric manager's configuration. Makes no new file, which would lack all other fields.
pub(crate) fn configure_fabric_manager(node: &Node<'_>, fields: &[(String, String)]) -> Result<(), Error> {
    if fields.is_empty() {
        return Ok(());
    }
    let mut lines = files::lines(node, FABRIC_CONFIG);
    if lines.is_empty() {
        node.log
            .warn(format!("the variables NVFM_CONFIG_* have no effect: the image has no {FABRIC_CONFIG}"));
        return Ok(());
    }
    for (field, value) in fields {
        lines.retain(|line| line.split_once('=').is_none_or(|(name, _)| name.trim() != field));
        lines.push(format!("{field}={value}"));
        node.log.step(format!("configured the fabric manager: {field}={value}"));
    }
    lines.push(String::new());
    files::write(node, FABRIC_CONFIG, &lines.join("\n"))
}

/// Starts the tools that the image has, in order. A failure does not prevent the next one from starting.
pub(crate) fn start_tools(paths: &Paths) -> [StartResult; 2] {
    [
        // Creates device nodes. Without this tool, the first user of the driver's libraries creates them.
        run(paths, "nvidia-modprobe", &["-c", "0", "-u"]),
        run(paths, "nvidia-persistenced", &["--persistence-mode"]),
    ]
}

/// The fabric manager that this machine needs; `None` without switches.
pub(crate) fn fabric_manager(paths: &Paths) -> Option<FabricManager> {
    // An InfiniBand port that manages switches of the fifth NVLink generation says so in its vital product data.
    let is_switch_management_port = |adapter: &PathBuf| {
        let product_data = fs::read(adapter.join("device/vpd")).unwrap_or_default();
        product_data.windows(6).any(|word| word == b"SW_MNG")
    };
    if entries(paths.at("/sys/class/infiniband")).iter().any(is_switch_management_port) {
        return Some(INFINIBAND_MANAGER);
    }
    let has_switches = !entries(paths.at("/proc/driver/nvidia-nvswitch/devices")).is_empty();
    has_switches.then_some(NVSWITCH_MANAGER)
}

/// Returns the process IDs of all running daemons.
pub(crate) fn processes(paths: &Paths) -> Vec<u32> {
    let running = DAEMONS.into_iter().filter_map(|(name, directory)| running(paths, name, directory));
    running.map(|pid| pid.as_raw_pid().unsigned_abs()).collect()
}

/// Stops all running daemons and logs that. A daemon that does not end is an error, because it keeps the driver in use.
pub(crate) fn stop(node: &Node<'_>) -> Result<(), Error> {
    for (name, directory) in DAEMONS {
        let Some(pid) = running(&node.paths, name, directory) else { continue };
        // Ignore the error of a daemon that has just ended.
        let _ = kill_process(pid, Signal::TERM);
        if !node.poll(MAX_POLLS, POLL_INTERVAL, || running(&node.paths, name, directory).is_none()) {
            return Err(Error::new(
                format!("{name} (process {pid}) does not end after SIGTERM, and uses the driver"),
                "inspect that process on the node; it may wait for a GPU that does not answer (dmesg, NVRM: Xid)",
            ));
        }
        node.log.step(format!("stopped {name}"));
    }
    Ok(())
}

/// Returns the running process of a PID file. The fabric manager's PID file is on the host and outlives its container,
/// so the PID may have been reused. The process must therefore have the daemon's name.
fn running(paths: &Paths, name: &str, directory: &str) -> Option<Pid> {
    // In most images one of these directories is a symlink to the other.
    let pid_file = |run: &&str| text(paths.at(&format!("{run}/{directory}/{name}.pid")));
    let id = ["/run", "/var/run"].iter().find_map(pid_file)?;
    let number: i32 = id.parse().ok().filter(|&number| number > 1)?;
    let status = text(paths.at(&format!("/proc/{number}/status")))?;
    let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    // The kernel keeps 15 bytes of a name (TASK_COMM_LEN).
    let has_its_name = field("Name:").is_some_and(|comm| comm == name.get(..15).unwrap_or(name));
    // A process that ended but was not waited for still has its entry.
    let has_ended = field("State:").is_some_and(|state| state.starts_with(['Z', 'X']));
    if has_its_name && !has_ended { Pid::from_raw(number) } else { None }
}

/// Runs a program until it exits; a daemon has then gone into the background. The output goes to the container's log.
fn run(paths: &Paths, name: &'static str, arguments: &[&str]) -> StartResult {
    let Some(program) = program(paths, name) else { return StartResult::Absent(name) };
    match Command::new(program).args(arguments).stdin(Stdio::null()).status() {
        Ok(status) if status.success() => StartResult::Success(name),
        Ok(status) => StartResult::Failed(name, status.to_string()),
        Err(error) => StartResult::Failed(name, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::Bench;

    /// A test bench with the real `/proc`.
    fn with_real_processes() -> Bench {
        let bench = Bench::new();
        fs::remove_dir_all(bench.at("/proc")).unwrap();
        symlink("/proc", bench.at("/proc")).unwrap();
        bench
    }

    fn start(bench: &Bench) -> [StartResult; 2] {
        start_tools(&bench.node().paths)
    }

    #[test]
    fn daemons_are_optional() {
        let bench = with_real_processes();
        assert_eq!(start(&bench), ["nvidia-modprobe", "nvidia-persistenced"].map(StartResult::Absent));
        stop(&bench.node()).unwrap();
        assert_eq!(bench.log(), "");
    }

    #[test]
    fn a_failed_daemon_does_not_prevent_the_next_start() {
        let bench = Bench::new();
        let log = bench.at("/log");
        bench.program("nvidia-modprobe", "exit 3");
        bench.program("nvidia-persistenced", &format!("echo \"$@\" > {}", log.display()));
        let started = start(&bench);
        let failed = StartResult::Failed("nvidia-modprobe", "exit status: 3".into());
        assert_eq!(started, [failed, StartResult::Success("nvidia-persistenced")]);
        assert_eq!(bench.read("/log").unwrap(), "--persistence-mode\n");
    }

    #[test]
    fn a_daemon_is_stopped_by_its_pid_file() {
        let bench = with_real_processes();
        let pid_file = "/run/nvidia-persistenced/nvidia-persistenced.pid";
        bench.write(pid_file, "");
        // The child process has the script's name, as a daemon would have its program's name.
        bench.program(
            "nvidia-persistenced",
            &format!(
                "if [ \"$1\" = stay ]; then echo $$ > {0}; while :; do sleep 0.1; done; fi\n\
                 \"$0\" stay > /dev/null 2>&1 &\nuntil [ -s {0} ]; do :; done",
                bench.at(pid_file).display()
            ),
        );
        assert_eq!(start(&bench).last(), Some(&StartResult::Success("nvidia-persistenced")));
        let process = format!("/proc/{}", bench.read(pid_file).unwrap().trim());
        assert!(bench.at(&process).exists());
        // Pauses of the bench take no time, but stopping a process does, so retry until it has ended.
        while stop(&bench.node()).is_err() {}
        let log = bench.log();
        stop(&bench.node()).unwrap();
        assert_eq!(bench.log(), log, "nothing is left to stop");
    }

    #[test]
    fn a_stale_or_invalid_pid_file_kills_no_process() {
        let bench = with_real_processes();
        // The test process has another name; if it were killed, the test would fail.
        for text in [std::process::id().to_string().as_str(), "-1", "0", "1", "none", "", "99999999999999"] {
            bench.write("/run/nvidia-fabricmanager/nv-fabricmanager.pid", text);
            stop(&bench.node()).unwrap();
            assert_eq!(bench.log(), "", "{text:?}");
        }
    }

    #[test]
    fn switches_are_detected_in_proc_and_by_their_vpd() {
        let bench = Bench::new();
        let fabric = || fabric_manager(&bench.node().paths);
        assert_eq!(fabric(), None);
        bench.write("/proc/driver/nvidia-nvswitch/devices/0000:01:00.0/information", "");
        assert_eq!(fabric(), Some(NVSWITCH_MANAGER));
        bench.write("/sys/class/infiniband/mlx5_0/device/vpd", "\u{1}plain adapter");
        assert_eq!(fabric(), Some(NVSWITCH_MANAGER));
        bench.write("/sys/class/infiniband/mlx5_1/device/vpd", "\u{1}V0\tSW_MNG\u{0}");
        assert_eq!(fabric(), Some(INFINIBAND_MANAGER));
    }
}
