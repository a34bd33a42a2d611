//! Adapter: the driver's daemons and tools that the image may have: started if they are there, stopped by
//! their pid files. None of them is needed for the modules to work.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};

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

/// Where daemons are and where their processes show.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places<'a> {
    /// The image's root.
    pub(crate) image: &'a Path,
    /// `/run`.
    pub(crate) run: &'a Path,
    /// `/proc`.
    pub(crate) proc: &'a Path,
    /// `/sys`.
    pub(crate) sys: &'a Path,
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

/// The links between this machine's GPUs, which decide about the fabric manager.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fabric {
    /// No switch: no fabric manager.
    None,
    /// Switches that the NVIDIA driver itself drives.
    Switches,
    /// Switches behind a management port of an InfiniBand adapter: the fifth NVLink generation.
    ManagedByInfiniband,
}

/// Starts what the image has, in order. A program that fails does not keep the others from starting.
pub(crate) fn start(places: Places<'_>, fabric: Fabric) -> Vec<Started> {
    let mut started = vec![
        // Device nodes. Without it the first user of the driver's libraries makes them.
        run(places, "nvidia-modprobe", &["-c", "0", "-u"]),
        run(places, "nvidia-persistenced", &["--persistence-mode"]),
    ];
    match fabric {
        Fabric::None => {}
        Fabric::Switches => {
            let config = "/usr/share/nvidia/nvswitch/fabricmanager.cfg";
            started.push(run(places, "nv-fabricmanager", &["-c", config]));
        }
        Fabric::ManagedByInfiniband => {
            let arguments = [
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
            ];
            started.push(run(places, "nvidia-fabricmanager-start.sh", &arguments));
        }
    }
    started
}

/// Looks for switches.
pub(crate) fn fabric(places: Places<'_>) -> Fabric {
    let entries = |path: PathBuf| fs::read_dir(path).into_iter().flatten().flatten();
    let is_managed = |adapter: fs::DirEntry| {
        let product_data = fs::read(adapter.path().join("device/vpd")).unwrap_or_default();
        product_data.windows(6).any(|word| word == b"SW_MNG")
    };
    if entries(places.sys.join("class/infiniband")).any(is_managed) {
        Fabric::ManagedByInfiniband
    } else if entries(places.proc.join("driver/nvidia-nvswitch/devices")).next().is_some() {
        Fabric::Switches
    } else {
        Fabric::None
    }
}

/// Stops whatever runs. Gives the names of those that were stopped, or the one that would not.
pub(crate) fn stop(places: Places<'_>) -> Result<Vec<&'static str>, Stubborn> {
    let mut stopped = Vec::new();
    for daemon in DAEMONS {
        let Some(pid) = running(places, daemon) else { continue };
        // One that ends by itself meanwhile is as good as stopped.
        let _ = kill_process(pid, Signal::TERM);
        let is_gone = (0..LOOKS).any(|look| {
            if look > 0 {
                thread::sleep(BETWEEN_LOOKS);
            }
            running(places, daemon).is_none()
        });
        if !is_gone {
            return Err(Stubborn { name: daemon.name, pid: pid.as_raw_nonzero().get() });
        }
        stopped.push(daemon.name);
    }
    Ok(stopped)
}

/// A daemon that did not end at SIGTERM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stubborn {
    pub(crate) name: &'static str,
    pub(crate) pid: i32,
}

/// The process of a pid file. The fabric manager's lies on the host and outlives its container, so that the
/// number can be anybody's by now: the process must bear the daemon's name.
fn running(places: Places<'_>, daemon: &Daemon) -> Option<Pid> {
    let Daemon { name, pid_file } = daemon;
    let candidates = [places.run.join(pid_file), places.image.join("var/run").join(pid_file)];
    let text = candidates.iter().find_map(|path| fs::read_to_string(path).ok())?;
    let number: i32 = text.trim().parse().ok().filter(|&number| number > 1)?;
    let status = fs::read_to_string(places.proc.join(format!("{number}/status"))).ok()?;
    let field = |key: &str| status.lines().find_map(|line| line.strip_prefix(key)).map(str::trim);
    // The kernel keeps 15 bytes of a name (TASK_COMM_LEN).
    let is_it = field("Name:").is_some_and(|comm| comm == name.get(..15).unwrap_or(name));
    // Who ended and was not waited for still has its entry.
    let has_ended = field("State:").is_some_and(|state| state.starts_with(['Z', 'X']));
    if is_it && !has_ended { Pid::from_raw(number) } else { None }
}

