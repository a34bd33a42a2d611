//! Debian 12's newest kernels, looked up at run time in the same suites that farrier uses.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, SystemTime},
};

use farrier_local::cache::Cache;

use super::kept;

/// How long a list of kernels stays valid; the suites change every few days.
const FRESH: Duration = Duration::from_hours(1);

/// The two newest 6.1 kernels for amd64 with headers.
pub struct Kernels {
    pub older: String,
    pub newer: String,
}

/// Returns the cache directory whose fetched content all tests share.
pub fn shared_cache() -> PathBuf {
    kept("shared-cache")
}

/// Creates a cache that shares fetched package lists and packages with other tests, but nothing built from them.
pub fn new_cache(directory: &Path) -> Cache {
    let root = directory.join("cache");
    link_shared(&root, &["apt", "debs", "locks"]);
    Cache::open(root).unwrap()
}

/// Links parts of the shared cache into another cache.
pub fn link_shared(cache: &Path, kinds: &[&str]) {
    fs::create_dir_all(cache).unwrap();
    for kind in kinds {
        let shared = shared_cache().join(kind);
        fs::create_dir_all(&shared).unwrap();
        symlink(shared, cache.join(kind)).unwrap();
    }
}

/// Returns the two newest kernels.
pub fn newest() -> Kernels {
    let releases = all();
    let [.., older, newer] = releases.as_slice() else {
        panic!("the suites of Debian 12 have fewer than two 6.1 kernels: {releases:?}");
    };
    Kernels { older: older.clone(), newer: newer.clone() }
}

/// Returns all kernels, oldest first.
pub fn all() -> Vec<String> {
    list().lines().map(str::to_owned).collect()
}

/// Returns one kernel per line. Tests run concurrently, each in a separate process: the first one asks apt, and the others read
/// the file.
fn list() -> String {
    let cache = shared_cache();
    fs::create_dir_all(&cache).unwrap();
    let lock = File::create(cache.join("kernels.lock")).unwrap();
    lock.lock().unwrap();
    let list = cache.join("kernels-with-image");
    let age = |path: &Path| SystemTime::now().duration_since(fs::metadata(path).ok()?.modified().ok()?).ok();
    if age(&list).is_none_or(|age| age > FRESH) {
        fs::write(&list, ask_apt(&cache).join("\n")).unwrap();
    }
    fs::read_to_string(&list).unwrap()
}

/// Returns the apt configurations of the package lists that farrier has fetched.
fn lists(cache: &Path) -> Vec<PathBuf> {
    let states = fs::read_dir(cache.join("apt")).expect("farrier has fetched package lists");
    states.map(|state| state.unwrap().path().join("apt.conf")).collect()
}

/// Returns the releases of all 6.1 kernels with headers and a signed image, oldest first.
fn ask_apt(cache: &Path) -> Vec<String> {
    // The command fails because no such kernel exists, but leaves farrier's package lists in the cache.
    let _ = Command::new(env!("CARGO_BIN_EXE_farrier"))
        .args(["headers", "fetch", "--kernel", "6.1.0-0-amd64", "--os", "debian", "--os-version", "12"])
        .args(["--arch", "amd64", "--cache-dir"])
        .arg(cache)
        .output()
        .unwrap();
    let ask = |list: &PathBuf, packages: &str| -> BTreeSet<String> {
        let mut command = Command::new("apt-cache");
        command.arg("-c").arg(list).args(["pkgnames", &format!("linux-{packages}-6.1.0-")]);
        let output = command.output().expect("run apt-cache");
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    };
    let packages =
        |of: &str| -> BTreeSet<String> { lists(cache).iter().flat_map(|list| ask(list, of)).collect() };
    // Signed images are published some time after headers.
    let images = packages("image");
    let with_image = |package: &String| {
        let release = package.strip_prefix("linux-headers-")?;
        let abi: u32 = release.strip_prefix("6.1.0-")?.strip_suffix("-amd64")?.parse().ok()?;
        images.contains(&format!("linux-image-{release}")).then(|| (abi, release.to_owned()))
    };
    let mut releases: Vec<(u32, String)> = packages("headers").iter().filter_map(with_image).collect();
    releases.sort();
    releases.dedup();
    releases.into_iter().map(|(_, release)| release).collect()
}
