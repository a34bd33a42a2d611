//! `cosign`: from the PATH, else Debian 13's, as ci/lib.sh fetches it.

use std::{
    path::{Path, PathBuf},
    process::{Command, Output},
};

/// Runs `cosign` without looking for logs, keys or homes of this machine.
pub fn cosign(home: &Path, args: &[&str]) -> Output {
    let program = program();
    Command::new(&program)
        .args(args)
        .env("HOME", home)
        .env("DOCKER_CONFIG", home)
        .output()
        .unwrap_or_else(|error| panic!("run {}: {error}", program.display()))
}

/// The same; it must succeed. Gives both streams.
#[track_caller]
pub fn accepts(home: &Path, args: &[&str]) -> String {
    let output = cosign(home, args);
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "cosign {args:?}: {text}");
    text
}

fn program() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let state = Path::new(env!("CARGO_TARGET_TMPDIR")).join("cosign");
    std::fs::create_dir_all(&state).unwrap();
    // Tests run at once, each in its own process: the first fetches it.
    let lock = std::fs::File::create(state.join("lock")).unwrap();
    lock.lock().unwrap();
    let script = "set -eu; state=$1; . \"$2/ci/lib.sh\"; need_cosign; command -v cosign";
    let output = Command::new("bash").args(["-c", script, "bash"]).arg(&state).arg(root).output();
    let output = output.expect("run bash");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}
