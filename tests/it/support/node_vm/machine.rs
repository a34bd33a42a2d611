//! A virtual machine, and the line protocol with its agent.

use std::{
    fs::{self, File},
    io::{BufRead, BufReader, Write},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use tempfile::TempDir;

/// Time limit for the agent to start. A busy host boots several emulated machines at once.
const BOOT: Duration = Duration::from_mins(2);
/// Extra time for a guest to report a step's timeout before the guest counts as lost.
const GRACE: Duration = Duration::from_secs(30);

/// Result of a step.
#[derive(Clone, Debug)]
pub struct Output {
    /// The shell's exit status; 137 for a step that was killed at its limit.
    pub status: i32,
    /// Standard output and standard error, interleaved.
    pub text: String,
    /// The guest's uptime at the end of the step.
    pub uptime: Duration,
}

/// A running machine, killed on drop. After a panic, drop also prints the console.
pub struct Machine {
    child: Child,
    steps: ChildStdin,
    answers: Receiver<String>,
    step: u32,
    console: PathBuf,
    /// Contains the initramfs and the console's file.
    _directory: TempDir,
}

impl Machine {
    /// Boots a kernel with an initramfs, whose name is relative to `directory`, and waits for the agent. `devices` are further arguments of
    /// QEMU.
    pub fn boot(kernel: &Path, directory: TempDir, initramfs: &str, memory: u32, devices: &[&str]) -> Self {
        let console = directory.path().join("console");
        File::create(&console).unwrap();
        let mut child = Command::new("qemu-system-x86_64")
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"])
            // Never use KVM: where KVM is available but hangs, the test would hang, too.
            .args(["-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", &memory.to_string()])
            .arg("-kernel")
            .arg(kernel)
            .arg("-initrd")
            .arg(directory.path().join(initramfs))
            .args(["-append", "console=ttyS0 no_timer_check quiet panic=-1 rdinit=/init"])
            .args(["-chardev", "stdio,id=agent,signal=off"])
            .arg("-chardev")
            .arg(format!("file,id=console,path={}", console.display()))
            .args(["-serial", "chardev:console", "-serial", "chardev:agent"])
            .args(devices)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|error| panic!("start QEMU (Debian package qemu-system-x86): {error}"));
        let (steps, said) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, answers) = channel();
        // The thread ends with the machine, which closes the pipe.
        thread::spawn(move || {
            for line in BufReader::new(said).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    break;
                }
            }
        });
        let machine = Self { child, steps, answers, step: 0, console, _directory: directory };
        let hello = machine.answer(BOOT, "its start");
        assert!(hello.starts_with("ready "), "the node's agent says {hello:?}");
        machine
    }

    /// Runs a script in the guest's shell until it ends or reaches its limit.
    pub fn run(&mut self, script: &str, limit: Duration) -> Output {
        self.step += 1;
        let code = BASE64_STANDARD.encode(script);
        writeln!(self.steps, "{} {} {code}", self.step, limit.as_secs()).unwrap();
        let answer = self.answer(limit + GRACE, script);
        let fields: Vec<&str> = answer.split(' ').collect();
        let [step, status, uptime, text @ ..] = fields.as_slice() else {
            panic!("the agent says {answer:?}")
        };
        assert_eq!(*step, self.step.to_string(), "the agent answered another step: {answer:?}");
        let text = text.first().copied().unwrap_or_default();
        Output {
            status: status.parse().unwrap(),
            text: String::from_utf8_lossy(&BASE64_STANDARD.decode(text).unwrap()).into_owned(),
            uptime: Duration::from_secs_f64(uptime.parse().unwrap()),
        }
    }

    fn answer(&self, limit: Duration, to: &str) -> String {
        match self.answers.recv_timeout(limit) {
            Ok(line) => line,
            Err(RecvTimeoutError::Timeout) => panic!("the node does not answer within {limit:?}: {to}"),
            Err(RecvTimeoutError::Disconnected) => panic!("the node ended: {to}"),
        }
    }
}

impl Drop for Machine {
    #[allow(clippy::print_stdout, reason = "the console is part of a failed test's output")]
    fn drop(&mut self) {
        // The machine may already have ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let console = fs::read(&self.console).unwrap_or_default();
            println!("the node's console:\n{}", String::from_utf8_lossy(&console));
        }
    }
}
