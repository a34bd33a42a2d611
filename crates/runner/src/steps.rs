//! Runs the steps, one after the other.

use std::{
    fs::{self, File, Permissions},
    io::{self, Read as _},
    os::unix::{
        fs::PermissionsExt as _,
        process::{CommandExt as _, ExitStatusExt as _},
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
    watch::{Stop, Watch},
};

/// Where a script of a here-document lies while it runs.
const SCRIPT: &str = "/tmp/.farrier-script";

/// Runs them. `None`: all of them did what they should.
pub fn run(messages: &Messages, plan: &Plan, context: &Path, disk: &File) -> io::Result<Option<Outcome>> {
    let watch = Watch::start(plan.limits, disk)?;
    for (place, step) in (0..).zip(&plan.steps) {
        messages.send(&Message::Step(place))?;
        let done = match &step.action {
            Action::Directory(path) => fs::create_dir_all(path).map_err(|error| error.to_string()),
            Action::Copy { sources, dest, mode } => {
                copy::copy(context, sources, dest, *mode).map_err(|error| error.to_string())
            }
            Action::Run(run) => command(messages, run)?,
        };
        match watch.stopped() {
            Some(Stop::Limit(why)) => return Ok(Some(Outcome::Limit { step: place, why })),
            Some(Stop::DiskFull(why)) => return Ok(Some(Outcome::DiskFull { step: place, why })),
            None => {}
        }
        if let Err(why) = done {
            return Ok(Some(Outcome::Failed { step: place, why }));
        }
    }
    Ok(None)
}

/// Runs a command, sends on what it prints, and ends what it leaves running. The inner error is the command's.
fn command(messages: &Messages, run: &Run) -> io::Result<Result<(), String>> {
    let Run { argv, env, workdir, script } = run;
    let mut words = argv.iter().map(String::as_str);
    let program = if let Some(script) = script {
        fs::write(SCRIPT, script)?;
        fs::set_permissions(SCRIPT, Permissions::from_mode(0o755))?;
        SCRIPT
    } else {
        match words.next() {
            Some(program) => program,
            None => return Ok(Err("it names no program".to_owned())),
        }
    };
    let (mut output, writer) = io::pipe()?;
    let mut command = Command::new(program);
    command.args(words).env_clear().envs(env.iter().map(|(name, value)| (name, value))).current_dir(workdir);
    command.stdin(Stdio::null()).stdout(writer.try_clone()?).stderr(writer).process_group(0);
    let child = command.spawn();
    // The last writers of ours.
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
        end_all();
        let read =
            reader.join().unwrap_or_else(|_| Err(io::Error::other("the reader of a step's output panicked")));
        read.and(status)
    })?;
    if script.is_some() {
        let _ = fs::remove_file(SCRIPT);
    }
    Ok(if status.success() { Ok(()) } else { Err(ended(status)) })
}

/// Ends all processes but this one, which is process 1, and waits for them. Where a step left none, none is ended: in a pod farrier's
/// own processes are among all.
fn end_all() {
    loop {
        match wait(WaitOptions::NOHANG) {
            Ok(Some(_)) | Err(Errno::INTR) => continue,
            Ok(None) => {}
            Err(_) => return,
        }
        // Process group 1 is the kernel's word for all.
        let _ = kill_process_group(Pid::INIT, Signal::KILL);
        match wait(WaitOptions::empty()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// As a shell counts: a signal is 128 and its number.
fn ended(status: ExitStatus) -> String {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.map_or_else(|| status.to_string(), |code| format!("exit code {code}"))
}
