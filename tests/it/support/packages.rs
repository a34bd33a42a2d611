//! The distribution's kernel packages from the host's apt, looked up at run time and unpacked once for all tests.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io::Write,
    path::{Path, PathBuf},
    process::Command,
    time::UNIX_EPOCH,
};

use farrier_core::{kernel::Architecture, kernel::KernelRelease};
use farrier_inputs::KernelImage;

use super::kept;

/// Runs a program that must succeed, and returns its standard output.
pub fn run(command: &mut Command) -> String {
    let output = command
        .env("LC_ALL", "C")
        .output()
        .unwrap_or_else(|error| panic!("start {command:?}, which may need a package: {error}"));
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {stdout}{stderr}");
    stdout.into_owned()
}

/// Returns the output of `apt-cache` about the host's suites. Without a cache of the host's lists, each query takes a second of
/// CPU time, and the tests' processes repeat hundreds of queries. Answers are therefore kept as long as the lists are
/// unchanged.
pub fn apt_cache(question: &[&str]) -> String {
    let lists = fs::metadata("/var/lib/apt/lists").and_then(|lists| lists.modified()).unwrap();
    let state = lists.duration_since(UNIX_EPOCH).unwrap().as_nanos();
    let answers = kept("apt-answers").join(state.to_string());
    fs::create_dir_all(&answers).unwrap();
    let file = answers.join(question.join(" ").replace('/', "%"));
    if let Ok(answer) = fs::read_to_string(&file) {
        return answer;
    }
    let answer = run(Command::new("apt-cache").args(question));
    let mut new = tempfile::NamedTempFile::new_in(&answers).unwrap();
    new.write_all(answer.as_bytes()).unwrap();
    new.persist(file).unwrap();
    answer
}

/// Returns the amd64 kernels of a series whose headers the host's suites have, oldest first. `prefix` and `suffix` enclose the
/// increasing number: `6.1.0-` and `-amd64`, `6.12.` and `+deb12-amd64`.
pub fn releases(prefix: &str, suffix: &str) -> Vec<KernelRelease> {
    let packages = apt_cache(&["pkgnames", &format!("linux-headers-{prefix}")]);
    let number = |package: &str| -> Option<u32> {
        package.strip_prefix("linux-headers-")?.strip_prefix(prefix)?.strip_suffix(suffix)?.parse().ok()
    };
    let numbers: BTreeSet<u32> = packages.lines().filter_map(number).collect();
    numbers.iter().map(|number| format!("{prefix}{number}{suffix}").parse().unwrap()).collect()
}

/// Returns an unpacked package, created once for all tests and runs.
pub fn unpacked(package: &str) -> PathBuf {
    unpacked_with(&[], package)
}

/// Returns an unpacked package from an apt with additional options.
pub fn unpacked_with(options: &[String], package: &str) -> PathBuf {
    let cache = kept("kernels");
    let lock = File::create(cache.join(format!("{package}.lock"))).unwrap();
    lock.lock().unwrap();
    let version = field(options, package, "Version").replace([':', '/'], "_");
    let root = cache.join(format!("{package}_{version}"));
    if !root.exists() {
        let work = tempfile::tempdir_in(&cache).unwrap();
        let download = ["-o", "APT::Sandbox::User=root", "-q", "download", package];
        run(Command::new("apt-get").args(options).args(download).current_dir(work.path()));
        let deb =
            fs::read_dir(work.path()).unwrap().next().expect("apt-get leaves the package").unwrap().path();
        let tree = work.path().join("tree");
        run(Command::new("dpkg-deb").arg("-x").args([&deb, &tree]));
        fs::rename(&tree, &root).unwrap();
    }
    root
}

/// Returns a field of the newest version of a package.
fn field(options: &[String], package: &str, name: &str) -> String {
    let question = ["show", "--no-all-versions", package];
    let text = if options.is_empty() {
        apt_cache(&question)
    } else {
        run(Command::new("apt-cache").args(options).args(question))
    };
    let start = format!("{name}: ");
    text.lines().find_map(|line| line.strip_prefix(&start)).unwrap().to_owned()
}

