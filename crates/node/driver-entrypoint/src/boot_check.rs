//! Init process of the virtual machine in which farrier loads modules. It executes the work list from the initramfs,
//! reports each step on a dedicated serial port, and shuts the machine down.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    process::ExitCode,
};

use driver_entrypoint::{
    report::{Key, ReadBack, Record, SyscallResult, VERSION},
    work::{KEY_PATH, Step, WORK_PATH, Work},
};
use rustix::{
    fs::OFlags,
    mount::{MountFlags, mount},
    system::{RebootCommand, reboot, uname},
    termios::{OptionalActions, speed, tcdrain, tcgetattr, tcsetattr},
};

use crate::{error::Error, files, isolated, kmsg::KernelLog, print_error};

/// Executes the work list and restarts the machine. Outside of a virtual machine (not PID 1) it only prints an error.
pub(crate) fn main() -> ExitCode {
    if std::process::id() != 1 {
        print_error("boot-check is for the init process of farrier's virtual machines");
        return ExitCode::from(2);
    }
    if let Err(error) = run() {
        print_error(&error.to_string());
    }
    // Restart, not power off: power off needs ACPI, and QEMU exits on a restart too (`-no-reboot`).
    let Err(error) = reboot(RebootCommand::Restart) else { return ExitCode::SUCCESS };
    print_error(&format!("restart: {error}"));
    // The kernel panics now, which ends the machine as well.
    ExitCode::FAILURE
}

fn run() -> Result<(), Error> {
    for (kind, mount_point) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev")] {
        let mounted = mount(kind, mount_point, kind, MountFlags::empty(), None).map_err(io::Error::from);
        mounted.map_err(Error::on("mount", mount_point))?;
    }
    let work = fs::read(WORK_PATH).map_err(Error::on("read", WORK_PATH))?;
    let work = Work::decode(&work).ok_or_else(|| Error::new("read the work list: it is damaged", ""))?;
    let key = fs::read_to_string(KEY_PATH).map_err(Error::on("read", KEY_PATH))?;
    let key = Key::from_text(&key).ok_or_else(|| Error::new("read the key: no key", ""))?;
    // Module code that runs after this point cannot read the key.
    fs::remove_file(KEY_PATH).map_err(Error::on("remove", "the key"))?;
    let mut report = Report::open(&work.report, key)?;
    let kernel = uname().release().to_string_lossy().into_owned();
    report.send(&Record::Hello { version: VERSION.to_owned(), kernel })?;
    let result = execute_steps(&work, &mut report);
    if let Err(error) = &result {
        report.send(&Record::Failed(error.to_string()))?;
    }
    report.send(&Record::End(report.sent))?;
    result
}

fn execute_steps(work: &Work, report: &mut Report) -> Result<(), Error> {
    let mut machine =
        Machine { log: KernelLog::open().map_err(Error::on("open", "/dev/kmsg"))?, oopsed: has_oopsed() };
    // `quiet` kept the boot fast. From here on, show all messages, because any of them may be the last one.
    fs::write("/proc/sys/kernel/printk", "8").map_err(Error::on("raise", "the console's log level"))?;
    let mut loaded = Vec::new();
    for (number, step) in work.steps.iter().enumerate() {
        let is_loaded = machine.load(number, step, report)?;
        if is_loaded && step.payload {
            loaded.push((number, step));
        }
        if work.unload_each {
            machine.unload_all(&mut loaded, report)?;
        }
        // A kernel that oopsed holds locks that are never released, so later results are meaningless.
        if machine.oopsed {
            return Ok(());
        }
    }
    machine.unload_all(&mut loaded, report)
}

struct Machine {
    log: KernelLog,
    oopsed: bool,
}

