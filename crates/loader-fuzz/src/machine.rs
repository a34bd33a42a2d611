//! Loads mutants in virtual machines. A virtual machine loads mutants until its kernel dies or no mutant is left.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs,
    io::{self, BufRead as _, BufReader, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Duration,
};

use kmod::Architecture;
use tempfile::TempDir;

use crate::{
    Result, fail,
    kernel::{BaseModule, Kernel},
};

/// Timeout for the first line of a virtual machine's report. The machine is emulated, on a host that may be busy.
const BOOT_TIMEOUT: Duration = Duration::from_mins(3);
/// Timeout for each further line of the report.
const ANSWER_TIMEOUT: Duration = Duration::from_mins(1);
/// Number of virtual machines in a row that may end without an answer.
const MAX_IDLE_RUNS: u32 = 2;
/// Number of the console's last lines in errors and answers.
const CONSOLE_LINES: usize = 40;

/// A mutant to load.
pub struct Load<'a> {
    /// Index of the base module.
    pub base: usize,
    pub bytes: &'a [u8],
}

/// The kernel's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Loaded,
    /// The `errno` of the system call, and the kernel's messages.
    Refused(i32, Vec<String>),
    /// The kernel panicked or hung, with the end of its console.
    Died(String),
}

/// Loads mutants in virtual machines, one machine at a time. The first machine boots and is saved; all others continue from there.
pub struct MutantLoader<'a> {
    kernel: &'a Kernel,
    /// Directory with the compiled init, the initramfs, the saved machine and the console's output.
    directory: TempDir,
}

impl<'a> MutantLoader<'a> {
    /// Compiles the init of the virtual machines.
    pub fn new(kernel: &'a Kernel) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let source = directory.path().join("guest.c");
        fs::write(&source, include_str!("guest.c"))?;
        let root = directory.path().join("root");
        fs::create_dir(&root)?;
        let compiler = match kernel.facts.arch {
            Architecture::Amd64 => "x86_64-linux-gnu-gcc",
            Architecture::Arm64 => "aarch64-linux-gnu-gcc",
        };
        let options = ["-static", "-O1", "-Wall", "-Werror", "-o"];
        let outcome = Command::new(compiler).args(options).arg(root.join("init")).arg(&source).status();
        match outcome {
            Ok(status) if status.success() => Ok(Self { kernel, directory }),
            Ok(status) => Err(fail(format!("compile guest.c with {compiler}: {status}"))),
            Err(error) => Err(fail(format!("start {compiler}: {error}"))),
        }
    }

