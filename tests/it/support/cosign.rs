//! `cosign` from Debian's suites, fetched by ci/lib.sh.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use super::kept;

/// A version of `cosign`.
pub struct Version {
    /// Debian suite that contains the version.
    suite: &'static str,
    /// Options that prevent requests to public services when signing.
    alone: &'static [&'static str],
}

/// Version 2.x, which stores signatures and attestations under tags.
pub const TWO: Version = Version { suite: "trixie", alone: &["--tlog-upload=false", "--yes"] };
/// Version 3.x, which stores bundles as referrers of the image.
pub const THREE: Version = Version { suite: "sid", alone: &["--signing-config", "alone.json", "--yes"] };

/// A signing configuration without a transparency log or a timestamp authority.
const ALONE: &str = r#"{"mediaType": "application/vnd.dev.sigstore.signingconfig.v0.2+json"}"#;

/// A version of `cosign` with its home directory.
pub struct Cosign {
    program: PathBuf,
    home: PathBuf,
    alone: &'static [&'static str],
}

impl Cosign {
    pub fn of(version: &Version, home: &Path) -> Self {
        fs::write(home.join("alone.json"), ALONE).unwrap();
        Self { program: program(version.suite), home: home.to_owned(), alone: version.alone }
    }

    /// Runs `cosign` without this machine's logs, keys or home directory.
    pub fn run(&self, args: &[&str]) -> Output {
        let verifies = args[0].starts_with("verify");
        let mut command = Command::new(&self.program);
        command.args(args).current_dir(&self.home).env("COSIGN_PASSWORD", "");
        if !["generate-key-pair", "verify-blob"].contains(&args[0]) {
            command.arg("--allow-insecure-registry");
        }
        command.args(verifies.then_some("--insecure-ignore-tlog"));
        command
            .env("HOME", &self.home)
            .env("DOCKER_CONFIG", &self.home)
            .output()
            .unwrap_or_else(|error| panic!("run {}: {error}", self.program.display()))
    }

    /// Runs `cosign`, asserts success, and returns both output streams.
    #[track_caller]
    pub fn accepts(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let text =
            format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "cosign {args:?}: {text}");
        text
    }

    /// Signs with `cosign` without using any public service.
    #[track_caller]
    pub fn signs(&self, args: &[&str]) {
        self.accepts(&[args, self.alone].concat());
    }
}

fn program(suite: &str) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let state = kept("cosign");
    // Tests run concurrently, each in a separate process; the first one fetches `cosign`.
    let lock = fs::File::create(state.join("lock")).unwrap();
    lock.lock().unwrap();
    let script = "set -eu; state=$1; . \"$2/ci/lib.sh\"; debian_cosign \"$3\"";
    let output = Command::new("bash").args(["-c", script, "bash"]).arg(&state).arg(root).arg(suite).output();
    let output = output.expect("run bash");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    PathBuf::from(String::from_utf8_lossy(&output.stdout).trim())
}
