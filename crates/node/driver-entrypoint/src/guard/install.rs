//! `swap-guard install`: runs the guard on the host with systemd, and keeps the guard running. The command runs in a separate
//! container, with privileges that no driver container has.

use std::{
    fs,
    io::{self, Write as _},
    os::unix::{fs::OpenOptionsExt as _, process::CommandExt as _},
    path::Path,
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use rustix::process::{chdir, chroot};

use super::{DIRECTORY, JOURNAL, REBOOT, has_guard, is_open};
use crate::{
    error::Error,
    files::entries,
    log::Log,
    node::{Node, is_plain_path},
    selinux,
    signals::Signals,
};

/// Default of `--host`.
const HOST: &str = "/host";
/// The guard's program on the host. `/run` is mounted with `noexec` on many hosts.
const PROGRAM: &str = "/var/lib/farrier/swap-guard";
/// SELinux type of programs that systemd may execute. A file in `/var/lib` has another one.
const PROGRAM_TYPE: &str = "bin_t";
const UNIT: &str = "farrier-swap-guard.service";
/// First argument of the process that runs a program of the host; the host's root and the program's arguments follow.
pub(crate) const ON_HOST: &str = "run-on-host";

/// Polling interval for signals, and for the end of a swap.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Number of polls between two checks that the guard runs.
const POLLS_PER_CHECK: u32 = 30;
/// Maximum number of polls until a guard of another version ends its swap: longer than any time limit in use.
const MAX_IDLE_POLLS: u32 = 900;

/// Maximum number of polls until a guard that was started serves the node.
const MAX_START_POLLS: u32 = 30;

/// Properties of the unit. The OOM killer picks the guard last. When systemd stops the unit, it lets a swap end first. It kills
/// only the guard itself: a load that cannot be killed does not delay the start of the next guard.
const PROPERTIES: [&str; 7] = [
    "Restart=on-failure",
    "RestartSec=1",
    "StartLimitIntervalSec=0",
    "OOMScoreAdjust=-1000",
    "OOMPolicy=continue",
    "TimeoutStopSec=300",
    "KillMode=process",
];

/// Arguments of `install`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Installation<'a> {
    /// Place where the host's root is mounted.
    root: &'a str,
    /// Whether the guard may reboot the node.
    reboots: bool,
}

impl<'a> Installation<'a> {
    /// Parses the arguments after `install`; `None` if they are invalid.
    pub(crate) fn parse(arguments: &[&'a str]) -> Option<Self> {
        match *arguments {
            [] => Some(Self { root: HOST, reboots: false }),
            [ref rest @ .., REBOOT] => Some(Self { reboots: true, ..Self::parse(rest)? }),
            ["--host", root] if is_plain_path(root) => Some(Self { root, reboots: false }),
            _ => None,
        }
    }

    /// Description of the unit. It differs for each set of options, so that [`has_same_options`] recognizes them.
    fn description(&self) -> &'static str {
        if self.reboots {
            "farrier's guard of driver swaps, which reboots a node that is cut off"
        } else {
            "farrier's guard of driver swaps"
        }
    }
}

/// Installs and starts the guard, and restarts a guard that has ended, until a signal arrives. The guard itself keeps
/// running after the signal.
pub(crate) fn install(
    node: &Node<'_>,
    installation: Installation<'_>,
    signals: &mut dyn Signals,
) -> Result<(), Error> {
    end_at_signal(node, keep_installed(node, installation, signals))
}

/// Logs a signal, which is no error.
fn end_at_signal(node: &Node<'_>, result: Result<(), Error>) -> Result<(), Error> {
    let Err(Error::Interrupted(signal)) = result else { return result };
    node.log.step(format!("{signal}: the guard stays on the host"));
    Ok(())
}

fn keep_installed(
    node: &Node<'_>,
    installation: Installation<'_>,
    signals: &mut dyn Signals,
) -> Result<(), Error> {
    let root = installation.root;
    check_systemd(node, root)?;
    let program = fs::read(node.paths.at("/proc/self/exe")).map_err(Error::on("read", "/proc/self/exe"))?;
    let is_same = has_program(node, root, &program) && has_same_options(&installation)?;
    // Stop the old guard before the copy. Otherwise a container that is killed in between leaves it running, and the next
    // container takes it for the new version.
    if !is_same && is_active(root)? {
        // A guard that still performs a swap after this time is stopped, too.
        wait(node, MAX_IDLE_POLLS, signals, || !is_busy(node, root))?;
        node.log.step("stopping the guard of another version");
        on_host(root, "systemctl", &["stop", UNIT])?;
    }
    copy_program(node, root, &program)?;
    label_program(node, root)?;
    loop {
        if !is_active(root)? {
            start(&installation)?;
            node.log.step(format!("started {UNIT} on the host"));
        }
        await_guard(node, root, signals)?;
        wait(node, POLLS_PER_CHECK, signals, || false)?;
    }
}

