//! Finds the decisive error in a build's output.

mod hints;

use std::{collections::VecDeque, fmt, path::Path};

pub use hints::Hint;

/// Number of lines kept from the end of the log.
const TAIL_LINES: usize = 20;
/// Maximum number of characters kept of a line.
const LINE_CHARS: usize = 1000;
/// Maximum number of compiler errors that are kept until make names the target that failed.
const MAX_COMPILER_ERRORS: usize = 64;
/// Maximum number of including files that are kept.
const MAX_INCLUDING_FILES: usize = 8;

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
    /// `make: *** [...] Error 2`. The message includes the previous line, which may be output of the failed command.
    MakeStopped,
    /// A line of a script that begins with `ERROR` or the like.
    Script,
    /// A compiler error in a probe of the build system, such as `conftest.c`. Most such errors are expected.
    Probe,
    /// An `error: ...` that a template of farrier prints after an earlier failure.
    Consequence,
    /// A missing command, module or interpreter, or a host that cannot be reached.
    Missing,
    /// A compiler error without a failed make target. Scripts ignore many of these.
    Compiler,
    /// `error: ...`, which farrier's templates print before they end the build.
    Template,
    /// `... *** TEXT.  Stop.`: what `$(error TEXT)` prints, a missing rule, or an error in a makefile.
    Stop,
    /// A patch that does not apply.
    Patch,
    /// An error of a configure script.
    Configure,
    /// An error of the linker.
    Linker,
    /// An error of modpost.
    Modpost,
    /// A compiler error that caused the failure of a make target.
    Target,
}

impl Rank {
    /// Whether the last message of this kind is the decisive one, because make or the script ends after it.
    fn prefers_last(self) -> bool {
        matches!(self, Self::Script | Self::Stop | Self::Template)
    }
}

/// Reads a log line by line and keeps its decisive error and its last lines, in bounded memory.
#[derive(Debug, Default)]
pub struct Diagnoser {
    best: Option<(Rank, Diagnosis)>,
    /// Errors of the compiler, with the stems of the files that may belong to the failed target.
    compiler_errors: Vec<(Vec<String>, Diagnosis)>,
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
            self.examine(&line);
        }
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }

    fn examine(&mut self, line: &str) {
        self.hint = hints::hint_for(line).or(self.hint.take());
        if let Some(file) = included_from(line) {
            if self.included.len() == MAX_INCLUDING_FILES {
                self.included.pop_front();
            }
            self.included.extend(stem(file));
        }
        if line.starts_with("make") && line.ends_with("(ignored)") {
            self.best.take_if(|(rank, _)| *rank <= Rank::Compiler);
            self.compiler_errors.clear();
        }
        if let Some((target, make_error)) = make_stopped(line) {
            self.offer_failed_target(target, make_error);
        } else if let Some((rank, error)) = parse_line(line) {
            if rank == Rank::Compiler {
                self.keep_compiler_error(&error);
            }
            self.offer(rank, error);
        }
    }

    /// Offers the compiler error that caused the failure of a make target, or else make's own message.
    fn offer_failed_target(&mut self, target: &str, mut make_error: Diagnosis) {
        let cause = stem(target)
            .and_then(|stem| self.compiler_errors.iter().find(|(stems, _)| stems.contains(&stem)))
            .map(|(_, cause)| cause.clone());
        if let Some(cause) = cause {
            self.offer(Rank::Target, cause);
            return;
        }
        if let Some(previous) = self.tail.back().filter(|previous| is_command_output(previous)) {
            make_error.message = format!("{}, after: {}", make_error.message, previous.trim());
        }
        self.offer(Rank::MakeStopped, make_error);
    }

    fn keep_compiler_error(&mut self, error: &Diagnosis) {
        if self.compiler_errors.len() < MAX_COMPILER_ERRORS {
            let mut stems: Vec<String> = error.file.as_deref().and_then(stem).into_iter().collect();
            stems.extend(self.included.iter().cloned());
            self.compiler_errors.push((stems, error.clone()));
        }
    }

    /// Keeps an error if it is closer to the cause than the best error so far.
    fn offer(&mut self, rank: Rank, error: Diagnosis) {
        let is_better = |best: Rank| match rank {
            // If the compiler runs after a `Stop.` message, make's failure was ignored.
            Rank::Compiler if best == Rank::Stop => true,
            _ => rank > best || rank == best && rank.prefers_last(),
        };
        if self.best.as_ref().is_none_or(|(best, _)| is_better(*best)) {
            self.best = Some((rank, error));
        }
    }

    /// Returns the error of the kind closest to the cause.
    pub fn diagnosis(&self) -> Option<&Diagnosis> {
        self.best.as_ref().map(|(_, diagnosis)| diagnosis)
    }

    /// Returns the advice for the last line that a hint applies to.
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
    let sources = line.trim_start().strip_prefix("In file included ").unwrap_or(line).trim_start();
    sources.strip_prefix("from ")?.split(':').next()
}

