//! Finds the decisive error in a build's output.

mod hints;

use std::{collections::VecDeque, fmt, path::Path};

pub use hints::Hint;

/// Number of lines kept from the end of the log.
const TAIL_LINES: usize = 20;
/// Maximum number of characters kept of a line.
const LINE_CHARS: usize = 1000;
/// Maximum number of compiler errors that are kept until make names the target that failed.
const COMPILED: usize = 64;
/// Maximum number of including files that are kept.
const INCLUDED: usize = 8;

/// The decisive error of a failed build.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Diagnosis {
    /// The source file or makefile, as named by the tool.
    pub file: Option<String>,
    /// Line in the file, from 1.
    pub line: Option<u32>,
    /// Column in the line, from 1.
    pub column: Option<u32>,
    /// Message of the tool.
    pub message: String,
}

impl fmt::Display for Diagnosis {
    /// Formats as `nvidia/nv-pci.c:177:13: too few arguments to function ...`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { file, line, column, message } = self;
        for part in
            [file.clone(), line.map(|n| n.to_string()), column.map(|n| n.to_string())].iter().flatten()
        {
            write!(f, "{part}:")?;
        }
        if file.is_some() {
            f.write_str(" ")?;
        }
        f.write_str(message)
    }
}

/// Kinds of messages, ordered by how close they are to the cause of the failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// `make: *** [...] Error 2`, with the line before it, which the failed command may have printed.
    MakeStopped,
    /// A line of a script that begins with `ERROR` or the like.
    Script,
    /// An error of the compiler in a file that asks a question, such as `conftest.c`. Most such errors are answers.
    Probe,
    /// An `error: ...` that a template of farrier prints after an earlier failure.
    Consequence,
    /// A missing command, module or interpreter, or a host that cannot be reached.
    Missing,
    /// An error of the compiler that made no make target fail. Scripts ignore many of these.
    Compiler,
    /// `error: ...`, which farrier's templates print before they end the build.
    Template,
    /// `... *** TEXT.  Stop.`: what `$(error TEXT)` prints, a missing rule, or an error in a makefile.
    Stop,
    /// A patch that does not fit.
    Patch,
    /// An error of a configure script.
    Configure,
    /// An error of the linker.
    Linker,
    /// An error of modpost.
    Modpost,
    /// An error of the compiler that made a make target fail.
    Target,
}

impl Rank {
    /// Whether the last message of this kind counts instead of the first one: make and scripts end after it.
    fn is_last(self) -> bool {
        matches!(self, Self::Script | Self::Stop | Self::Template)
    }
}

/// Reads a log line by line and keeps its decisive error and its last lines, in bounded memory.
#[derive(Debug, Default)]
pub struct Diagnoser {
    best: Option<(Rank, Diagnosis)>,
    /// Errors of the compiler, with the stems of the files that may belong to the failed target.
    compiled: Vec<(Vec<String>, Diagnosis)>,
    /// Stems of the files named in the last `In file included from` lines.
    included: VecDeque<String>,
    hint: Option<Hint>,
    tail: VecDeque<String>,
}

impl Diagnoser {
    /// Processes the next line.
    pub fn feed(&mut self, line: &str) {
        let line: String = line.chars().take(LINE_CHARS).collect();
        if !is_engine_echo(&line) {
            self.read(&line);
        }
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }

    fn read(&mut self, line: &str) {
        if let Some(file) = included_from(line) {
            if self.included.len() == INCLUDED {
                self.included.pop_front();
            }
            self.included.extend(stem(file));
        }
        self.hint = hints::of(line).or(self.hint.take());
        if line.starts_with("make") && line.ends_with("(ignored)") {
            self.best.take_if(|(rank, _)| *rank <= Rank::Compiler);
            self.compiled.clear();
        }
        if let Some((target, mut found)) = make_stopped(line) {
            let failed = stem(target);
            let cause =
                self.compiled.iter().find(|(files, _)| failed.as_ref().is_some_and(|f| files.contains(f)));
            if let Some((_, cause)) = cause {
                let cause = cause.clone();
                self.offer(Rank::Target, cause);
            } else {
                if let Some(said) = self.tail.back().filter(|said| is_statement(said)) {
                    found.message = format!("{}, after: {}", found.message, said.trim());
                }
                self.offer(Rank::MakeStopped, found);
            }
        } else if let Some((rank, found)) = read(line) {
            if rank == Rank::Compiler && self.compiled.len() < COMPILED {
                let own = found.file.as_deref().and_then(stem);
                self.compiled
                    .push((own.into_iter().chain(self.included.iter().cloned()).collect(), found.clone()));
            }
            self.offer(rank, found);
        }
    }

    fn offer(&mut self, rank: Rank, found: Diagnosis) {
        let is_better = |known: Rank| match rank {
            // The compiler runs only if the message before it was ignored.
            Rank::Compiler if known == Rank::Stop => true,
            _ => rank > known || rank == known && rank.is_last(),
        };
        if self.best.as_ref().is_none_or(|(known, _)| is_better(*known)) {
            self.best = Some((rank, found));
        }
    }

