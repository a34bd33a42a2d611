//! Kernels of the host's suites, fetched once.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use farrier::{
    headers::read_header_set,
    kernel::{Architecture, KernelRelease},
    kmod::{CheckReport, CheckRequest, KernelFacts, Module, ModuleError, PayloadModule, check},
    payload::read_modules,
};

pub fn run(command: &mut Command) -> String {
    let output = command
        .env("LC_ALL", "C")
        .output()
        .unwrap_or_else(|error| panic!("{command:?} does not start, install its package: {error}"));
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {stderr}");
    String::from_utf8(output.stdout).unwrap()
}

/// kmod's tools lie in `sbin`, which a user's PATH may lack.
pub fn kmod_tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap()));
    command
}

/// The 6.1 kernels whose headers the host's suites have, oldest first.
pub fn releases() -> Vec<KernelRelease> {
    let packages = run(Command::new("apt-cache").args(["pkgnames", "linux-headers-6.1.0-"]));
    let number = |package: &str| -> Option<u32> {
        package.strip_prefix("linux-headers-6.1.0-")?.strip_suffix("-amd64")?.parse().ok()
    };
    let numbers: BTreeSet<u32> = packages.lines().filter_map(number).collect();
    assert!(numbers.len() >= 2, "the host's suites have fewer than two 6.1 kernels: {packages}");
    numbers.iter().map(|number| format!("6.1.0-{number}-amd64").parse().unwrap()).collect()
}

/// An unpacked package, made once for all tests and runs.
pub fn unpacked(package: &str) -> PathBuf {
    unpacked_with(&[], package)
}

/// The same, from an apt with these options beside the host's.
pub fn unpacked_with(options: &[String], package: &str) -> PathBuf {
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("kernels");
    fs::create_dir_all(&cache).unwrap();
    let lock = File::create(cache.join(format!("{package}.lock"))).unwrap();
    lock.lock().unwrap();
    let show = ["show", "--no-all-versions", package];
    let version = run(Command::new("apt-cache").args(options).args(show));
    let version =
        version.lines().find_map(|line| line.strip_prefix("Version: ")).unwrap().replace([':', '/'], "_");
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

/// Options for an apt of its own, of another architecture than the host's: the same suites, its own lists.
pub fn arm64_apt() -> Vec<String> {
    let root = Path::new(env!("CARGO_TARGET_TMPDIR")).join("apt-arm64");
    fs::create_dir_all(&root).unwrap();
    let place = root.display();
    let options: Vec<String> = [
        "APT::Architecture=arm64".to_owned(),
        "APT::Architectures=arm64".to_owned(),
        "APT::Sandbox::User=root".to_owned(),
        "Dir::State::status=/dev/null".to_owned(),
        format!("Dir::State={place}/state"),
        format!("Dir::Cache={place}/cache"),
    ]
    .into_iter()
    .flat_map(|option| ["-o".to_owned(), option])
    .collect();
    let lock = File::create(root.join("lock")).unwrap();
    lock.lock().unwrap();
    // Lists of another day name packages that the mirror no longer has.
    let fresh = |path: PathBuf| {
        let modified = fs::metadata(path).and_then(|data| data.modified());
        modified.is_ok_and(|at| at.elapsed().is_ok_and(|age| age.as_secs() < 12 * 3600))
    };
    if !fresh(root.join("updated")) {
        for part in ["state/lists/partial", "cache/archives/partial"] {
            fs::create_dir_all(root.join(part)).unwrap();
        }
        run(Command::new("apt-get").args(&options).args(["-q", "update"]));
        File::create(root.join("updated")).unwrap();
    }
    options
}

/// The package that holds a kernel's modules: signed, or not yet signed.
pub fn image_package(release: &KernelRelease) -> String {
    let signed = format!("linux-image-{release}");
    let exists = Command::new("apt-cache").args(["show", &signed]).output().unwrap();
    if exists.status.success() && !exists.stdout.is_empty() { signed } else { format!("{signed}-unsigned") }
}

pub fn facts(release: &KernelRelease) -> KernelFacts {
    let root = unpacked(&format!("linux-headers-{release}"));
    let (facts, compiler) = read_header_set(&root, release, Architecture::Amd64).unwrap();
    assert_eq!(compiler.map(|compiler| compiler.to_string()).as_deref(), Some("gcc 12"));
    facts
}

pub fn in_tree(release: &KernelRelease) -> Vec<PayloadModule> {
    read_modules(&unpacked(&image_package(release)).join("lib/modules").join(release.as_str())).unwrap()
}

/// The network drivers among them: enough of those that are compressed.
pub fn network(release: &KernelRelease) -> Vec<PayloadModule> {
    let root = unpacked(&image_package(release));
    read_modules(&root.join(format!("lib/modules/{release}/kernel/drivers/net"))).unwrap()
}

/// The file of one in-tree module, decompressed.
pub fn module_bytes(release: &KernelRelease, name: &str) -> Vec<u8> {
    let root = unpacked(&image_package(release)).join("lib/modules").join(release.as_str());
    let is_it = |entry: &walkdir::DirEntry| {
        let file = entry.file_name().to_string_lossy();
        file.ends_with(".ko") && farrier::kmod::module_name(&file) == name
    };
    let mut files = walkdir::WalkDir::new(root).into_iter().filter_map(Result::ok);
    fs::read(files.find(is_it).unwrap().path()).unwrap()
}

pub fn check_one(kernel: &KernelFacts, module: Result<Module, ModuleError>) -> CheckReport {
    let modules = [PayloadModule { path: "m.ko".into(), module }];
    check(&CheckRequest { kernel, needs: &[], modules: &modules, required: &[], files: None })
}

pub fn find(bytes: &[u8], text: &[u8]) -> usize {
    bytes.windows(text.len()).position(|window| window == text).unwrap()
}

/// The newest 6.12 kernel of the host's suites.
pub fn newest_6_12() -> KernelRelease {
    let packages = run(Command::new("apt-cache").args(["pkgnames", "linux-headers-6.12."]));
    let newest = packages.lines().filter_map(|package| {
        let release = package.strip_prefix("linux-headers-")?;
        let (number, rest) = release.strip_prefix("6.12.")?.split_once('+')?;
        rest.ends_with("-amd64").then_some(())?;
        (rest.split('-').count() == 2).then_some((number.parse::<u32>().ok()?, release))
    });
    newest.max().expect("the host's suites have a 6.12 kernel").1.parse().unwrap()
}
