//! Output on a real pseudo-terminal.

use std::process::Command;

use crate::support::{kernels, kube_api::objects::node, live::Live, site::Site};

const GREEN: &str = "\u{1b}[32m";

/// Returns the output of `farrier` on a terminal with this number of columns.
fn on_terminal(live: &Live, columns: u16, words: &str) -> String {
    on_terminal_of(live, &format!("cols {columns}"), "", words)
}

/// Returns the output on a terminal whose size is given in stty's format, with further environment variables.
fn on_terminal_of(live: &Live, size: &str, variables: &str, words: &str) -> String {
    run_on_terminal(
        &live.command(&[]),
        &format!("stty {size}; exec env {variables}"),
        &format!("{words} 2>/dev/null"),
    )
}

fn run_on_terminal(farrier: &Command, before: &str, words: &str) -> String {
    let command = format!("{before} {} {words}", farrier.get_program().display());
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &command, "/dev/null"]);
    for (name, value) in farrier.get_envs() {
        match value {
            Some(value) => script.env(name, value),
            None => script.env_remove(name),
        };
    }
    for name in ["NO_COLOR", "CLICOLOR_FORCE", "LC_ALL", "LC_CTYPE", "LANG", "TERM"] {
        script.env_remove(name);
    }
    let output = script.output();
    let output = output.expect("run script (Debian package bsdutils)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().replace("\r\n", "\n")
}

#[test]
fn tables_fit_and_words_have_colors() {
    let live = Live::new([node("n0", "6.1.0-901-amd64")], "image");
    let image = live.publish().remove("6.1.0-901-amd64").unwrap();
    let digits = image.split_once("sha256:").unwrap().1;

    let fitted = on_terminal(&live, 150, "status");
    assert!(fitted.contains(&format!("@sha256:{}\n", &digits[..12])), "{fitted}");
    assert!(
        fitted.contains(&format!("{GREEN}published")) && fitted.contains(&format!("{GREEN}loads")),
        "{fitted}"
    );
    let narrow = on_terminal(&live, 60, "status --color never");
    assert!(narrow.lines().all(|line| line.len() <= 60) && !narrow.contains('\u{1b}'), "{narrow}");

    // A symbol repeats the meaning of each color if the terminal supports the character.
    let without = on_terminal_of(&live, "cols 60", "NO_COLOR=1 LC_ALL=C.UTF-8", "status");
    assert!(!without.contains('\u{1b}') && without.contains("✓ loads"), "{without}");
    assert!(without.lines().all(|line| line.chars().count() <= 60), "{without}");
    let asked = on_terminal_of(&live, "cols 150", "NO_COLOR=1 LANG=en_GB.utf8", "status --color always");
    assert!(asked.contains(&format!("{GREEN}✓ published")), "{asked}");
    let other = on_terminal_of(&live, "cols 150", "LC_ALL=C LANG=C.UTF-8", "status");
    assert_eq!(other, fitted);

    let dumb = on_terminal_of(&live, "cols 150", "TERM=dumb", "status");
    assert!(!dumb.contains('\u{1b}') && dumb.contains("published"), "{dumb}");

    let wide = on_terminal(&live, 60, "status -o wide");
    assert!(wide.contains(digits) && wide.contains(GREEN), "{wide}");
    // Output to a pipe is unchanged.
    let piped = live.command(&["status"]).env("LC_ALL", "C.UTF-8").output().unwrap().stdout;
    let piped = String::from_utf8(piped).unwrap();
    assert!(piped.contains(digits) && !piped.contains(['\u{1b}', '✓']), "{piped}");

    // The tag of an image that is not published.
    live.api.load([node("n1", "6.1.0-902-amd64")]);
    let missing = on_terminal_of(&live, "cols 80", "NO_COLOR=1 LC_ALL=C.UTF-8", "status");
    assert!(missing.lines().all(|line| line.chars().count() <= 80), "{missing}");
    assert!(missing.contains("  ○ missing  ") && missing.contains("  ✓ published  "), "{missing}");
    assert!(missing.contains(&format!("  @sha256:{}\n", &digits[..12])), "{missing}");
    assert!(
        missing.lines().any(|line| line.contains(" driver:1.0-6.1.0-902-") && line.ends_with("...")),
        "{missing}"
    );
}