/// Fails on a host that systemd does not manage.
fn check_systemd(node: &Node<'_>, root: &str) -> Result<(), Error> {
    if node.paths.at(&format!("{root}/run/systemd/system")).is_dir() {
        return Ok(());
    }
    Err(Error::new(
        format!("this host does not run systemd: {root}/run/systemd/system is missing"),
        "the guard needs systemd, which starts it again when it is killed. Without the guard, leave SWAP_GUARD unset: \
         the driver's container then swaps drivers itself. If the host runs systemd, mount its root there",
    ))
}

/// Whether the host has this program already.
fn has_program(node: &Node<'_>, root: &str, program: &[u8]) -> bool {
    fs::read(node.paths.at(&format!("{root}{PROGRAM}"))).is_ok_and(|old| old == program)
}

/// Copies this program to the host, unless the host has it.
fn copy_program(node: &Node<'_>, root: &str, program: &[u8]) -> Result<(), Error> {
    if has_program(node, root, program) {
        return Ok(());
    }
    let path = node.paths.at(&format!("{root}{PROGRAM}"));
    let temp = path.with_extension("new");
    let write = || -> io::Result<()> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
        let mut options = fs::OpenOptions::new();
        let mut file = options.write(true).create(true).truncate(true).mode(0o700).open(&temp)?;
        file.write_all(program)?;
        file.sync_all()?;
        drop(file);
        fs::rename(&temp, &path)
    };
    write().map_err(Error::on("write", format!("{root}{PROGRAM}")))?;
    node.log.step(format!("copied this program to {PROGRAM} of the host"));
    Ok(())
}

/// Lets systemd execute the program on a host with SELinux.
fn label_program(node: &Node<'_>, root: &str) -> Result<(), Error> {
    let path = format!("{root}{PROGRAM}");
    if selinux::is_enabled(node, root)
        && selinux::label(&node.paths.at(&path), PROGRAM_TYPE)
            .map_err(Error::on("label for SELinux", path))?
    {
        node.log.step(format!("SELinux: labeled {PROGRAM} of the host {PROGRAM_TYPE}"));
    }
    Ok(())
}

/// Waits a limited time until the guard serves the node. The unit of a program that cannot be executed is active, too, because
/// systemd starts it again and again.
fn await_guard(node: &Node<'_>, root: &str, signals: &mut dyn Signals) -> Result<(), Error> {
    let directory = node.paths.at(&format!("{root}{DIRECTORY}"));
    if wait(node, MAX_START_POLLS, signals, || has_guard(&directory))? {
        return Ok(());
    }
    let status = on_host_output(root, "systemctl", &["status", "--full", UNIT])?;
    Err(Error::new(
        format!("{UNIT} does not serve the node: {}", status.trim()),
        "journalctl --unit farrier-swap-guard on the node has its messages; with SELinux, ausearch --message AVC has refusals",
    ))
}

fn is_active(root: &str) -> Result<bool, Error> {
    let state = on_host_output(root, "systemctl", &["is-active", UNIT])?;
    // "activating" is the pause before a restart.
    Ok(matches!(state.trim(), "active" | "activating" | "reloading" | "deactivating"))
}

/// Whether the unit on the host was started with the same options.
fn has_same_options(installation: &Installation<'_>) -> Result<bool, Error> {
    let arguments = ["show", "--property=Description", "--value", UNIT];
    Ok(on_host_output(installation.root, "systemctl", &arguments)?.trim() == installation.description())
}

fn start(installation: &Installation<'_>) -> Result<(), Error> {
    let Installation { root, reboots } = *installation;
    // A failed unit stays loaded, and blocks its name.
    on_host_output(root, "systemctl", &["reset-failed", UNIT])?;
    let properties: Vec<String> =
        PROPERTIES.iter().map(|property| format!("--property={property}")).collect();
    let (unit, description) =
        (format!("--unit={UNIT}"), format!("--description={}", installation.description()));
    let mut arguments = vec![unit.as_str(), &description, "--quiet", "--collect"];
    arguments.extend(properties.iter().map(String::as_str));
    arguments.extend([PROGRAM, "swap-guard", "serve"]);
    arguments.extend(reboots.then_some(REBOOT));
    on_host(root, "systemd-run", &arguments)
}

/// Whether the guard has begun a swap and not left it.
fn is_busy(node: &Node<'_>, root: &str) -> bool {
    let requests = entries(node.paths.at(&format!("{root}{DIRECTORY}")));
    requests.iter().any(|request| is_open(request) && request.join(JOURNAL).exists())
}

/// Waits until the condition is met, for at most this number of polls. Returns whether it is met.
fn wait(
    node: &Node<'_>,
    polls: u32,
    signals: &mut dyn Signals,
    is_met: impl Fn() -> bool,
) -> Result<bool, Error> {
    for _ in 0..polls {
        if is_met() {
            return Ok(true);
        }
        signals.check()?;
        node.kernel.pause(POLL_INTERVAL);
    }
    Ok(false)
}

