//! Kernels from the host's suites, each fetched once.

use std::{
    fs::{self, File},
    path::PathBuf,
    process::Command,
};

use farrier_core::kernel::{Architecture, KernelRelease};
use farrier_inputs::read_header_set;
use farrier_payload::{DecompressionBudget, read_modules};
use kmod::{CheckReport, CheckRequest, KernelFacts, Module, ModuleError, PayloadModule, check};

pub use crate::support::packages::{image_package, run, unpacked, unpacked_with};
use crate::support::{kept, packages};

/// Returns a command for a kmod tool, which may be in `sbin` and outside a user's PATH.
pub fn kmod_tool(name: &str) -> Command {
    let mut command = Command::new(name);
    command.env("PATH", format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap()));
    command
}

/// Returns the 6.1 kernels whose headers the host's suites have, oldest first.
pub fn releases() -> Vec<KernelRelease> {
    let releases = packages::releases("6.1.0-", "-amd64");
    assert!(releases.len() >= 2, "the host's suites have fewer than two 6.1 kernels: {releases:?}");
    releases
}

/// Options for a separate apt configuration for arm64, with the host's suites and separate lists.
pub fn arm64_apt() -> Vec<String> {
    let root = kept("apt-arm64");
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
    // Stale lists name packages that the mirror no longer has.
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

pub fn facts(release: &KernelRelease) -> KernelFacts {
    let root = unpacked(&format!("linux-headers-{release}"));
    let (facts, compiler) = read_header_set(&root, release, Architecture::Amd64).unwrap();
    assert_eq!(compiler.map(|compiler| compiler.to_string()).as_deref(), Some("gcc 12"));
    facts
}

pub fn in_tree(release: &KernelRelease) -> Vec<PayloadModule> {
    read_modules(
        &unpacked(&image_package(release)).join("lib/modules").join(release.as_str()),
        &DecompressionBudget::without_build(),
    )
    .unwrap()
}

/// Returns the kernel's network drivers, a large enough sample of compressed modules.
pub fn network(release: &KernelRelease) -> Vec<PayloadModule> {
    let root = unpacked(&image_package(release));
    read_modules(
        &root.join(format!("lib/modules/{release}/kernel/drivers/net")),
        &DecompressionBudget::without_build(),
    )
    .unwrap()
}

/// Returns the decompressed file of one in-tree module.
pub fn module_bytes(release: &KernelRelease, name: &str) -> Vec<u8> {
    let root = unpacked(&image_package(release)).join("lib/modules").join(release.as_str());
    let is_module = |entry: &walkdir::DirEntry| {
        let file = entry.file_name().to_string_lossy();
        file.ends_with(".ko") && kmod::module_name(&file) == name
    };
    let mut files = walkdir::WalkDir::new(root).into_iter().filter_map(Result::ok);
    fs::read(files.find(is_module).unwrap().path()).unwrap()
}

pub fn check_one(kernel: &KernelFacts, module: Result<Module, ModuleError>) -> CheckReport {
    let modules = [PayloadModule { path: "m.ko".into(), module }];
    check(&CheckRequest { kernel, needs: &[], modules: &modules, required: &[], files: None })
}

pub fn find(bytes: &[u8], text: &[u8]) -> usize {
    bytes.windows(text.len()).position(|window| window == text).unwrap()
}

/// Returns the newest 6.12 kernel of the host's suites.
pub fn newest_6_12() -> KernelRelease {
    packages::releases("6.12.", "+deb12-amd64").pop().expect("the host's suites have a 6.12 kernel")
}
