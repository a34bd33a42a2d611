//! What a person at a terminal sees, in a real pseudo-terminal.

use std::process::Command;

use crate::support::{kube_api::objects::node, live::Live};

const GREEN: &str = "\u{1b}[32m";

/// What `farrier` writes to a terminal of so many columns.
fn on_terminal(live: &Live, columns: u16, words: &str) -> String {
    let farrier = live.command(&[]);
    let program = farrier.get_program().display();
    let command = format!("stty cols {columns}; exec {program} {words} 2>/dev/null");
    let mut script = Command::new("script");
    script.args(["--quiet", "--return", "--command", &command, "/dev/null"]);
    for (name, value) in farrier.get_envs() {
        match value {
            Some(value) => script.env(name, value),
            None => script.env_remove(name),
        };
    }
    let output = script.env_remove("NO_COLOR").env_remove("CLICOLOR_FORCE").output();
    let output = output.expect("run script (Debian package bsdutils)");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().replace("\r\n", "\n")
}

#[test]
fn tables_fit_and_words_have_colours() {
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

    let wide = on_terminal(&live, 60, "status -o wide");
    assert!(wide.contains(digits) && wide.contains(GREEN), "{wide}");
    // Programs get what they always got.
    let piped = live.command(&["status"]).output().unwrap().stdout;
    let piped = String::from_utf8(piped).unwrap();
    assert!(piped.contains(digits) && !piped.contains('\u{1b}'), "{piped}");
}