/// Runs a program until it has gone into the background, its output in the container's log.
fn run(places: Places<'_>, name: &'static str, arguments: &[&str]) -> Started {
    let places_of_programs = ["usr/bin", "usr/sbin", "bin", "sbin", "usr/local/bin"];
    let mut paths = places_of_programs.iter().map(|directory| places.image.join(directory).join(name));
    let Some(program) = paths.find(|path| path.is_file()) else { return Started::Absent(name) };
    match Command::new(program).args(arguments).stdin(Stdio::null()).status() {
        Ok(status) if status.success() => Started::Yes(name),
        Ok(status) => Started::Failed(name, status.to_string()),
        Err(error) => Started::Failed(name, error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use tempfile::TempDir;

    use super::*;

    struct Machine {
        root: TempDir,
    }

    impl Machine {
        fn new() -> Self {
            let root = tempfile::tempdir().unwrap();
            for directory in ["usr/bin", "run", "sys", "proc"] {
                fs::create_dir_all(root.path().join(directory)).unwrap();
            }
            Self { root }
        }

        fn path(&self, path: &str) -> PathBuf {
            self.root.path().join(path)
        }

        fn write(&self, path: &str, text: &str) {
            let path = self.path(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn program(&self, name: &str, script: &str) {
            let path = format!("usr/bin/{name}");
            self.write(&path, &format!("#!/bin/sh\n{script}\n"));
            fs::set_permissions(self.path(&path), fs::Permissions::from_mode(0o755)).unwrap();
        }
    }

    fn stop(machine: &Machine, proc: &Path) -> Result<Vec<&'static str>, Stubborn> {
        let (run, sys) = (machine.path("run"), machine.path("sys"));
        super::stop(Places { image: machine.root.path(), run: &run, proc, sys: &sys })
    }

    fn start(machine: &Machine, fabric: Fabric) -> Vec<Started> {
        let (run, sys, proc) = (machine.path("run"), machine.path("sys"), machine.path("proc"));
        super::start(Places { image: machine.root.path(), run: &run, proc: &proc, sys: &sys }, fabric)
    }

    fn fabric(machine: &Machine) -> Fabric {
        let (run, sys, proc) = (machine.path("run"), machine.path("sys"), machine.path("proc"));
        super::fabric(Places { image: machine.root.path(), run: &run, proc: &proc, sys: &sys })
    }

    #[test]
    fn what_the_image_has_not_is_not_needed() {
        let machine = Machine::new();
        let absent = |names: &[&'static str]| names.iter().copied().map(Started::Absent).collect::<Vec<_>>();
        assert_eq!(start(&machine, Fabric::None), absent(&["nvidia-modprobe", "nvidia-persistenced"]));
        let with_switches = start(&machine, Fabric::Switches);
        assert_eq!(with_switches.last(), Some(&Started::Absent("nv-fabricmanager")));
        assert_eq!(stop(&machine, Path::new("/proc")), Ok(vec![]));
    }

    #[test]
    fn one_that_fails_does_not_keep_the_next_from_starting() {
        let machine = Machine::new();
        let log = machine.path("log");
        machine.program("nvidia-modprobe", "exit 3");
        machine.program("nvidia-persistenced", &format!("echo \"$@\" > {}", log.display()));
        let started = start(&machine, Fabric::None);
        let failed = Started::Failed("nvidia-modprobe", "exit status: 3".into());
        assert_eq!(started, [failed, Started::Yes("nvidia-persistenced")]);
        assert_eq!(fs::read_to_string(log).unwrap(), "--persistence-mode\n");
    }

    #[test]
    fn a_daemon_is_stopped_by_its_pid_file() {
        let machine = Machine::new();
        let pid_file = machine.path("run/nvidia-persistenced/nvidia-persistenced.pid");
        fs::create_dir_all(pid_file.parent().unwrap()).unwrap();
        // The second process has the script's name, as the daemon's would.
        machine.program(
            "nvidia-persistenced",
            &format!(
                "if [ \"$1\" = stay ]; then while :; do sleep 0.1; done; fi\n\
                 \"$0\" stay > /dev/null 2>&1 &\necho $! > {}",
                pid_file.display()
            ),
        );
        assert_eq!(start(&machine, Fabric::None).last(), Some(&Started::Yes("nvidia-persistenced")));
        assert_eq!(stop(&machine, Path::new("/proc")), Ok(vec!["nvidia-persistenced"]));
        assert_eq!(stop(&machine, Path::new("/proc")), Ok(vec![]));
    }

    #[test]
    fn a_stale_or_broken_pid_file_kills_nobody() {
        let machine = Machine::new();
        let pid_file = "run/nvidia-fabricmanager/nv-fabricmanager.pid";
        // This very process has another name; it is still there afterwards, or there is no result to see.
        for text in [std::process::id().to_string().as_str(), "-1", "0", "1", "none", "", "99999999999999"] {
            machine.write(pid_file, text);
            assert_eq!(stop(&machine, Path::new("/proc")), Ok(vec![]), "{text:?}");
        }
    }

    #[test]
    fn switches_are_seen_where_the_drivers_show_them() {
        let machine = Machine::new();
        assert_eq!(fabric(&machine), Fabric::None);
        machine.write("proc/driver/nvidia-nvswitch/devices/0000:01:00.0/information", "");
        assert_eq!(fabric(&machine), Fabric::Switches);
        machine.write("sys/class/infiniband/mlx5_0/device/vpd", "\u{1}plain adapter");
        assert_eq!(fabric(&machine), Fabric::Switches);
        machine.write("sys/class/infiniband/mlx5_1/device/vpd", "\u{1}V0\tSW_MNG\u{0}");
        assert_eq!(fabric(&machine), Fabric::ManagedByInfiniband);
    }
}