    /// Returns the error of the kind closest to the cause.
    pub fn diagnosis(&self) -> Option<&Diagnosis> {
        self.best.as_ref().map(|(_, diagnosis)| diagnosis)
    }

    /// Returns the last advice that the log gave reason to.
    pub fn hint(&self) -> Option<&Hint> {
        self.hint.as_ref()
    }

    /// Returns the last 20 lines.
    pub fn tail(&self) -> impl Iterator<Item = &str> {
        self.tail.iter().map(String::as_str)
    }
}

/// Returns the file that an `In file included from FILE:1:` line or its continuation names.
fn included_from(line: &str) -> Option<&str> {
    let rest = line.trim_start().strip_prefix("In file included ").unwrap_or(line).trim_start();
    rest.strip_prefix("from ")?.split(':').next()
}

/// Returns a file's name without directory and extension.
fn stem(path: &str) -> Option<String> {
    Some(Path::new(path).file_stem()?.to_str()?.to_owned())
}

/// Whether the line may be what a failed command printed, and not make's own output.
fn is_statement(line: &str) -> bool {
    let word = line.split([':', '[']).next().unwrap_or_default();
    !line.trim().is_empty() && !line.starts_with(' ') && !word.starts_with("make")
}

/// Whether the engine quotes the Dockerfile in this line. The text of a step may contain the words of an error.
fn is_engine_echo(line: &str) -> bool {
    // Podman prefixes the stage: `[1/3] STEP 2/3: RUN make`.
    let step = match line.strip_prefix('[').and_then(|rest| rest.split_once("] ")) {
        Some((stage, step)) if stage.bytes().all(|byte| byte.is_ascii_digit() || byte == b'/') => step,
        _ => line,
    };
    let number = step.strip_prefix("Step ").or_else(|| step.strip_prefix("STEP "));
    number.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        || line.starts_with("The command '")
        || line.starts_with("Error: building at STEP ")
}

/// Reads a line that is not make's report of a failed target.
fn read(line: &str) -> Option<(Rank, Diagnosis)> {
    let ranked = |rank: Rank| move |found: Diagnosis| (rank, found);
    if line.starts_with("configure: error: ") {
        return Some((Rank::Configure, bare(line)));
    }
    modpost(line)
        .map(ranked(Rank::Modpost))
        .or_else(|| linker(line).map(ranked(Rank::Linker)))
        .or_else(|| compiler(line))
        .or_else(|| stop(line).map(ranked(Rank::Stop)))
        .or_else(|| patch(line).map(ranked(Rank::Patch)))
        .or_else(|| missing(line).map(ranked(Rank::Missing)))
        .or_else(|| line.strip_prefix("error: ").map(template))
        .or_else(|| script(line).map(ranked(Rank::Script)))
}

fn bare(message: &str) -> Diagnosis {
    Diagnosis { file: None, line: None, column: None, message: message.trim().to_owned() }
}

fn template(message: &str) -> (Rank, Diagnosis) {
    let is_consequence = message.ends_with(" is not there") || message.contains(" failed with exit code ");
    (if is_consequence { Rank::Consequence } else { Rank::Template }, bare(message))
}

/// Parses `file:line:column: error: message` of gcc and clang; the column is optional, and `fatal error` and the
/// assembler's `Error` also count. `cc1: error: message` has no place.
fn compiler(line: &str) -> Option<(Rank, Diagnosis)> {
    let (place, message) = [": fatal error: ", ": error: ", ": Error: "]
        .iter()
        .filter_map(|mark| line.split_once(mark))
        .min_by_key(|(place, _)| place.len())?;
    let place = place.trim_start();
    let mut parts = place.rsplitn(3, ':');
    let numbers = [parts.next(), parts.next()].map(|part| part.and_then(|part| part.parse::<u32>().ok()));
    let (file, number, column) = match numbers {
        [Some(column), Some(number)] => (parts.next()?, Some(number), Some(column)),
        [Some(number), None] => (place.rsplit_once(':')?.0, Some(number), None),
        [None, _] if is_tool(place) => (place, None, None),
        [None, _] => return None,
    };
    let asks = |word: &str| file.to_ascii_lowercase().contains(word);
    let is_probe =
        ["conftest", "<stdin>", "/tmp/", "<command-line>"].into_iter().any(asks) && number.is_some();
    // The assembler names its temporary file.
    let rank = if is_probe && !line.contains(": Error: ") { Rank::Probe } else { Rank::Compiler };
    let message = message.trim_end().to_owned();
    (!file.is_empty())
        .then(|| (rank, Diagnosis { file: Some(file.to_owned()), line: number, column, message }))
}

