//! Finds the first error in a build's output.

use std::{collections::VecDeque, fmt};

/// Number of lines kept from the end of the log.
const TAIL_LINES: usize = 20;
/// Maximum number of characters kept of a line.
const LINE_CHARS: usize = 1000;

/// The first error of a failed build.
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

/// Kinds of messages, ordered by how close they are to the cause. make reports an error after the compiler's own message. A
/// missing command causes every later error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    /// `make: *** [...] Error 2`.
    MakeStopped,
    /// `error: ...`, which farrier's templates print before they end the build.
    Template,
    /// `No rule to make target`, a missing command or a missing interpreter.
    Missing,
    /// An error of a configure script.
    Configure,
    /// An error of the linker.
    Linker,
    /// An error of modpost.
    Modpost,
    /// An error of the compiler.
    Compiler,
}

/// Reads a log line by line and keeps its first error and its last lines, in bounded memory.
#[derive(Debug, Default)]
pub struct Diagnoser {
    first: Option<(Rank, Diagnosis)>,
    tail: VecDeque<String>,
}

impl Diagnoser {
    /// Processes the next line.
    pub fn feed(&mut self, line: &str) {
        let line: String = line.chars().take(LINE_CHARS).collect();
        if !is_engine_echo(&line)
            && let Some((rank, diagnosis)) = read(&line)
            && self.first.as_ref().is_none_or(|(known, _)| rank > *known)
        {
            self.first = Some((rank, diagnosis));
        }
        if self.tail.len() == TAIL_LINES {
            self.tail.pop_front();
        }
        self.tail.push_back(line);
    }

    /// Returns the first error of the kind closest to the cause.
    pub fn diagnosis(&self) -> Option<&Diagnosis> {
        self.first.as_ref().map(|(_, diagnosis)| diagnosis)
    }