/// Returns a file's name without directory and extension.
fn stem(path: &str) -> Option<String> {
    Some(Path::new(path).file_stem()?.to_str()?.to_owned())
}

/// Whether the line may be output of a failed command, as opposed to output of make.
fn is_command_output(line: &str) -> bool {
    let word = line.split([':', '[']).next().unwrap_or_default();
    !line.trim().is_empty() && !line.starts_with(' ') && !word.starts_with("make")
}

/// Whether the engine quotes the Dockerfile in this line. Such a line is no error, even if the quoted step contains the
/// word `error`.
fn is_engine_echo(line: &str) -> bool {
    // Podman prefixes the stage: `[1/3] STEP 2/3: RUN make`.
    let step = match line.strip_prefix('[').and_then(|prefixed| prefixed.split_once("] ")) {
        Some((stage, step)) if stage.bytes().all(|byte| byte.is_ascii_digit() || byte == b'/') => step,
        _ => line,
    };
    let number = step.strip_prefix("Step ").or_else(|| step.strip_prefix("STEP "));
    number.is_some_and(|number| number.starts_with(|c: char| c.is_ascii_digit()))
        || line.starts_with("The command '")
        || line.starts_with("Error: building at STEP ")
}

/// Reads a line that is not make's report of a failed target.
fn parse_line(line: &str) -> Option<(Rank, Diagnosis)> {
    if line.starts_with("configure: error: ") {
        return Some((Rank::Configure, message_only(line)));
    }
    parse_modpost(line)
        .map(|error| (Rank::Modpost, error))
        .or_else(|| parse_linker(line).map(|error| (Rank::Linker, error)))
        .or_else(|| parse_compiler(line))
        .or_else(|| parse_stop(line).map(|error| (Rank::Stop, error)))
        .or_else(|| parse_patch(line).map(|error| (Rank::Patch, error)))
        .or_else(|| parse_missing(line).map(|error| (Rank::Missing, error)))
        .or_else(|| line.strip_prefix("error: ").map(parse_template))
        .or_else(|| parse_script(line).map(|error| (Rank::Script, error)))
}

fn message_only(message: &str) -> Diagnosis {
    Diagnosis { file: None, line: None, column: None, message: message.trim().to_owned() }
}

fn parse_template(message: &str) -> (Rank, Diagnosis) {
    let is_consequence = message.ends_with(" is not there") || message.contains(" failed with exit code ");
    (if is_consequence { Rank::Consequence } else { Rank::Template }, message_only(message))
}

/// Parses `file:line:column: error: message` of gcc and clang. The column is optional, `error` can be `fatal error` or the
/// assembler's `Error`, and `cc1: error: message` has no location.
fn parse_compiler(line: &str) -> Option<(Rank, Diagnosis)> {
    let (location, message) = [": fatal error: ", ": error: ", ": Error: "]
        .iter()
        .filter_map(|mark| line.split_once(mark))
        .min_by_key(|(location, _)| location.len())?;
    let location = location.trim_start();
    let mut fields = location.rsplitn(3, ':');
    let numbers = [fields.next(), fields.next()].map(|field| field?.parse::<u32>().ok());
    let (file, number, column) = match numbers {
        [Some(column), Some(number)] => (fields.next()?, Some(number), Some(column)),
        [Some(number), None] => (location.rsplit_once(':')?.0, Some(number), None),
        [None, _] if is_compiler_name(location) => (location, None, None),
        [None, _] => return None,
    };
    let lowercase = file.to_ascii_lowercase();
    let is_probe = number.is_some()
        && ["conftest", "<stdin>", "/tmp/", "<command-line>"].iter().any(|word| lowercase.contains(word));
    // The assembler reports errors in a temporary file below /tmp, so its errors are no probes.
    let rank = if is_probe && !line.contains(": Error: ") { Rank::Probe } else { Rank::Compiler };
    let message = message.trim_end().to_owned();
    (!file.is_empty())
        .then(|| (rank, Diagnosis { file: Some(file.to_owned()), line: number, column, message }))
}

