//! Runs the steps in order, and sends the `/out` that they produce.

use std::{
    ffi::OsStr,
    fs::{File, Permissions},
    io::{self, Read as _, Write as _},
    os::{
        fd::{AsFd as _, AsRawFd as _},
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
    process::{Pid, Signal, WaitOptions, kill_process_group, wait},
};

use crate::{
    copy,
    messages::Messages,
    payload,
    rooted::{self, Root},
    watch::{Stop, Watch},
};

/// Directory and name of a here-document's script while that script runs.
const SCRIPT: (&str, &str) = ("/tmp", ".farrier-script");

/// Location of a build.
pub struct Place<'a> {
    /// Root of the build's file system, which is also the root of this process.
    pub root: Root,
    /// Directory of the build context.
    pub context: &'a str,
    /// Directory that receives everything the build writes; `None` if its size cannot be measured.
    pub written: Option<&'a str>,
}

/// Runs the steps, then sends `/out`.
pub fn run(messages: &Messages, plan: &Plan, place: &Place<'_>) -> io::Result<Outcome> {
    let watch = Watch::start(plan.limits, place.written.map(Path::new))?;
    let mut last = 0;
    for (number, step) in (0..).zip(&plan.steps) {
        last = number;
        messages.send(&Message::Step(number))?;
        let done = run_step(messages, place, &step.action)?;
        if let Some(outcome) = stop_outcome(&watch, number) {
            return Ok(outcome);
        }
        if let Err(why) = done {
            return Ok(Outcome::Failed { step: number, why });
        }
    }
    let payload = payload::send_payload(messages, &place.root);
    // No process runs any more, so a read error is the build's own fault.
    let failed = |error: io::Error| Outcome::Failed { step: last, why: format!("read /out: {error}") };
    Ok(stop_outcome(&watch, last).unwrap_or_else(|| payload.unwrap_or_else(failed)))
}

fn stop_outcome(watch: &Watch, step: u32) -> Option<Outcome> {
    Some(match watch.stopped()? {
        Stop::Limit(why) => Outcome::Limit { step, why },
        Stop::DiskFull(why) => Outcome::DiskFull { step, why },
    })
}

/// Runs one step. The inner error is a failure of the step itself.
fn run_step(messages: &Messages, place: &Place<'_>, action: &Action) -> io::Result<Result<(), String>> {
    let done = match action {
        Action::Directory(path) => place.root.directory(Path::new(path)).map(drop),
        Action::Copy { sources, dest, mode } => {
            copy::copy(&place.root, Path::new(place.context), sources, dest, *mode)
        }
        Action::Run(run) => return run_command(messages, &place.root, run),
    };
    Ok(done.map_err(|error| error.to_string()))
}

/// Writes a script to a new file, replaces anything that a step left there, and returns its path.
fn write_script(root: &Root, script: &str) -> io::Result<String> {
    let (directory, name) = SCRIPT;
    let opened = root.directory(Path::new(directory))?;
    let mut file = File::from(rooted::create(opened.as_fd(), OsStr::new(name))?);
    file.write_all(script.as_bytes())?;
    file.set_permissions(Permissions::from_mode(0o755))?;
    Ok(format!("{directory}/{name}"))
}

/// Runs a command, forwards its output, and kills the processes that it leaves behind. The inner error is a failure of the
/// command itself.
fn run_command(messages: &Messages, root: &Root, run: &Run) -> io::Result<Result<(), String>> {
    let Run { argv, env, workdir, script } = run;
    let (program, arguments) = match (script, argv.split_first()) {
        (Some(script), _) => match write_script(root, script) {
            Ok(path) => (path, [].as_slice()),
            Err(error) => return Ok(Err(format!("the script cannot be written: {error}"))),
        },
        (None, Some((program, arguments))) => (program.clone(), arguments),
        (None, None) => return Ok(Err("it names no program".to_owned())),
    };
    // Through its descriptor: in the newly started process the path may lead elsewhere.
    let directory = match root.existing_directory(Path::new(workdir)) {
        Ok(directory) => directory,
        Err(error) => return Ok(Err(format!("{workdir} cannot be entered: {error}"))),
    };
    let (mut output, writer) = io::pipe()?;
    let mut command = Command::new(&program);
    command.args(arguments).env_clear().envs(env.iter().map(|(name, value)| (name, value)));
    command.current_dir(Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()));
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
    let child = command.spawn();
    // Drops the last write ends of the pipe in this process.
    drop(command);
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return Ok(Err(format!("{program} cannot be started: {error}"))),
    };
    let status = thread::scope(|scope| {
        let reader = scope.spawn(move || {
            let mut buffer = vec![0; 64 << 10];
            loop {
                match output.read(&mut buffer) {
                    Ok(0) => return Ok(()),
                    Ok(length) => messages.send(&Message::Output(buffer[..length].to_vec()))?,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                    Err(error) => return Err(error),
                }
            }
        });
        let status = child.wait();
        kill_all();
        let read =
            reader.join().unwrap_or_else(|_| Err(io::Error::other("the reader of a step's output panicked")));
        read.and(status)
    })?;
    Ok(if status.success() { Ok(()) } else { Err(exit_text(status)) })
}

/// Kills all processes except this one, which is process 1, and waits for them. Kills nothing if the step left no process
/// behind: in a pod, a kill of all processes would include farrier's `follow` processes.
fn kill_all() {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => continue,
            Ok(None) => {}
            Err(_) => return,
        }
        // Process group 1 becomes `kill(-1)`, which signals all processes.
        let _ = kill_process_group(Pid::INIT, Signal::KILL);
        match wait(WaitOptions::empty()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// Formats an exit status as a shell does: a signal counts as 128 plus its number.
fn exit_text(status: ExitStatus) -> String {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.map_or_else(|| status.to_string(), |code| format!("exit code {code}"))
}
