//! Loads mutants in virtual machines, each of which runs until the kernel dies or no mutant is left.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    sync::mpsc::channel,
    thread,
    time::Duration,
};

use kmod::Architecture;
use tempfile::TempDir;

use crate::{
    Result, fail,
    kernel::{Base, Kernel},
};

/// Time for a machine to start, and to answer about one module. The machine is emulated, on a host that may be busy.
const START: Duration = Duration::from_mins(3);
const ANSWER: Duration = Duration::from_mins(1);

/// A mutant to load: its base, and its bytes.
pub struct Load<'a> {
    pub base: usize,
    pub bytes: &'a [u8],
}

/// The kernel's answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    Loaded,
    /// Number of the error, and the kernel's messages.
    Refused(i32, Vec<String>),
    /// The kernel panicked or hung, with the end of its console.
    Died(String),
}

/// A place for the machine's files, with the compiled init.
pub struct Guests<'a> {
    kernel: &'a Kernel,
    bases: &'a [Base],
    place: TempDir,
}

impl<'a> Guests<'a> {
    pub fn new(kernel: &'a Kernel, bases: &'a [Base]) -> Result<Self> {
        let place = tempfile::tempdir()?;
        let source = place.path().join("guest.c");
        fs::write(&source, include_str!("guest.c"))?;
        let root = place.path().join("root");
        fs::create_dir(&root)?;
        let compiler = match kernel.facts.arch {
            Architecture::Amd64 => "x86_64-linux-gnu-gcc",
            Architecture::Arm64 => "aarch64-linux-gnu-gcc",
        };
        let options = ["-static", "-O1", "-Wall", "-Werror", "-o"];
        let done = Command::new(compiler).args(options).arg(root.join("init")).arg(&source).status();
        match done {
            Ok(status) if status.success() => Ok(Self { kernel, bases, place }),
            other => Err(fail(format!("{compiler}: {other:?}"))),
        }
    }

