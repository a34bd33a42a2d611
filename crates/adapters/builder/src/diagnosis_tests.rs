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
    let fatal = parse_line("/b/main.c:12:10: fatal error: linux/foo.h: No such file or directory");
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
    assert_eq!(diagnose("ERROR: something of a script").as_deref(), Some("ERROR: something of a script"));
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
    let absent = "error: dkms.conf names x as built, and ./x.ko is not there";
    let stopped = "make: *** [Makefile:3: all] Error 2";
    assert_eq!(diagnose(&format!("{stopped}\n{absent}")).as_deref(), absent.strip_prefix("error: "));
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

/// Logs of failed builds, in which `>>> ` marks the line that names the cause. The lines were marked before the diagnosis
/// first read the logs.
#[test]
fn the_cause_is_named_in_real_logs() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/src/diagnosis/logs");
    let mut logs: Vec<_> = fs_err::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    logs.sort();
    let mut missed = Vec::new();
    for path in &logs {
        let text = fs_err::read_to_string(path).unwrap();
        let marked = text.lines().find_map(|line| line.strip_prefix(">>> ")).unwrap();
        let mut diagnoser = Diagnoser::default();
        text.lines().for_each(|line| diagnoser.feed(line.strip_prefix(">>> ").unwrap_or(line)));
        let message = diagnoser.diagnosis().map(|found| found.message.clone()).unwrap_or_default();
        if message.is_empty() || !(marked.contains(&message) || message.contains(marked.trim())) {
            missed.push(format!("{}: {message:?} instead of {marked:?}", path.display()));
        }
    }
    assert!(logs.len() >= 60, "{}", logs.len());
    assert!(missed.len() * 20 <= logs.len(), "{}", missed.join("\n"));
}

#[test]
fn ignored_errors_do_not_count() {
    let error = "a.c:1:2: error: ignored";
    for (log, cause) in [
        (
            "make: [Makefile:2: all] Error 1 (ignored)\nb.c:1:2: error: real\nmake: *** [Makefile:3: all] Error 1",
            "b.c:1:2: real",
        ),
        ("Makefile:7: *** needs the bus.  Stop.", "Makefile:7: needs the bus"),
        (
            "make[1]: *** [Makefile:1: b.o] Error 1\nERROR: modpost: \"x\" [b.ko] undefined!",
            "b.ko: \"x\" [b.ko] undefined!",
        ),
        ("make: *** [Makefile:3: all] Error 1", "a.c:1:2: ignored"),
    ] {
        assert_eq!(diagnose(&format!("{error}\n{log}")).as_deref(), Some(cause));
    }
    let included = "In file included from /build/a.c:3:\n/build/x.h:4:1: error: real\nmake: *** [Makefile:9: a.o] Error 1";
    assert_eq!(
        diagnose(&format!("z.c:1:1: error: probe\n{included}")).as_deref(),
        Some("/build/x.h:4:1: real")
    );
    let said = "cp: cannot stat 'gone.h'\nmake: *** [Makefile:2: all] Error 1";
    assert_eq!(diagnose(said).as_deref(), Some("[Makefile:2: all] Error 1, after: cp: cannot stat 'gone.h'"));
}

#[test]
fn advice_names_what_the_definition_can_change() {
    let hint = |line: &str, target: &str| {
        let mut diagnoser = Diagnoser::default();
        diagnoser.feed(line);
        diagnoser.hint().cloned().and_then(|hint| hint.text(target))
    };
    for (line, words) in [
        ("/bin/sh: 1: wget: not found", "no network"),
        ("curl: (6) Could not resolve host: acme.invalid", "no network"),
        ("bash: line 1: bc: command not found", "`buildPackages`"),
        ("make: *** No rule to make target '/build/Makefile'.  Stop.", "`subdir`"),
        ("warning: PRE_BUILD is left out: configure is not executable", "make it executable"),
        (
            "make: *** /lib/modules/6.5.0-1/build: No such file or directory.  Stop.",
            "use kernel 6.5.0-1 instead of 6.1.0-47",
        ),
    ] {
        let advice = hint(line, "6.1.0-47").unwrap_or_default();
        assert!(advice.contains(words), "{line}: {advice}");
    }
    assert_eq!(
        hint("make: *** /lib/modules/6.1.0-47/build: No such file or directory.  Stop.", "6.1.0-47"),
        None
    );
    let host = fs_err::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let line = format!("make: *** /lib/modules/{}/build: No such file or directory.  Stop.", host.trim());
    assert!(hint(&line, "6.1.0-47").unwrap().contains("of the build host"));
}

proptest! {
    #[test]
    fn any_text_is_read(line in ".*") {
        let _ = parse_line(&line);
    }
}
