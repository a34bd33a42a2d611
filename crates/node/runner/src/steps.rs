//! Runs the steps in order, and sends the resulting `/out`.

use std::{
    ffi::OsStr,
    fs::{File, Permissions},
    io::{self, Read as _, Write as _},
    os::{
        fd::AsFd as _,
        unix::{
            fs::PermissionsExt as _,
            process::{CommandExt as _, ExitStatusExt as _},
        },
    },
    path::Path,
    process::{Command, ExitStatus, Stdio},
    thread,
};

use runner::{
    plan::{Action, Plan, Run},
    wire::{Message, Outcome},
};
use rustix::{
    io::Errno,
    process::{Signal, WaitOptions, wait},
};

use crate::{
    copy,
    messages::{Context as _, Messages},
    payload,
    rooted::{self, Root},
    usage_monitor::{StopReason, UsageMonitor, signal_all},
};

/// Directory and name of a here-document's script while that script runs.
const SCRIPT_PATH: (&str, &str) = ("/tmp", ".farrier-script");

/// Directories of a build.
pub struct BuildPaths<'a> {
    /// Root of the build's file system, which is also the root of this process.
    pub root: Root,
    /// Directory of the build context.
    pub context: &'a str,
    /// Directory that receives everything that the build writes. `None` if there is no such directory.
    pub write_dir: Option<&'a str>,
}

/// Runs the steps, then sends `/out`.
pub fn run(messages: &Messages, plan: &Plan, paths: &BuildPaths<'_>) -> io::Result<Outcome> {
    let monitor = UsageMonitor::start(plan.limits, paths.write_dir.map(Path::new))?;
    let mut last = 0;
    for (number, step) in (0..).zip(&plan.steps) {
        last = number;
        messages.send(&Message::Step(number))?;
        let result = run_step(messages, paths, &step.action)?;
        // Check this first: a step that the monitor stopped, or that filled the disk, fails as well.
        if let Some(outcome) = stop_outcome(&monitor, number) {
            return Ok(outcome);
        }
        if let Err(why) = result {
            return Ok(Outcome::Failed { step: number, why });
        }
    }
    let payload = payload::send_payload(messages, &paths.root);
    if let Some(outcome) = stop_outcome(&monitor, last) {
        return Ok(outcome);
    }
    Ok(match payload {
        Ok(outcome) => outcome,
        // All processes of the build have ended, so a read error is caused by the files that the build left.
        Err(error) => Outcome::Failed { step: last, why: format!("read /out: {error}") },
    })
}

fn stop_outcome(monitor: &UsageMonitor, step: u32) -> Option<Outcome> {
    Some(match monitor.stop_reason()? {
        StopReason::MemoryLimit(why) => Outcome::MemoryLimit { step, why },
        StopReason::FixedLimit(why) => Outcome::FixedLimit { step, why },
        StopReason::HiddenFiles(why) => Outcome::Broken(why),
        StopReason::DiskFull(why) => Outcome::DiskFull { step, why },
    })
}

/// Runs one step. The inner error is a failure of the step, the outer error one of the runner.
fn run_step(messages: &Messages, paths: &BuildPaths<'_>, action: &Action) -> io::Result<Result<(), String>> {
    let result = match action {
        Action::Directory(path) => paths.root.directory(Path::new(path)).map(drop),
        Action::Copy { sources, dest, mode } => {
            copy::copy(&paths.root, Path::new(paths.context), sources, dest, *mode)
        }
        Action::Run(run) => return run_command(messages, &paths.root, run),
    };
    Ok(result.map_err(|error| error.to_string()))
}

/// Writes a script to a new file, which replaces any earlier file, and returns the file's path.
fn write_script(root: &Root, script: &str) -> io::Result<String> {
    let (directory, name) = SCRIPT_PATH;
    let directory_file = root.directory(Path::new(directory))?;
    let mut file = File::from(rooted::create(directory_file.as_fd(), OsStr::new(name))?);
    file.write_all(script.as_bytes())?;
    file.set_permissions(Permissions::from_mode(0o755))?;
    Ok(format!("{directory}/{name}"))
}

/// Runs a command, forwards its output, and kills the processes that it leaves behind. The inner error is a failure of the
/// command, the outer error one of the runner, which cannot start a process, or read or send the output.
fn run_command(messages: &Messages, root: &Root, run: &Run) -> io::Result<Result<(), String>> {
    let Run { argv, env, workdir, script } = run;
    let (program, arguments) = match (script, argv.split_first()) {
        (Some(script), _) => match write_script(root, script) {
            Ok(path) => (path, [].as_slice()),
            Err(error) => return Ok(Err(format!("the script cannot be written: {error}"))),
        },
        (None, Some((program, arguments))) => (program.clone(), arguments),
        (None, None) => return Ok(Err("the instruction names no program".to_owned())),
    };
    let directory = match root.existing_directory(Path::new(workdir)) {
        Ok(directory) => directory,
        Err(error) => return Ok(Err(format!("{workdir} cannot be made the working directory: {error}"))),
    };
    let (output, writer) = io::pipe()?;
    let mut command = Command::new(&program);
    command.args(arguments).env_clear().envs(env.iter().map(|(name, value)| (name, value)));
    // Use the descriptor, because the path may lead elsewhere when the new process resolves it.
    command.current_dir(rooted::path_of(&directory));
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
    let child = command.spawn();
    // Drop the last write ends of the pipe in this process, so that the reader sees the end of the output.
    drop(command);
    let mut child = match child {
        Ok(child) => child,
        // No process of an earlier step is left: other programs of the same user, or of the machine, use up the limit of processes.
        Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => {
            return Err(error).context(&format!("start {program}"));
        }
        Err(error) => return Ok(Err(format!("{program} cannot be started: {error}"))),
    };
    let status = thread::scope(|scope| {
        let reader = scope.spawn(move || forward_output(messages, output));
        let status = child.wait();
        kill_remaining();
        let read =
            reader.join().unwrap_or_else(|_| Err(io::Error::other("the reader of a step's output panicked")));
        read.and(status)
    })?;
    Ok(if status.success() { Ok(()) } else { Err(exit_text(status)) })
}

/// Sends the output of a step until all its writers have closed the pipe.
fn forward_output(messages: &Messages, mut output: io::PipeReader) -> io::Result<()> {
    let mut buffer = vec![0; 64 << 10];
    loop {
        match output.read(&mut buffer) {
            Ok(0) => return Ok(()),
            Ok(length) => messages.send(&Message::Output(buffer[..length].to_vec()))?,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Kills the processes that a step left behind, and waits for them. They are children of this process, which is process 1. In a
/// pod, [`signal_all`] would also hit farrier's `follow` processes, so it is used only if a child is still running.
fn kill_remaining() {
    loop {
        match wait(WaitOptions::NOHANG) {
            // Collect all children that have ended.
            Ok(Some(_)) | Err(Errno::INTR) => continue,
            // A child is still running.
            Ok(None) => signal_all(Signal::KILL),
            // `ECHILD`, the only other error: no child is left.
            Err(_) => return,
        }
        // Wait for the end of a killed child.
        match wait(WaitOptions::empty()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// Formats an exit status like a shell, which reports a signal as 128 plus its number.
fn exit_text(status: ExitStatus) -> String {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.map_or_else(|| status.to_string(), |code| format!("exit code {code}"))
}
