//! Runs QEMU. The report arrives on standard output; the kernel's console and QEMU's messages arrive on standard error.
//! QEMU opens no socket, display or network, runs in its seccomp sandbox, and is killed when the future that runs it is
//! dropped. A limit on its processor time ends it also when farrier itself was killed.

use std::{ffi::OsString, io, path::Path, process::Stdio, time::Duration};

use driver_entrypoint::report::Key;
use farrier_core::kernel::Architecture;
use farrier_inputs::KernelImage;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    process::{Child, Command},
    time::{Instant, timeout_at},
};

use super::{BootError, BootLimits, Result, console::Console, protocol::Transcript};

/// Timeout for the first report of a guest under KVM, where a kernel reaches its init process within a second. On some
/// nested hosts `/dev/kvm` exists but guests hang: the first boot check there waits for this timeout.
const KVM_START_TIMEOUT: Duration = Duration::from_secs(3);
/// Time for the machine to restart after the last record, before it is killed.
const EXIT_TIME: Duration = Duration::from_secs(5);

/// Number of QEMU's threads that can be busy: its main loop and one virtual processor.
const THREADS: u64 = 2;

/// Prevents a guest that escapes into QEMU from starting processes, gaining privileges, or changing resource limits of
/// other processes.
const SANDBOX: [&str; 2] =
    ["-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"];

/// QEMU's accelerator, which executes the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub(super) enum Accelerator {
    /// The processor, through KVM.
    Kvm,
    /// Software emulation.
    Tcg,
}

/// The guest's name for the serial port of the report.
pub(super) fn report_device(arch: Architecture) -> &'static str {
    match arch {
        Architecture::Amd64 => "/dev/ttyS1",
        // The machine `virt` has one built-in serial port, ttyAMA0. The report uses a PCI serial port.
        Architecture::Arm64 => "/dev/ttyS0",
    }
}

/// End of a machine's run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ending {
    /// The machine exited: its init or a panic requested a restart.
    Exited,
    /// The machine was killed, because it reported nothing in time.
    Silent,
}

/// A pipe from QEMU: the report on standard output, or the console on standard error.
enum Pipe {
    Report,
    Console,
}

/// Result of running a machine.
#[derive(Debug)]
pub(super) struct Run {
    pub(super) transcript: Transcript,
    pub(super) console: Console,
    pub(super) ending: Ending,
}

pub(super) struct Machine<'a> {
    pub(super) kernel: &'a KernelImage,
    pub(super) initramfs: &'a Path,
    pub(super) emulator: Option<&'a Path>,
    /// Memory in MiB.
    pub(super) memory: u32,
    pub(super) limits: &'a BootLimits,
    pub(super) key: Key,
}