#[test]
fn log_lines_have_colors_where_results_have_them() {
    let live = Live::new([], "image");
    let log_line = |variables: &str, words: &str| {
        let before = format!("exec env -u FARRIER_DEFINITIONS {variables}");
        let shown = run_on_terminal(&live.command(&[]), &before, words);
        shown.lines().find(|line| line.contains("no --definitions")).unwrap().to_owned()
    };
    assert!(log_line("", "plan").contains('\u{1b}'));
    for (variables, words) in [("", "plan --color never"), ("NO_COLOR=1", "plan"), ("TERM=dumb", "plan")] {
        assert!(!log_line(variables, words).contains('\u{1b}'), "{variables} {words}");
    }
}

#[test]
fn a_log_has_a_line_for_each_command() {
    let live = Live::new([], "image");
    let logs = live.site.cache().join("logs");
    std::fs::create_dir_all(&logs).unwrap();
    let step = format!("Step 1/1 : RUN set -eu;{}\n", " make modules;".repeat(20));
    let output = format!("  CC [M]  {}.o\n", "x".repeat(90));
    let log = logs.join("driver-6.1.0-901-amd64-0123456789ab-debian-12-amd64.log");
    std::fs::write(log, format!("{step}{output}")).unwrap();
    let shown = on_terminal(&live, 60, "logs driver");
    let (first, rest) = shown.split_once('\n').unwrap();
    assert!(first.starts_with("Step 1/1 : RUN set -eu; make modules;") && first.ends_with(" ..."), "{shown}");
    assert!(first.len() <= 60 && rest == output, "{shown}");
    assert_eq!(on_terminal(&live, 60, "logs driver -o wide"), format!("{step}{output}"));
}

#[test]
fn builds_side_by_side_have_a_live_line_each_with_the_usual_time_and_end_in_one() {
    let (kernels, site) = (kernels::newest(), Site::new());
    site.canary(&kernels.newer);
    let hello = std::fs::read_to_string(site.definitions().join("images/hello.yaml")).unwrap();
    let other =
        hello.replace("name: hello}", "name: greeting}").split("  rollout:").next().unwrap().to_owned();
    site.define("images/greeting.yaml", &other);
    site.build("hello", &kernels.older, &["--push"]).exits(0);
    // The registry stores the build's duration, so another machine knows it.
    let elsewhere = site.path("another-cache");
    let status =
        site.command(&["status", "-o", "json"]).env("FARRIER_CACHE_DIR", elsewhere).output().unwrap();
    let rows: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    let usual: Vec<_> = rows.as_array().unwrap().iter().map(|row| &row["time"]["usualSeconds"]).collect();
    assert!(usual.iter().filter(|usual| usual.is_u64()).count() == 1 && usual.len() == 2, "{rows}");

    let shown =
        run_on_terminal(&site.command::<&str>(&[]), "stty cols 200; exec env TERM=xterm", "run --once");
    for image in ["hello", "greeting"] {
        let line = format!("{image} for {}", kernels.newer);
        let ends = shown.split(&line).filter(|rest| rest.starts_with(": published sha256:")).count();
        assert!(shown.contains(&line) && ends >= 1, "{image}: {shown}");
    }
    assert!(shown.contains("s of usually "), "{shown}");
    let built: Vec<&str> = shown.split("built     ").skip(1).collect();
    let has_short_digest =
        |line: &&str| line.split_once("sha256:").is_some_and(|(_, rest)| rest.find(' ') == Some(12));
    assert!(!built.is_empty() && built.iter().all(has_short_digest), "{shown}");
}
