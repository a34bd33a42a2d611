//! Packs the programs of the suite, and starts players on this machine.

use std::{
    env,
    fs::{self, File},
    io::Read as _,
    os::unix::fs::{PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use tempfile::TempDir;

use crate::{kit::Kit, player::Barriers, support::packages::run, table::Row};

/// Last line of a player that ran to completion.
pub const PLAYED: &str = "PLAYED";
/// ID of an ordinary user who owns no files.
pub const USER: u32 = 48_123;

/// User who runs the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum User {
    Root,
    Ordinary,
}

impl User {
    pub fn name(self) -> &'static str {
        match self {
            Self::Root => "root",
            Self::Ordinary => "an ordinary user",
        }
    }

    /// Command prefix that switches to the user, and the owner of the caller's directories. To become root, tests of another
    /// user need `sudo`.
    fn becomes(self, kit: &Kit) -> (Vec<String>, Option<u32>) {
        match (self, rustix::process::geteuid().is_root()) {
            (Self::Root, true) | (Self::Ordinary, false) => (Vec::new(), None),
            (Self::Root, false) => (["sudo", "-n", "--preserve-env"].map(str::to_owned).to_vec(), None),
            (Self::Ordinary, true) => {
                (vec![kit.attack().display().to_string(), "user".to_owned(), USER.to_string()], Some(USER))
            }
        }
    }
}

/// Builds the files that a player needs, and puts them into a directory.
pub fn pack(directory: &Path) -> Kit {
    let kit = Kit::at(directory);
    fs::set_permissions(directory, fs::Permissions::from_mode(0o755)).unwrap();
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/escape/attack.c");
    // Compiled here, because neither the tree of a sandbox nor a virtual machine has a compiler.
    run(Command::new("gcc-12")
        .args(["-static", "-O1", "-Wall", "-Wextra", "-o"])
        .arg(kit.attack())
        .arg(source));
    let busybox = ["/bin/busybox", "/usr/bin/busybox"].into_iter().find(|path| Path::new(path).exists());
    fs::copy(busybox.expect("install busybox-static"), kit.busybox()).unwrap();
    fs::copy(runner("entrypoint", &[]), kit.runner()).unwrap();
    fs::copy(runner("entrypoint-breakable", &["--features", "breakable"]), kit.breakable()).unwrap();
    link_or_copy(&env::current_exe().unwrap(), &kit.player());
    let mut random = [0; 16];
    File::open("/dev/urandom").unwrap().read_exact(&mut random).unwrap();
    fs::write(kit.secret(), format!("CANARY-{:032x}", u128::from_be_bytes(random))).unwrap();
    kit
}

fn link_or_copy(from: &Path, to: &Path) {
    if fs::hard_link(from, to).is_err() {
        fs::copy(from, to).unwrap();
    }
}

/// Builds the static runner once, with the cargo configuration next to its sources, in a separate target directory.
fn runner(directory: &str, features: &[&str]) -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = root.join("target").join(directory);
    fs::create_dir_all(&target).unwrap();
    let lock = File::create(target.join("tests.lock")).unwrap();
    lock.lock().unwrap();
    run(Command::new(env!("CARGO"))
        .args(["build", "--locked", "--quiet", "--profile", "entrypoint", "--target-dir"])
        .arg(&target)
        .args(features)
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .current_dir(root.join("crates/node/runner")));
    let host = format!("{}-unknown-linux-gnu", env::consts::ARCH);
    target.join(host).join("entrypoint/farrier-runner")
}

/// Plays the attacks as a user, with the given barriers in force.
pub fn play(user: User, barriers: Barriers) -> Vec<Row> {
    let directory = tempfile::Builder::new().prefix("escape-kit-").tempdir().unwrap();
    let kit = pack(directory.path());
    let (before, owner) = user.becomes(&kit);
    let place = place(&directory, owner);
    let words = [before, words(&kit)].concat();
    let output = Command::new(&words[0])
        .args(&words[1..])
        .env_clear()
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .env("HOME", place.join("home"))
        .env("TMPDIR", &place)
        .env("ESCAPE_KIT", directory.path())
        .env("ESCAPE_BARRIERS", barriers.name())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (said, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(
        output.status.success() && said.lines().any(|line| line == PLAYED),
        "{words:?}: {}\n{said}{complaints}",
        output.status
    );
    eprint!("{complaints}");
    said.lines().filter_map(Row::printed).collect()
}

/// Command of a player whose caller carelessly leaks secrets.
pub fn words(kit: &Kit) -> Vec<String> {
    let [attack, secret, player] =
        [kit.attack(), kit.secret(), kit.player()].map(|path| path.display().to_string());
    let test = ["--exact", "player", "--ignored", "--nocapture"].map(str::to_owned);
    [[attack, "caller".to_owned(), secret, player], test].concat()
}

/// Creates a directory with a home for the user's temporary files.
fn place(directory: &TempDir, owner: Option<u32>) -> PathBuf {
    let place = directory.path().join("place");
    fs::create_dir_all(place.join("home")).unwrap();
    for path in [&place, &place.join("home")] {
        chown(path, owner, owner).unwrap();
    }
    place
}