impl Machine {
    /// Loads a module; returns whether the module stays in the kernel.
    fn load(&mut self, number: usize, step: &Step, report: &mut Report) -> Result<bool, Error> {
        report.send(&Record::Loading(number))?;
        let (result, oops, messages) = self.run_child(&[isolated::LOAD, &step.path, &step.parameters])?;
        let is_loaded = result == SyscallResult::Success;
        let read_back = if is_loaded { isolated::read_back(&step.name) } else { ReadBack::default() };
        let initialized = is_loaded || messages.iter().any(|message| is_init_call(message, &step.name));
        report.send(&Record::Loaded { step: number, result, initialized, oops, read_back, messages })?;
        Ok(is_loaded)
    }

    /// Unloads in reverse order of loading.
    fn unload_all(&mut self, loaded: &mut Vec<(usize, &Step)>, report: &mut Report) -> Result<(), Error> {
        while !self.oopsed
            && let Some((number, step)) = loaded.pop()
        {
            report.send(&Record::Unloading(number))?;
            let (result, oops, messages) = self.run_child(&[isolated::UNLOAD, &step.name])?;
            report.send(&Record::Unloaded { step: number, result, oops, messages })?;
        }
        Ok(())
    }

    /// Runs this program as a child process. Returns its result, whether the kernel had an oops during it, and the kernel's
    /// messages.
    fn run_child(&mut self, arguments: &[&str]) -> Result<(SyscallResult, bool, Vec<String>), Error> {
        self.log.read();
        let result = isolated::run_child(arguments).map_err(Error::on("start", "a process"))?;
        let messages = self.log.read();
        // The kernel never clears the taint, so after the first oops only a killed process shows another one.
        let oops = matches!(result, SyscallResult::Killed(_)) || (!self.oopsed && has_oopsed());
        self.oopsed |= oops;
        Ok((result, oops, messages))
    }
}

/// Whether `TAINT_DIE`, bit 7, is set (`Documentation/admin-guide/tainted-kernels.rst`): the kernel had an oops or a BUG.
fn has_oopsed() -> bool {
    let taint = files::text("/proc/sys/kernel/tainted").and_then(|taint| taint.parse::<u64>().ok());
    taint.is_some_and(|taint| taint & (1 << 7) != 0)
}

/// Whether a message is the line that `initcall_debug` logs before a module's initialization (`init/main.c`,
/// `do_one_initcall`).
fn is_init_call(message: &str, module: &str) -> bool {
    message.starts_with("calling  ") && message.contains(&format!(" [{module}] @ "))
}

/// Serial port that carries only the report.
struct Report {
    port: File,
    key: Key,
    /// Number of records sent so far.
    sent: u64,
}

impl Report {
    fn open(device: &str, key: Key) -> Result<Self, Error> {
        let flags = OFlags::NOCTTY.bits().cast_signed();
        let port = OpenOptions::new().read(true).write(true).custom_flags(flags).open(device);
        let port = port.map_err(Error::on("open", device))?;
        Self::set_up(&port).map_err(Error::on("set up", device))?;
        Ok(Self { port, key, sent: 0 })
    }

    fn set_up(port: &File) -> io::Result<()> {
        let mut settings = tcgetattr(port)?;
        settings.make_raw();
        // A virtual port has no speed, but `tcdrain` waits for as long as the configured speed requires.
        settings.set_speed(speed::B115200)?;
        Ok(tcsetattr(port, OptionalActions::Now, &settings)?)
    }

    /// Sends a record and waits until it has left the machine, because the next step may crash the machine.
    fn send(&mut self, record: &Record) -> Result<(), Error> {
        let line = record.line(&self.key, self.sent);
        self.sent += 1;
        let result = self.port.write_all(line.as_bytes()).and_then(|()| Ok(tcdrain(&self.port)?));
        result.map_err(Error::on("write", "the report"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_init_call_of_a_module_is_recognized() {
        assert!(is_init_call("calling  m_init+0x0/0x1000 [m] @ 47", "m"));
        assert!(!is_init_call("calling  m_init+0x0/0x1000 [mm] @ 47", "m"));
        assert!(!is_init_call("m: calling  x [m] @ 47", "m"));
    }
}