/// Whether this is a compiler's program name, as in `aarch64-linux-gnu-gcc-12: error: ...`.
fn is_tool(name: &str) -> bool {
    let name = name
        .rsplit('/')
        .next()
        .unwrap_or_default()
        .trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
    ["gcc", "g++", "cc", "cc1", "clang", "cpp", "objtool", "as"]
        .iter()
        .any(|tool| name == *tool || name.ends_with(&format!("-{tool}")))
        || name == "cc1plus"
}

/// Parses `ERROR: modpost: "symbol" [module.ko] undefined!`; before Linux 5.10 the line lacks `modpost:`.
fn modpost(line: &str) -> Option<Diagnosis> {
    let line = line.trim_start();
    let message = line.strip_prefix("ERROR: ").or_else(|| line.strip_prefix("FATAL: "))?;
    let is_modpost =
        message.starts_with("modpost: ") || (message.starts_with('"') && message.contains("undefined!"));
    let message = message.strip_prefix("modpost: ").unwrap_or(message);
    is_modpost.then(|| match message.split_once('[').and_then(|(_, rest)| rest.split_once(']')) {
        Some((module, _)) => Diagnosis { file: Some(module.to_owned()), ..bare(message) },
        None => bare(message),
    })
}

/// Recognizes errors of GNU ld and lld.
fn linker(line: &str) -> Option<Diagnosis> {
    let undefined = line.contains(": undefined reference to ") || line.contains(": multiple definition of ");
    let tool = line.split(": ").next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    let is_linker =
        tool == "ld" || tool.starts_with("ld.") || tool.ends_with("-ld") || tool.ends_with("-ld.bfd");
    let failed = ["cannot find ", "error: ", "unrecognized option", "final link failed"];
    let named = is_linker && failed.iter().any(|words| line.contains(words));
    (undefined || named).then(|| bare(line))
}

/// Parses `FILE:LINE: *** TEXT.  Stop.` and `make: *** TEXT.  Stop.`
fn stop(line: &str) -> Option<Diagnosis> {
    let (place, message) = line.trim_end().strip_suffix("Stop.")?.split_once("*** ")?;
    let found = bare(message.trim_end().strip_suffix('.').unwrap_or(message));
    let place = place.trim().trim_end_matches(':').rsplit_once(':');
    match place.and_then(|(file, line)| Some((file, line.parse().ok()?))) {
        Some((file, line)) => Some(Diagnosis { file: Some(file.to_owned()), line: Some(line), ..found }),
        None => Some(found),
    }
}

/// Recognizes errors of patch.
fn patch(line: &str) -> Option<Diagnosis> {
    let failed =
        line.contains(" hunk") && (line.contains(" FAILED -- saving rejects") || line.ends_with(" ignored"));
    let named =
        ["can't find file to patch", "Reversed (or previously applied) patch detected", "patch: **** "];
    (failed || named.iter().any(|words| line.starts_with(words))).then(|| bare(line))
}

/// Recognizes missing commands, files, interpreters and hosts.
fn missing(line: &str) -> Option<Diagnosis> {
    let line = line.trim();
    let shell = line.ends_with(": not found")
        && (line.starts_with("/bin/")
            || line.starts_with("sh: ")
            || line.contains(": line ")
            || is_numbered(line));
    let ends = [": command not found", ": Permission denied"];
    let bash = ends.iter().any(|end| line.ends_with(end)) && !line.starts_with("find: ");
    let exec = line.starts_with("make") && line.ends_with(": No such file or directory");
    let within = [
        "bad interpreter",
        "ModuleNotFoundError: ",
        "Can't locate ",
        "ERROR: Kernel configuration is invalid",
    ];
    (shell || bash || exec || within.iter().any(|words| line.contains(words)) || hints::is_network(line))
        .then(|| bare(line))
}

/// Whether the line has dash's form `SCRIPT: 3: MESSAGE`.
fn is_numbered(line: &str) -> bool {
    let number = line.split(": ").nth(1).unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Recognizes what scripts print before they fail.
fn script(line: &str) -> Option<Diagnosis> {
    let line = line.trim_start_matches(['*', '!', ' ']);
    let word = line.split([':', '!', ' ']).next().unwrap_or_default();
    ["error", "fatal"].iter().any(|known| word.eq_ignore_ascii_case(known)).then(|| bare(line))
}

/// Parses `make[2]: *** [Makefile:1903: modules] Error 2`, except for errors that make ignores. Returns the target, too.
fn make_stopped(line: &str) -> Option<(&str, Diagnosis)> {
    let (tool, message) = line.trim_start().split_once(": *** ")?;
    let target = message.strip_prefix('[')?.split_once(']')?.0;
    let target = target.rsplit(": ").next().unwrap_or(target);
    (tool.starts_with("make") && !message.ends_with("(ignored)")).then(|| (target, bare(message)))
}

#[cfg(test)]
#[path = "diagnosis_tests.rs"]
mod tests;