/// Whether this is a compiler's program name, as in `aarch64-linux-gnu-gcc-12: error: ...`.
fn is_compiler_name(name: &str) -> bool {
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
fn parse_modpost(line: &str) -> Option<Diagnosis> {
    let line = line.trim_start();
    let message = line.strip_prefix("ERROR: ").or_else(|| line.strip_prefix("FATAL: "))?;
    let is_modpost =
        message.starts_with("modpost: ") || (message.starts_with('"') && message.contains("undefined!"));
    let message = message.strip_prefix("modpost: ").unwrap_or(message);
    is_modpost.then(|| match message.split_once('[').and_then(|(_, tail)| tail.split_once(']')) {
        Some((module, _)) => Diagnosis { file: Some(module.to_owned()), ..message_only(message) },
        None => message_only(message),
    })
}

/// Recognizes errors of GNU ld and lld.
fn parse_linker(line: &str) -> Option<Diagnosis> {
    let bad_symbol = line.contains(": undefined reference to ") || line.contains(": multiple definition of ");
    let tool = line.split(": ").next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    let is_linker =
        tool == "ld" || tool.starts_with("ld.") || tool.ends_with("-ld") || tool.ends_with("-ld.bfd");
    let phrases = ["cannot find ", "error: ", "unrecognized option", "final link failed"];
    let is_link_failure = is_linker && phrases.iter().any(|phrase| line.contains(phrase));
    (bad_symbol || is_link_failure).then(|| message_only(line))
}

/// Parses `FILE:LINE: *** TEXT.  Stop.` and `make: *** TEXT.  Stop.`
fn parse_stop(line: &str) -> Option<Diagnosis> {
    let (location, message) = line.trim_end().strip_suffix("Stop.")?.split_once("*** ")?;
    let error = message_only(message.trim_end().strip_suffix('.').unwrap_or(message));
    let location = location.trim().trim_end_matches(':').rsplit_once(':');
    match location.and_then(|(file, line)| Some((file, line.parse().ok()?))) {
        Some((file, line)) => Some(Diagnosis { file: Some(file.to_owned()), line: Some(line), ..error }),
        None => Some(error),
    }
}

/// Recognizes errors of patch.
fn parse_patch(line: &str) -> Option<Diagnosis> {
    let is_failed_hunk =
        line.contains(" hunk") && (line.contains(" FAILED -- saving rejects") || line.ends_with(" ignored"));
    let prefixes =
        ["can't find file to patch", "Reversed (or previously applied) patch detected", "patch: **** "];
    (is_failed_hunk || prefixes.iter().any(|prefix| line.starts_with(prefix))).then(|| message_only(line))
}

/// Recognizes missing commands, files, interpreters and hosts.
fn parse_missing(line: &str) -> Option<Diagnosis> {
    let line = line.trim();
    let is_from_sh = line.ends_with(": not found")
        && (line.starts_with("/bin/")
            || line.starts_with("sh: ")
            || line.contains(": line ")
            || is_numbered(line));
    let is_from_bash = [": command not found", ": Permission denied"].iter().any(|end| line.ends_with(end))
        && !line.starts_with("find: ");
    let is_from_make = line.starts_with("make") && line.ends_with(": No such file or directory");
    let phrases = [
        "bad interpreter",
        "ModuleNotFoundError: ",
        "Can't locate ",
        "ERROR: Kernel configuration is invalid",
    ];
    (is_from_sh
        || is_from_bash
        || is_from_make
        || phrases.iter().any(|phrase| line.contains(phrase))
        || hints::says_unreachable(line))
    .then(|| message_only(line))
}

/// Whether the line has dash's form `SCRIPT: 3: MESSAGE`.
fn is_numbered(line: &str) -> bool {
    let number = line.split(": ").nth(1).unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

/// Recognizes error messages of scripts.
fn parse_script(line: &str) -> Option<Diagnosis> {
    let line = line.trim_start_matches(['*', '!', ' ']);
    let word = line.split([':', '!', ' ']).next().unwrap_or_default();
    ["error", "fatal"].iter().any(|known| word.eq_ignore_ascii_case(known)).then(|| message_only(line))
}

/// Parses `make[2]: *** [Makefile:1903: modules] Error 2`, except for errors that make ignores. Also returns the target.
fn make_stopped(line: &str) -> Option<(&str, Diagnosis)> {
    let (tool, message) = line.trim_start().split_once(": *** ")?;
    let target = message.strip_prefix('[')?.split_once(']')?.0;
    let target = target.rsplit(": ").next().unwrap_or(target);
    (tool.starts_with("make") && !message.ends_with("(ignored)")).then(|| (target, message_only(message)))
}

#[cfg(test)]
#[path = "diagnosis_tests.rs"]
mod tests;