impl Machine<'_> {
    /// Runs the machine until it ends.
    pub(super) async fn run(&self, accelerator: Accelerator) -> Result<Run> {
        let mut child = self.start(accelerator).await?;
        let run = Run {
            transcript: Transcript::new(self.key),
            console: Console::default(),
            ending: Ending::Exited,
        };
        let run = self.listen(&mut child, run, accelerator).await;
        // Waits for the process, so that its memory is free on return. Killing a process that has already exited is not
        // an error.
        let _ = child.kill().await;
        run
    }

    async fn listen(&self, child: &mut Child, mut run: Run, accelerator: Accelerator) -> Result<Run> {
        let (mut report, mut console) = (child.stdout.take(), child.stderr.take());
        let (mut report_buffer, mut console_buffer) = (vec![0; 32 << 10], vec![0; 32 << 10]);
        let started = Instant::now();
        let end = started + self.limits.time;
        let mut deadline = match accelerator {
            Accelerator::Kvm => end.min(started + KVM_START_TIMEOUT),
            Accelerator::Tcg => end,
        };
        while report.is_some() || console.is_some() {
            let next = async {
                tokio::select! {
                    biased;
                    length = read(&mut report, &mut report_buffer) => (Pipe::Report, length),
                    length = read(&mut console, &mut console_buffer) => (Pipe::Console, length),
                }
            };
            let Ok((pipe, length)) = timeout_at(deadline, next).await else {
                // After the last record, only the restart of the machine is expected.
                if !run.transcript.ended() {
                    run.ending = Ending::Silent;
                }
                break;
            };
            match (pipe, length.map_err(BootError::Read)?) {
                (Pipe::Report, 0) => report = None,
                (Pipe::Console, 0) => console = None,
                (Pipe::Report, length) => {
                    if run.transcript.push(report_buffer.get(..length).unwrap_or_default()) {
                        let wait = if run.transcript.ended() { EXIT_TIME } else { self.limits.module_time };
                        deadline = end.min(Instant::now() + wait);
                    }
                }
                (Pipe::Console, length) => run.console.push(console_buffer.get(..length).unwrap_or_default()),
            }
        }
        run.console.end_line();
        Ok(run)
    }

    async fn start(&self, accelerator: Accelerator) -> Result<Child> {
        let (names, package) = candidates(self.kernel.arch);
        let requested = self.emulator.map(|path| path.as_os_str().to_owned());
        let programs: Vec<OsString> =
            requested.map_or_else(|| names.iter().map(OsString::from).collect(), |path| vec![path]);
        for program in &programs {
            // Test for the sandbox in a separate run. A guest writes to QEMU's standard error, and could fake the error of a QEMU
            // without a sandbox.
            let has_sandbox = supports(program, &SANDBOX).await;
            match self.command(program, accelerator, has_sandbox).spawn() {
                Ok(child) => {
                    limit_processor_time(&child, self.limits.time);
                    if !has_sandbox {
                        let (program, hint) = (program.to_string_lossy(), "install the distribution's QEMU");
                        tracing::warn!(%program, hint, "this QEMU has no sandbox: the boot check runs without one");
                    }
                    return Ok(child);
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(source) => {
                    return Err(BootError::Start(program.to_string_lossy().into_owned(), source));
                }
            }
        }
        let program = programs.first().map(|program| program.to_string_lossy().into_owned());
        Err(BootError::NoEmulator { program: program.unwrap_or_default(), package })
    }

    fn command(&self, program: &OsString, accelerator: Accelerator, has_sandbox: bool) -> Command {
        let (machine, hardware) = match self.kernel.arch {
            Architecture::Amd64 => ("pc", "console=ttyS0 no_timer_check"),
            // Pointer authentication costs the emulator three quarters of the boot time (Linux 6.1: 16 s and 4 s).
            Architecture::Arm64 => ("virt", "console=ttyAMA0 arm64.nopauth"),
        };
        let mut command = Command::new(program);
        if has_sandbox {
            command.args(SANDBOX);
        }
        command
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-nic", "none", "-machine", machine])
            .args(["-accel", &accelerator.to_string(), "-cpu", "max", "-smp", "1"])
            .args(["-m", &self.memory.to_string(), "-kernel"])
            .arg(&self.kernel.vmlinuz)
            .arg("-initrd")
            .arg(self.initramfs)
            .args(["-append", &command_line(hardware)])
            .args(["-chardev", "stdio,id=report,signal=off"])
            .args(["-chardev", "file,id=console,path=/dev/stderr", "-serial", "chardev:console"]);
        match self.kernel.arch {
            Architecture::Amd64 => command.args(["-serial", "chardev:report"]),
            Architecture::Arm64 => command.args(["-device", "pci-serial,chardev=report"]),
        };
        // A separate process group, so that farrier handles an interrupt at the terminal.
        command.process_group(0).kill_on_drop(true);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

/// Limits the processor time of a machine that may run for `time`. A module can hang the guest in a busy loop, and a
/// farrier that was killed cannot kill the machine.
fn limit_processor_time(child: &Child, time: Duration) {
    let Some(pid) = child.id().and_then(|id| Pid::from_raw(id.cast_signed())) else { return };
    let seconds = Some(time.as_secs().saturating_mul(THREADS).max(1));
    let limit = Rlimit { current: seconds, maximum: seconds };
    if let Err(error) = prlimit(Some(pid), Resource::Cpu, limit) {
        tracing::warn!(%error, "the processor time of QEMU cannot be limited");
    }
}

/// Whether QEMU exists and supports the options.
async fn supports(program: impl AsRef<std::ffi::OsStr>, options: &[&str]) -> bool {
    let mut command = Command::new(program);
    command.args(options).arg("-version").kill_on_drop(true);
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().await;
    status.is_ok_and(|status| status.success())
}

/// Returns an installed emulator for an architecture.
pub async fn find_emulator(arch: Architecture) -> Result<&'static str> {
    let (names, package) = candidates(arch);
    for name in names {
        if supports(name, &[]).await {
            return Ok(name);
        }
    }
    Err(BootError::NoEmulator { program: names.first().copied().unwrap_or_default().to_owned(), package })
}

/// Returns the kernel's command line.
///
/// - `no_timer_check`: on a busy machine the emulated timer's interrupts can be too late for the kernel's test of them,
///   and the kernel panics. Under KVM kernels skip that test.
/// - `panic=-1`: the kernel restarts at once after a panic, which ends the machine.
/// - `quiet`: keeps the boot fast; init undoes it.
/// - `initcall_debug`: the kernel logs each call of a module's init function. That distinguishes a refusal by the
///   loader from an error of the module.
fn command_line(hardware: &str) -> String {
    format!("{hardware} quiet panic=-1 initcall_debug rdinit=/init -- boot-check")
}

/// Returns the emulator's names, and the Debian package that provides it. Red Hat installs its emulator outside the
/// search path.
fn candidates(arch: Architecture) -> (&'static [&'static str], &'static str) {
    match arch {
        Architecture::Amd64 => (&["qemu-system-x86_64", "/usr/libexec/qemu-kvm"], "qemu-system-x86"),
        Architecture::Arm64 => (&["qemu-system-aarch64", "/usr/libexec/qemu-kvm"], "qemu-system-arm"),
    }
}

/// Reads from a pipe. A closed pipe is never ready.
async fn read(pipe: &mut Option<impl AsyncRead + Unpin>, buffer: &mut [u8]) -> io::Result<usize> {
    match pipe {
        Some(pipe) => pipe.read(buffer).await,
        None => std::future::pending().await,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use super::*;

    #[tokio::test]
    async fn a_machine_that_nobody_kills_ends_by_itself() {
        let mut machine = Command::new("sh");
        let mut child = machine.args(["-c", "while :; do :; done"]).kill_on_drop(true).spawn().unwrap();
        limit_processor_time(&child, Duration::ZERO);
        let status = child.wait().await.unwrap();
        assert!(status.signal().is_some(), "{status:?}");
    }
}