    /// Loads all mutants, and returns the answer to each.
    pub fn load(&self, bases: &[BaseModule], loads: &[Load<'_>]) -> Result<Vec<Answer>> {
        let plan = Plan::new(bases, loads);
        self.write_initramfs(&plan)?;
        self.save_booted_machine()?;
        let mut answers = BTreeMap::new();
        let mut next = 0;
        let mut idle_runs = 0;
        while let Some(&start) = plan.starts.get(next) {
            let first = next;
            self.run(start, &mut answers)?;
            next = answers.last_key_value().map_or(0, |(number, _)| number + 1);
            idle_runs = if next == first { idle_runs + 1 } else { 0 };
            if idle_runs > MAX_IDLE_RUNS {
                return Err(fail(format!(
                    "the virtual machine does not reach mutant {next}: {}",
                    self.last_console_lines()
                )));
            }
        }
        Ok(answers.into_values().collect())
    }

    /// Boots a virtual machine until init waits, and saves its state.
    fn save_booted_machine(&self) -> Result<()> {
        let socket = self.directory.path().join("monitor");
        let mut monitor = OsString::from("unix:");
        monitor.push(&socket);
        monitor.push(",server=on,wait=off");
        let mut child = self.start(&["-monitor".into(), monitor])?;
        let lines = read_lines(child.stdout.take());
        wait_for_init(&lines);
        // The monitor executes the second command after the first has finished.
        let saved = UnixStream::connect(&socket)
            .and_then(|mut monitor| {
                monitor.write_all(b"migrate exec:cat>$FARRIER_BOOTED\nquit\n").map(|()| monitor)
            })
            .and_then(|mut monitor| io::copy(&mut monitor, &mut io::sink()));
        let _ = child.kill();
        child.wait()?;
        match saved {
            Ok(_) if fs::metadata(self.booted_machine()).is_ok_and(|file| file.len() > 0) => Ok(()),
            _ => Err(fail(format!("the virtual machine does not boot: {}", self.last_console_lines()))),
        }
    }

    /// File with the state of the booted machine.
    fn booted_machine(&self) -> PathBuf {
        self.directory.path().join("booted")
    }

    /// Runs one virtual machine, which loads the mutants from an offset in the plan on.
    fn run(&self, start: usize, answers: &mut BTreeMap<usize, Answer>) -> Result<()> {
        let mut child = self.start(&["-incoming".into(), "exec:cat<$FARRIER_BOOTED".into()])?;
        let lines = read_lines(child.stdout.take());
        // Init repeats its question, because QEMU drops input that arrives before it has restored the machine.
        wait_for_init(&lines);
        if let Some(mut input) = child.stdin.take() {
            writeln!(input, "{start}")?;
        }
        let unanswered = read_answers_of_guest(&lines, answers);
        // Killing a process that has already exited is not an error.
        let _ = child.kill();
        child.wait()?;
        if let Some(number) = unanswered? {
            answers.insert(number, Answer::Died(self.last_console_lines()));
        }
        Ok(())
    }

    fn last_console_lines(&self) -> String {
        let text = fs::read(self.directory.path().join("console")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        lines.get(lines.len().saturating_sub(CONSOLE_LINES)..).unwrap_or_default().join("\n")
    }

    /// Writes the initramfs, which contains init and the plan.
    fn write_initramfs(&self, plan: &Plan) -> Result<()> {
        let root = self.directory.path().join("root");
        fs::write(root.join("plan"), &plan.bytes)?;
        let archive = fs::File::create(self.directory.path().join("initramfs"))?;
        let mut cpio = Command::new("cpio")
            .args(["--quiet", "-o", "-H", "newc"])
            .current_dir(&root)
            .stdin(Stdio::piped())
            .stdout(archive)
            .spawn()?;
        if let Some(mut names) = cpio.stdin.take() {
            names.write_all(b"init\nplan\n")?;
        }
        let status = cpio.wait()?;
        if status.success() { Ok(()) } else { Err(fail(format!("cpio failed: {status}"))) }
    }

    /// Starts QEMU with additional options. The report arrives on standard output, and the console goes to a file.
    fn start(&self, options: &[OsString]) -> Result<Child> {
        let directory = self.directory.path();
        let console = format!("file,id=console,path={}", directory.join("console").display());
        let (program, machine, hardware, device) = match self.kernel.facts.arch {
            Architecture::Amd64 => ("qemu-system-x86_64", "pc", "console=ttyS0 no_timer_check", "/dev/ttyS1"),
            // Pointer authentication makes the emulator slow.
            Architecture::Arm64 => {
                ("qemu-system-aarch64", "virt", "console=ttyAMA0 arm64.nopauth", "/dev/ttyS0")
            }
        };
        let mut command = Command::new(program);
        command
            .args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none", "-nic", "none"])
            // Emulation, because guests hang on some nested hosts that offer KVM.
            .args(["-machine", machine, "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "1024", "-kernel"])
            .arg(&self.kernel.vmlinuz)
            .arg("-initrd")
            .arg(directory.join("initramfs"))
            .args(["-append", &format!("{hardware} quiet panic=-1 oops=panic rdinit=/init -- {device}")])
            .args([
                "-chardev",
                "stdio,id=report,signal=off",
                "-chardev",
                &console,
                "-serial",
                "chardev:console",
            ]);
        match self.kernel.facts.arch {
            Architecture::Amd64 => command.args(["-serial", "chardev:report"]),
            Architecture::Arm64 => command.args(["-device", "pci-serial,chardev=report"]),
        };
        command.args(options).env("FARRIER_BOOTED", self.booted_machine());
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().map_err(|error| {
            fail(format!("start {program} (Debian packages qemu-system-x86, qemu-system-arm): {error}"))
        })
    }
}

/// Reads lines in a thread. The thread ends when QEMU exits and closes the pipe.
fn read_lines(output: Option<ChildStdout>) -> Receiver<String> {
    let (sender, lines) = channel();
    thread::spawn(move || {
        let lines = output
            .into_iter()
            .flat_map(|output| BufReader::new(output).split(b'\n').map_while(std::result::Result::ok));
        for line in lines {
            if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                break;
            }
        }
    });
    lines
}

/// Waits until init asks for the first mutant, or until the timeout.
fn wait_for_init(lines: &Receiver<String>) {
    while lines.recv_timeout(BOOT_TIMEOUT).is_ok_and(|line| line != "W") {}
}

/// Reads the guest's report until its end or a timeout. Returns the mutant that was being loaded at that time.
fn read_answers_of_guest(
    lines: &Receiver<String>,
    answers: &mut BTreeMap<usize, Answer>,
) -> Result<Option<usize>> {
    let (mut current, mut messages, mut timeout) = (None, Vec::new(), BOOT_TIMEOUT);
    while let Ok(line) = lines.recv_timeout(timeout) {
        timeout = ANSWER_TIMEOUT;
        let words: Vec<&str> = line.splitn(3, ' ').collect();
        match words.as_slice() {
            ["B", number] => {
                current = number.parse().ok();
                messages.clear();
            }
            ["K", ..] => messages.push(line.get(2..).unwrap_or_default().to_owned()),
            ["R", number, errno] => {
                let answer = match errno.parse().map_err(fail)? {
                    0 => Answer::Loaded,
                    errno => Answer::Refused(errno, messages.clone()),
                };
                answers.insert(number.parse().map_err(fail)?, answer);
                current = None;
            }
            ["X", ..] => return Err(fail(format!("init of the virtual machine failed: {line}"))),
            ["E"] => break,
            _ => {}
        }
    }
    Ok(current)
}

/// Mutants for init, in the format that `guest.c` describes.
struct Plan {
    bytes: Vec<u8>,
    /// Offset of each mutant.
    starts: Vec<usize>,
}

impl Plan {
    fn new(bases: &[BaseModule], loads: &[Load<'_>]) -> Self {
        let (mut bytes, mut starts) = (Vec::new(), Vec::new());
        push_word(&mut bytes, bases.len());
        for base in bases {
            push_word(&mut bytes, base.object.bytes.len());
            bytes.extend(&base.object.bytes);
        }
        for (number, load) in loads.iter().enumerate() {
            starts.push(bytes.len());
            let base = bases.get(load.base).map_or(&[][..], |base| &base.object.bytes);
            let edits = edits(base, load.bytes);
            for value in [number, load.base, load.bytes.len(), edits.len()] {
                push_word(&mut bytes, value);
            }
            for (offset, edit) in edits {
                push_word(&mut bytes, offset);
                push_word(&mut bytes, edit.len());
                bytes.extend(edit);
            }
        }
        Self { bytes, starts }
    }
}

fn push_word(plan: &mut Vec<u8>, value: usize) {
    plan.extend(u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes());
}

/// Returns the edits that turn the base into the mutant, as offsets and bytes. Ignores bytes of the base beyond the mutant's end.
fn edits<'m>(base: &[u8], mutant: &'m [u8]) -> Vec<(usize, &'m [u8])> {
    /// Differences that are closer than this number of bytes become one edit.
    const GAP: usize = 16;
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    let common = base.len().min(mutant.len());
    for offset in (0..common).filter(|&offset| base.get(offset) != mutant.get(offset)) {
        match ranges.last_mut() {
            Some((_, end)) if offset < *end + GAP => *end = offset + 1,
            _ => ranges.push((offset, offset + 1)),
        }
    }
    if mutant.len() > common {
        ranges.push((common, mutant.len()));
    }
    ranges.into_iter().filter_map(|(start, end)| Some((start, mutant.get(start..end)?))).collect()
}

/// Reads recorded answers; returns `None` if the file does not exist.
pub fn read_answers(file: &Path) -> Result<Option<Vec<Answer>>> {
    if !file.exists() {
        return Ok(None);
    }
    let text = fs::read_to_string(file)?;
    let answers = text.lines().map(|line| {
        parse_answer(line).ok_or_else(|| fail(format!("{}: not a recorded answer: {line:?}", file.display())))
    });
    answers.collect::<Result<_>>().map(Some)
}

/// Records answers, one per line.
pub fn write_answers(file: &Path, answers: &[Answer]) -> Result<()> {
    if let Some(directory) = file.parent() {
        fs::create_dir_all(directory)?;
    }
    Ok(fs::write(file, answers.iter().map(answer_line).collect::<String>())?)
}

/// Parses a line of [`answer_line`]; `None` for a line of another form.
fn parse_answer(line: &str) -> Option<Answer> {
    let mut fields = line.split('\t').map(str::to_owned);
    match fields.next()?.as_str() {
        "loaded" => Some(Answer::Loaded),
        "refused" => Some(Answer::Refused(fields.next()?.parse().ok()?, fields.collect())),
        "died" => Some(Answer::Died(fields.collect::<Vec<_>>().join("\n"))),
        _ => None,
    }
}

/// Formats an answer as tab-separated fields.
fn answer_line(answer: &Answer) -> String {
    let fields: Vec<String> = match answer {
        Answer::Loaded => vec!["loaded".to_owned()],
        Answer::Refused(errno, messages) => {
            ["refused".to_owned(), errno.to_string()].into_iter().chain(messages.iter().cloned()).collect()
        }
        Answer::Died(console) => ["died"].into_iter().chain(console.lines()).map(str::to_owned).collect(),
    };
    let fields: Vec<String> = fields.iter().map(|field| field.replace(['\t', '\n', '\r'], " ")).collect();
    fields.join("\t") + "\n"
}