    /// Returns the last 20 lines.
    pub fn tail(&self) -> impl Iterator<Item = &str> {
        self.tail.iter().map(String::as_str)
    }
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

fn read(line: &str) -> Option<(Rank, Diagnosis)> {
    compiler(line)
        .map(|found| (Rank::Compiler, found))
        .or_else(|| modpost(line).map(|found| (Rank::Modpost, found)))
        .or_else(|| linker(line).map(|found| (Rank::Linker, found)))
        .or_else(|| line.starts_with("configure: error: ").then(|| (Rank::Configure, bare(line))))
        .or_else(|| missing(line).map(|found| (Rank::Missing, found)))
        .or_else(|| line.strip_prefix("error: ").map(|message| (Rank::Template, bare(message))))
        .or_else(|| make_stopped(line).map(|found| (Rank::MakeStopped, found)))
}

fn bare(message: &str) -> Diagnosis {
    Diagnosis { file: None, line: None, column: None, message: message.trim().to_owned() }
}

/// Parses `file:line:column: error: message` of gcc and clang; the column is optional, and `fatal error` also counts.
fn compiler(line: &str) -> Option<Diagnosis> {
    let (place, message) = [": fatal error: ", ": error: "]
        .iter()
        .filter_map(|mark| line.split_once(mark))
        .min_by_key(|(place, _)| place.len())?;
    let (rest, last) = place.rsplit_once(':')?;
    let last: u32 = last.parse().ok()?;
    let (file, number, column) =
        match rest.rsplit_once(':').and_then(|(file, n)| Some((file, n.parse::<u32>().ok()?))) {
            Some((file, number)) => (file, number, Some(last)),
            None => (rest, last, None),
        };
    let file = file.trim_start();
    (!file.is_empty()).then(|| Diagnosis {
        file: Some(file.to_owned()),
        line: Some(number),
        column,
        message: message.trim_end().to_owned(),
    })
}

/// Parses `ERROR: modpost: "symbol" [module.ko] undefined!`; before Linux 5.10 the line lacks `modpost:`.
fn modpost(line: &str) -> Option<Diagnosis> {
    let message = line.trim_start().strip_prefix("ERROR: ")?;
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
    let undefined = line.contains(": undefined reference to ");
    let tool = line.split(": ").next().unwrap_or_default().rsplit('/').next().unwrap_or_default();
    let is_linker =
        tool == "ld" || tool.starts_with("ld.") || tool.ends_with("-ld") || tool.ends_with("-ld.bfd");
    let failed = ["cannot find ", "error: ", "unrecognized option", "final link failed"];
    let named = is_linker && failed.iter().any(|words| line.contains(words));
    (undefined || named).then(|| bare(line))
}

/// Recognizes missing commands, files, interpreters and make targets.
fn missing(line: &str) -> Option<Diagnosis> {
    let line = line.trim();
    let make = line.starts_with("make") && line.contains("*** No rule to make target");
    let shell = line.ends_with(": not found") && (line.starts_with("/bin/") || line.starts_with("sh: "));
    let bash = line.ends_with(": command not found");
    let exec = line.starts_with("make") && line.ends_with(": No such file or directory");
    let interpreter = line.contains("bad interpreter");
    (make || shell || bash || exec || interpreter)
        .then(|| bare(line.split_once("*** ").map_or(line, |(_, rest)| rest)))
}

/// Parses `make[2]: *** [Makefile:1903: modules] Error 2`, except for errors that make ignores.
fn make_stopped(line: &str) -> Option<Diagnosis> {
    let (tool, message) = line.trim_start().split_once(": *** ")?;
    (tool.starts_with("make") && !message.ends_with("(ignored)")).then(|| bare(message))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn diagnose(log: &str) -> Option<String> {
        let mut diagnoser = Diagnoser::default();
        log.lines().for_each(|line| diagnoser.feed(line));
        diagnoser.diagnosis().map(ToString::to_string)
    }

    #[test]
    fn gcc_in_a_gpu_build() {
        let log = "\
make[1]: Entering directory '/usr/src/linux-headers-6.1.0-56-amd64'
  CC [M]  /build/kernel-open/nvidia/nv-pci.o
/build/kernel-open/nvidia/nv-pci.c: In function 'nv_resize_pcie_bars':
/build/kernel-open/nvidia/nv-pci.c:177:9: error: too few arguments to function 'pci_resize_resource'
  177 |     r = pci_resize_resource(pci_dev, NV_GPU_BAR1, requested_size);
      |         ^~~~~~~~~~~~~~~~~~~
In file included from /build/kernel-open/common/inc/nv-pci.h:28,
/usr/src/linux-headers-6.1.0-56-common/include/linux/pci.h:1421:18: note: declared here
/build/kernel-open/nvidia/nv-pci.c:180:9: error: second
make[3]: *** [/usr/src/linux-headers-6.1.0-56-common/scripts/Makefile.build:250: nv-pci.o] Error 1
make[2]: *** [/usr/src/linux-headers-6.1.0-56-common/Makefile:2049: /build/kernel-open] Error 2
make: *** [Makefile:82: modules] Error 2";
        insta::assert_snapshot!(diagnose(log).unwrap_or_default(), @"/build/kernel-open/nvidia/nv-pci.c:177:9: too few arguments to function 'pci_resize_resource'");
    }

    #[test]
    fn fatal_error_and_column_free_forms() {
        let fatal = read("/b/main.c:12:10: fatal error: linux/foo.h: No such file or directory");
        let (rank, found) = fatal.expect("a fatal error");
        assert_eq!((rank, found.line, found.column), (Rank::Compiler, Some(12), Some(10)));
        assert_eq!(diagnose("a.c:3: error: x").as_deref(), Some("a.c:3: x"));
        assert_eq!(
            diagnose("include/linux/a.h:5:2: error: #error \"no: error: x\"").as_deref(),
            Some("include/linux/a.h:5:2: #error \"no: error: x\"")
        );
    }

    #[test]
    fn modpost_names_the_module() {
        let log = "ERROR: modpost: \"ib_register_client\" [/b/nv_peer_mem.ko] undefined!\nmake[1]: *** [Makefile.modpost:126: Module.symvers] Error 1";
        insta::assert_snapshot!(diagnose(log).unwrap_or_default(), @r#"/b/nv_peer_mem.ko: "ib_register_client" [/b/nv_peer_mem.ko] undefined!"#);
        assert!(diagnose("ERROR: \"old_form\" [/b/x.ko] undefined!").is_some());
        assert_eq!(diagnose("ERROR: something of a script"), None);
    }

    #[test]
    fn missing_things() {
        for line in [
            "make: *** No rule to make target 'modules'.  Stop.",
            "/bin/sh: 1: gcc-12: not found",
            "bash: line 1: bc: command not found",
            "make[1]: gcc-13: No such file or directory",
            "/usr/bin/ld: cannot find -lelf: No such file or directory",
            "nv.o: in function `f': nv.c:(.text+0x1): undefined reference to `g'",
        ] {
            assert!(diagnose(line).is_some(), "{line}");
        }
    }

    #[test]
    fn what_a_script_says_counts_as_far_as_it_knows() {
        let excluded = "error: dkms.conf excludes kernel 6.1.0-56-amd64: it is for kernels with CONFIG_I2C";
        assert_eq!(diagnose(excluded).as_deref(), excluded.strip_prefix("error: "));
        let (absent, stopped) = ("error: dkms.conf names x as built", "make: *** [Makefile:3: all] Error 2");
        assert_eq!(diagnose(&format!("{stopped}\n{absent}")).as_deref(), Some("dkms.conf names x as built"));
        assert_eq!(diagnose(&format!("a.c:1:2: error: real\n{absent}")).as_deref(), Some("a.c:1:2: real"));
        let configure = "checking for file... no\nconfigure: error: no kernel\n/bin/sh: 1: bc: not found";
        assert_eq!(diagnose(configure).as_deref(), Some("configure: error: no kernel"));
    }

    #[test]
    fn a_later_compiler_error_wins_over_makes_summary() {
        let log = "make[2]: *** [x] Error 1\na.c:1:2: error: real\nb.c:1:2: error: later";
        assert_eq!(diagnose(log).as_deref(), Some("a.c:1:2: real"));
    }

    #[test]
    fn harmless_lines_are_no_errors() {
        for line in [
            "a.c:1:2: warning: unused",
            "make[1]: [Makefile:3: clean] Error 1 (ignored)",
            "checking for error: handling... yes",
            "  CC [M]  drivers/error.o",
            "cp: cannot stat 'x': No such file or directory",
            "Step 3/3 : RUN echo 'a.c:1:2: error: bad'",
            "[1/3] STEP 2/2: RUN echo 'a.c:1:2: error: bad'",
            "The command '/bin/sh -c echo a.c:1:2: error: bad' returned a non-zero code: 1",
            "Error: building at STEP \"RUN echo 'a.c:1:2: error: bad'\": exit status 1",
        ] {
            assert_eq!(diagnose(line), None, "{line}");
        }
    }

    #[test]
    fn memory_is_bounded() {
        let mut diagnoser = Diagnoser::default();
        for number in 0..1000 {
            diagnoser.feed(&format!("{number} {}", "ü".repeat(5000)));
        }
        assert_eq!(diagnoser.tail().count(), TAIL_LINES);
        assert!(diagnoser.tail().all(|line| line.chars().count() <= LINE_CHARS));
        assert!(diagnoser.tail().last().is_some_and(|line| line.starts_with("999 ")));
    }

    proptest! {
        #[test]
        fn any_text_is_read(line in ".*") {
            let _ = read(&line);
        }
    }
}