    /// Loads all mutants, and returns the answer to each.
    pub fn load(&self, loads: &[Load<'_>]) -> Result<Vec<Answer>> {
        let mut answers = BTreeMap::new();
        let mut next = 0;
        let mut idle = 0;
        while next < loads.len() {
            let before = next;
            self.run(loads, next, &mut answers)?;
            next = answers.last_key_value().map_or(0, |(number, _)| number + 1);
            idle = if next == before { idle + 1 } else { 0 };
            if idle > 2 {
                return Err(fail(format!("the machine does not reach mutant {next}: {}", self.console())));
            }
        }
        Ok(answers.into_values().collect())
    }

    /// Runs one machine, from a mutant on.
    fn run(&self, loads: &[Load<'_>], first: usize, answers: &mut BTreeMap<usize, Answer>) -> Result<()> {
        self.pack(loads, first)?;
        let mut child = self.boot()?;
        let (sender, lines) = channel();
        let output = child.stdout.take();
        // The thread ends with the machine, which closes the pipe.
        thread::spawn(move || {
            for line in output
                .into_iter()
                .flat_map(|output| BufReader::new(output).split(b'\n').map_while(std::result::Result::ok))
            {
                if sender.send(String::from_utf8_lossy(&line).trim_end().to_owned()).is_err() {
                    break;
                }
            }
        });
        let (mut current, mut messages, mut patience) = (None, Vec::new(), START);
        while let Ok(line) = lines.recv_timeout(patience) {
            patience = ANSWER;
            let words: Vec<&str> = line.splitn(3, ' ').collect();
            match words.as_slice() {
                ["B", number] => {
                    current = number.parse().ok();
                    messages.clear();
                }
                ["K", ..] => messages.push(line.get(2..).unwrap_or_default().to_owned()),
                ["R", number, error] => {
                    let error: i32 = error.parse().map_err(fail)?;
                    let answer =
                        if error == 0 { Answer::Loaded } else { Answer::Refused(error, messages.clone()) };
                    answers.insert(number.parse().map_err(fail)?, answer);
                    current = None;
                }
                ["X", ..] => return Err(fail(format!("the machine's init failed: {line}"))),
                ["E"] => break,
                _ => {}
            }
        }
        // The process may have ended.
        let _ = child.kill();
        child.wait()?;
        if let Some(number) = current {
            answers.insert(number, Answer::Died(self.console()));
        }
        Ok(())
    }

    fn console(&self) -> String {
        let text = fs::read(self.place.path().join("console")).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
        lines.get(lines.len().saturating_sub(40)..).unwrap_or_default().join("\n")
    }

    /// Writes the initramfs with the plan.
    fn pack(&self, loads: &[Load<'_>], first: usize) -> Result<()> {
        let root = self.place.path().join("root");
        let mut plan = Vec::new();
        let word = |plan: &mut Vec<u8>, value: usize| {
            plan.extend(u32::try_from(value).unwrap_or(u32::MAX).to_le_bytes());
        };
        word(&mut plan, self.bases.len());
        for base in self.bases {
            word(&mut plan, base.object.bytes.len());
            plan.extend(&base.object.bytes);
        }
        word(&mut plan, loads.len() - first);
        for (number, load) in loads.iter().enumerate().skip(first) {
            let base = self.bases.get(load.base).map_or(&[][..], |base| &base.object.bytes);
            let edits = difference(base, load.bytes);
            for value in [number, load.base, load.bytes.len(), edits.len()] {
                word(&mut plan, value);
            }
            for (offset, bytes) in edits {
                word(&mut plan, offset);
                word(&mut plan, bytes.len());
                plan.extend(bytes);
            }
        }
        fs::write(root.join("plan"), plan)?;
        let archive = fs::File::create(self.place.path().join("initramfs"))?;
        let mut cpio = Command::new("cpio")
            .args(["--quiet", "-o", "-H", "newc"])
            .current_dir(&root)
            .stdin(Stdio::piped())
            .stdout(archive)
            .spawn()?;
        if let Some(mut names) = cpio.stdin.take() {
            names.write_all(b"init\nplan\n")?;
        }
        if cpio.wait()?.success() { Ok(()) } else { Err(fail("cpio failed")) }
    }

    fn boot(&self) -> Result<Child> {
        let place = self.place.path();
        let console = format!("file,id=console,path={}", place.join("console").display());
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
            // Guests hang on some nested hosts that offer KVM.
            .args(["-machine", machine, "-accel", "tcg", "-cpu", "max", "-smp", "1", "-m", "1024", "-kernel"])
            .arg(&self.kernel.vmlinuz)
            .arg("-initrd")
            .arg(place.join("initramfs"))
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
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(|error| {
            fail(format!("start {program} (Debian packages qemu-system-x86, qemu-system-arm): {error}"))
        })
    }
}

/// Returns what differs from the base, as positions and bytes. Bytes of the base after the mutant's end do not count.
fn difference<'m>(base: &[u8], mutant: &'m [u8]) -> Vec<(usize, &'m [u8])> {
    const GAP: usize = 16;
    let mut edits: Vec<(usize, usize)> = Vec::new();
    let common = base.len().min(mutant.len());
    for at in (0..common).filter(|&at| base.get(at) != mutant.get(at)) {
        match edits.last_mut() {
            Some((_, end)) if at < *end + GAP => *end = at + 1,
            _ => edits.push((at, at + 1)),
        }
    }
    if mutant.len() > common {
        edits.push((common, mutant.len()));
    }
    edits.into_iter().filter_map(|(start, end)| Some((start, mutant.get(start..end)?))).collect()
}

/// The path of a file for a mutant that is kept.
pub fn kept(place: &Path, number: usize, name: &str) -> PathBuf {
    place.join(format!("{number}-{name}.ko"))
}

/// Reads recorded answers; `None` if there are none.
pub fn read_answers(file: &Path) -> Result<Option<Vec<Answer>>> {
    if !file.exists() {
        return Ok(None);
    }
    let answer = |line: &str| {
        let mut fields = line.split('\t').map(str::to_owned);
        match fields.next().as_deref() {
            Some("loaded") => Ok(Answer::Loaded),
            Some("refused") => {
                let error = fields.next().unwrap_or_default().parse().map_err(fail)?;
                Ok(Answer::Refused(error, fields.collect()))
            }
            Some("died") => Ok(Answer::Died(fields.collect::<Vec<_>>().join("\n"))),
            _ => Err(fail(format!("{} has the line {line:?}", file.display()))),
        }
    };
    fs::read_to_string(file)?.lines().map(answer).collect::<Result<_>>().map(Some)
}

/// Records answers, a line for each.
pub fn write_answers(file: &Path, answers: &[Answer]) -> Result<()> {
    if let Some(place) = file.parent() {
        fs::create_dir_all(place)?;
    }
    let line = |answer: &Answer| {
        let fields: Vec<String> = match answer {
            Answer::Loaded => vec!["loaded".to_owned()],
            Answer::Refused(error, messages) => ["refused".to_owned(), error.to_string()]
                .into_iter()
                .chain(messages.iter().cloned())
                .collect(),
            Answer::Died(console) => ["died"].into_iter().chain(console.lines()).map(str::to_owned).collect(),
        };
        let fields: Vec<String> = fields.iter().map(|field| field.replace(['\t', '\n', '\r'], " ")).collect();
        fields.join("\t") + "\n"
    };
    Ok(fs::write(file, answers.iter().map(line).collect::<String>())?)
}
