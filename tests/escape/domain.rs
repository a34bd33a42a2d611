//! Canaries, which are files with a secret, around a cache, and the detection of any access to them. Everything is
//! accessible to every user, so that only the sandbox protects the canaries from a step.

use std::{
    collections::BTreeMap,
    fs,
    net::TcpListener,
    os::{
        linux::net::SocketAddrExt as _,
        unix::{
            fs::{MetadataExt as _, PermissionsExt as _, symlink},
            net::{SocketAddr, UnixListener},
        },
    },
    path::{Path, PathBuf},
};

use farrier_local::cache::Cache;
use rustix::mount::{MountFlags, UnmountFlags};
use tempfile::TempDir;
use walkdir::WalkDir;

/// File name of each canary.
pub const CANARY: &str = "farrier-canary";
/// Directory next to the cache where another file system is mounted.
pub const MOUNTED: &str = "mounted";
/// Prefix of the names of files that attacks create.
const ESCAPED: &str = "farrier-escaped";
/// Script of a `RUN` with an interpreter, while it runs.
const SCRIPT: &str = ".farrier-script";

/// A cache surrounded by canaries: next to it, in the caller's home, on another mount, in a neighboring tree and in a
/// neighboring build.
pub struct Domain {
    directory: TempDir,
    pub cache: Cache,
    pub secret: String,
    pub abstract_name: String,
    pub port: u16,
    _listeners: (UnixListener, UnixListener, TcpListener),
}

/// Paths below the domain, and a description of each entry.
type Snapshot = BTreeMap<PathBuf, String>;

impl Domain {
    /// Creates the canaries with this content.
    pub fn new(secret: &str, program: &Path) -> Self {
        let directory = tempfile::Builder::new().prefix("escape-").tempdir().unwrap();
        let root = directory.path();
        let mount = root.join(MOUNTED);
        fs::create_dir(&mount).unwrap();
        if has_own_mounts() {
            rustix::mount::mount("canaries", &mount, "tmpfs", MountFlags::empty(), None).unwrap();
        }
        for place in
            ["", "home", MOUNTED, "cache", "cache/neighbor", "cache/work", "cache/work/neighbor/upper"]
        {
            let place = root.join(place);
            fs::create_dir_all(place.join("keys/empty")).unwrap();
            // An error message would contain its name.
            fs::create_dir(place.join("keys/farrier-canary-closed")).unwrap();
            for name in [CANARY, "keys/farrier-canary", "keys/truncated", "keys/removed", "keys/moved"] {
                fs::write(place.join(name), secret).unwrap();
            }
        }
        symlink(secret, root.join("link")).unwrap();
        fs::copy(program, root.join("program")).unwrap();
        let abstract_name = root.file_name().unwrap().to_string_lossy().into_owned();
        let address = SocketAddr::from_abstract_name(&abstract_name).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = tcp.local_addr().unwrap().port();
        let local = UnixListener::bind(root.join("socket")).unwrap();
        open_to_all(root);
        Self {
            cache: Cache::open(root.join("cache")).unwrap(),
            secret: secret.to_owned(),
            abstract_name,
            port,
            _listeners: (UnixListener::bind_addr(&address).unwrap(), local, tcp),
            directory,
        }
    }

    pub fn root(&self) -> &Path {
        self.directory.path()
    }

    /// Describes every entry except the directories of running builds.
    pub fn snapshot(&self) -> Snapshot {
        let work = self.root().join("cache/work");
        let of_a_build = |path: &Path| {
            path.parent() == Some(&work) && path.file_name().unwrap().to_string_lossy().starts_with("build-")
        };
        let entries = WalkDir::new(self.root()).into_iter().filter_entry(|entry| !of_a_build(entry.path()));
        // An ordinary user cannot look into the closed directories, only see that they exist.
        entries.flatten().map(|entry| describe(entry.path())).collect()
    }

    /// Returns the paths that differ from a snapshot.
    pub fn changes(&self, before: &Snapshot) -> Vec<String> {
        let after = self.snapshot();
        let names: Vec<_> = before.keys().chain(after.keys()).collect();
        let changed = names.into_iter().filter(|path| before.get(*path) != after.get(*path));
        let mut changed: Vec<_> = changed.map(|path| path.display().to_string()).collect();
        changed.dedup();
        changed
    }

    /// Whether a text contains the canaries' content or name.
    pub fn is_seen_in(&self, text: &str) -> bool {
        text.contains(&self.secret) || text.contains(CANARY)
    }
}

impl Drop for Domain {
    fn drop(&mut self) {
        if has_own_mounts() {
            rustix::mount::unmount(self.root().join(MOUNTED), UnmountFlags::DETACH).unwrap();
        }
    }
}

/// Whether this process can mount without changing the machine's mounts: `attack caller` gives root a mount namespace. An
/// ordinary user has a directory instead of the mount.
fn has_own_mounts() -> bool {
    let namespace = |process: &str| fs::read_link(format!("/proc/{process}/ns/mnt"));
    rustix::process::geteuid().is_root() && namespace("self").ok() != namespace("1").ok()
}

fn open_to_all(root: &Path) {
    for entry in WalkDir::new(root).into_iter().flatten() {
        let mode = if entry.file_name() == "farrier-canary-closed" {
            0o000
        } else if entry.file_type().is_dir() || entry.file_name() == "program" {
            0o777
        } else {
            0o666
        };
        if !entry.file_type().is_symlink() {
            fs::set_permissions(entry.path(), fs::Permissions::from_mode(mode)).unwrap();
        }
    }
}

/// Describes an entry: a short file by its mode and content, any other file by its metadata. The mode of a directory is left
/// out, because the cache may change it.
fn describe(path: &Path) -> (PathBuf, String) {
    let found = path.symlink_metadata().unwrap();
    let text = if found.is_file() && found.len() < 4096 {
        format!("{:o} {:?}", found.mode(), fs::read(path).unwrap())
    } else if found.is_dir() {
        "a directory".to_owned()
    } else {
        format!("{:o} {} {} {}", found.mode(), found.len(), found.ino(), found.mtime())
    };
    (path.to_owned(), text)
}

/// Returns the files that attacks created in a build's directory, outside the upper directory of the overlay.
pub fn strays(scratch: &Path) -> Vec<String> {
    let mut entries = WalkDir::new(scratch).max_depth(12).into_iter();
    let mut found = Vec::new();
    while let Some(entry) = entries.next() {
        let Ok(entry) = entry else { continue };
        let name = entry.file_name().to_string_lossy();
        if name == "upper" && entry.file_type().is_dir() {
            entries.skip_current_dir();
        } else if name.starts_with(ESCAPED) || name == SCRIPT {
            found.push(entry.path().display().to_string());
        }
    }
    found
}

/// Command lines of leftover attack processes that name the domain; a build must not leave any.
pub fn processes(domain: &Domain) -> Vec<String> {
    let name = domain.abstract_name.as_bytes();
    let is_left = |line: &Vec<u8>| {
        line.starts_with(b"attack\0") && line.windows(name.len()).any(|window| window == name)
    };
    let lines = fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    lines.filter(is_left).map(|line| String::from_utf8_lossy(&line).into_owned()).collect()
}