/// Returns the package with a kernel and its modules: the signed one if it exists, otherwise the unsigned one.
pub fn image_package(release: &KernelRelease) -> String {
    let signed = format!("linux-image-{release}");
    let exists = apt_cache(&["pkgnames", &signed]).lines().any(|package| package == signed);
    if exists { signed } else { format!("{signed}-unsigned") }
}

/// Returns the root with a kernel's headers.
pub fn headers(release: &KernelRelease) -> PathBuf {
    unpacked(&format!("linux-headers-{release}"))
}

/// Returns a kernel with its modules.
pub fn kernel_image(release: &KernelRelease) -> KernelImage {
    let package = image_package(release);
    let root = unpacked(&package);
    let system_map = root.join(format!("boot/System.map-{release}"));
    KernelImage {
        release: release.clone(),
        arch: Architecture::Amd64,
        vmlinuz: root.join(format!("boot/vmlinuz-{release}")),
        system_map: system_map.exists().then_some(system_map),
        modules: Some(root.join("lib/modules").join(release.as_str())),
        origin: vec![package],
    }
}

/// Returns the modules of `tests/fixtures/modules`, compiled against a kernel's headers with the host's compiler, once for each
/// state of the sources.
pub fn fixture_modules(release: &KernelRelease) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/modules");
    let cache = kept("fixture-modules");
    let lock = File::create(cache.join("lock")).unwrap();
    lock.lock().unwrap();
    let identity = identity(&sources, &headers(release));
    let made = cache.join(format!("{release}-{identity}"));
    if !made.exists() {
        let work = tempfile::tempdir_in(&cache).unwrap();
        let output = compile(release, &sources, work.path());
        fs::rename(output, &made).unwrap();
    }
    made
}

fn identity(sources: &Path, headers: &Path) -> String {
    use sha2::Digest as _;
    let mut paths: Vec<PathBuf> = fs::read_dir(sources).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    let mut hash = sha2::Sha256::new();
    // All clones share the directory, so its canonical path is the same.
    hash.update(headers.canonicalize().unwrap().to_str().unwrap());
    for path in paths {
        hash.update(fs::read(path).unwrap());
    }
    hex::encode(hash.finalize())[..12].to_owned()
}

fn compile(release: &KernelRelease, sources: &Path, work: &Path) -> PathBuf {
    let (modules, out) = (work.join("modules"), work.join("out"));
    let tree = header_tree(release, &work.join("root"));
    run(Command::new("cp").arg("-r").args([sources, &modules]));
    // The tests do not need BTF, and generating it would require pahole when the headers include a vmlinux.
    run(Command::new("make")
        .args(["-s", "CC=gcc-12", "CONFIG_DEBUG_INFO_BTF_MODULES=", "modules", "-C"])
        .arg(tree)
        .arg(format!("M={}", modules.display())));
    fs::create_dir(&out).unwrap();
    for entry in fs::read_dir(&modules).unwrap().map(Result::unwrap) {
        if entry.path().extension().is_some_and(|extension| extension == "ko") {
            fs::rename(entry.path(), out.join(entry.file_name())).unwrap();
        }
    }
    out
}

/// Assembles a kernel's headers below `root` as if they were installed. Returns the target of `/lib/modules/<release>/build`.
pub fn header_tree(release: &KernelRelease, root: &Path) -> PathBuf {
    let package = format!("linux-headers-{release}");
    let depends = field(&[], &package, "Depends");
    let needed = depends.split([',', '|']).filter_map(|word| word.split_whitespace().next());
    let parts =
        needed.filter(|name| name.starts_with("linux-kbuild-") || name.contains("-common")).map(unpacked);
    for part in parts.chain([unpacked(&package)]) {
        fs::create_dir_all(root).unwrap();
        // Hard links suffice, because the trees are only read.
        run(Command::new("cp").args(["-al", "-t"]).arg(root).arg(part.join("usr")));
    }
    let tree = root.join("usr/src").join(&package);
    // The Makefile names the common part by its absolute path.
    let makefile = tree.join("Makefile");
    let text = fs::read_to_string(&makefile).unwrap();
    let common = text.trim().strip_prefix("include ").expect("Debian's Makefile is one line");
    fs::remove_file(&makefile).unwrap();
    fs::write(makefile, format!("include {}{common}\n", root.display())).unwrap();
    tree
}