/// Runs a program of the host, which must succeed.
fn on_host(root: &str, program: &str, arguments: &[&str]) -> Result<(), Error> {
    let run_error = Error::on("run", program);
    let status = host_command(root, program, arguments).status().map_err(run_error)?;
    if status.success() {
        return Ok(());
    }
    Err(Error::new(
        format!("{program} {} on the host: {status}", arguments.join(" ")),
        "the message of the program is above; the container needs the host's root, hostPID and CAP_SYS_CHROOT",
    ))
}

/// Runs a program of the host, and returns its output, regardless of its exit status.
fn on_host_output(root: &str, program: &str, arguments: &[&str]) -> Result<String, Error> {
    let output = host_command(root, program, arguments).stderr(Stdio::null()).output();
    let output = output.map_err(Error::on("run", program))?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn host_command(root: &str, program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["swap-guard", ON_HOST, root, program]).args(arguments);
    command
}

/// Changes the root directory, and becomes a program there. Returns only if that fails.
pub(crate) fn run_on_host(root: &str, program: &str, arguments: &[&str]) -> ExitCode {
    let result = chroot(root).and_then(|()| chdir("/"));
    let error = match result {
        Ok(()) => Command::new(program).env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").args(arguments).exec(),
        Err(errno) => errno.into(),
    };
    Log::stderr().error(format!("run {program} below {root}: {error}"));
    ExitCode::FAILURE
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        files::text,
        guard::serve::Guard,
        testing::{Bench, EndsNow, EndsWhenReady},
    };

    #[test]
    fn a_host_without_systemd_is_refused() {
        let bench = Bench::new();
        std::fs::create_dir_all(bench.at("/host/run")).unwrap();
        let installation = Installation::parse(&[]).unwrap();
        let error = install(&bench.node(), installation, &mut EndsWhenReady(&mut || {})).unwrap_err();
        assert_eq!(error.to_string(), "this host does not run systemd: /host/run/systemd/system is missing");
        assert_eq!(text(bench.at("/host/var/lib/farrier/swap-guard")), None);
    }

    /// The guard drops a request whose journal it cannot write. Such a request must not delay an upgrade of the guard.
    #[test]
    fn only_a_swap_that_the_guard_still_performs_delays_its_replacement() {
        for (files, expected) in [
            (&["request", "journal"][..], true),
            (&["request"], false),
            (&["journal"], false),
            (&["request", "journal", "done"], false),
        ] {
            let bench = Bench::new();
            for file in files {
                bench.write(&format!("/host{DIRECTORY}/acme/{file}"), "");
            }
            assert_eq!(is_busy(&bench.node(), "/host"), expected, "{files:?}");
        }
    }

    /// `systemctl is-active` calls a unit active whose program SELinux does not let systemd execute.
    #[test]
    fn a_guard_serves_while_it_holds_its_lock() {
        let bench = Bench::new();
        let node = bench.node();
        let directory = bench.at(DIRECTORY);
        assert!(!has_guard(&directory));
        let guard = Guard::start(&node).unwrap();
        await_guard(&node, "", &mut EndsWhenReady(&mut || {})).unwrap();
        assert_eq!(bench.kernel.pauses.get(), 0);
        drop(guard);
        assert!(!has_guard(&directory));
    }

    #[test]
    fn a_signal_while_the_guard_starts_is_no_error() {
        let bench = Bench::new();
        let node = bench.node();
        end_at_signal(&node, await_guard(&node, "", &mut EndsNow)).unwrap();
        assert_eq!(bench.log(), "INFO  SIGTERM: the guard stays on the host");
    }

    /// The file system of the bench may have no labels, which is no error.
    #[test]
    fn only_a_host_with_selinux_has_its_program_labeled() {
        let bench = Bench::new();
        label_program(&bench.node(), "/host").unwrap();
        bench.write("/host/sys/fs/selinux/enforce", "1");
        let error = label_program(&bench.node(), "/host").unwrap_err();
        assert!(
            error.to_string().starts_with("label for SELinux /host/var/lib/farrier/swap-guard: "),
            "{error}"
        );
        bench.write("/host/var/lib/farrier/swap-guard", "");
        label_program(&bench.node(), "/host").unwrap();
    }

    #[test]
    fn arguments_are_the_host_s_root_and_whether_the_guard_reboots() {
        let parse = |arguments: &[&'static str]| {
            Installation::parse(arguments).map(|Installation { root, reboots }| (root, reboots))
        };
        assert_eq!(parse(&[]), Some(("/host", false)));
        assert_eq!(parse(&["--reboot"]), Some(("/host", true)));
        assert_eq!(parse(&["--host", "/mnt"]), Some(("/mnt", false)));
        assert_eq!(parse(&["--host", "/mnt", "--reboot"]), Some(("/mnt", true)));
        for wrong in [&["--host", "../mnt"][..], &["--host"], &["--host", "--reboot"], &["--force"]] {
            assert_eq!(parse(wrong), None, "{wrong:?}");
        }
    }
}
