//! Inputs of boot checks in addition to a kernel.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use farrier_bootcheck::{BootRequest, boot_check};
use farrier_core::kernel::KernelRelease;
use farrier_payload::ENTRYPOINT;
use kmod::{BootOutcome, BootReport};
use tokio_util::sync::CancellationToken;

use super::packages::{kernel_image, run};

/// Builds the static binary once with the settings next to its sources. The build has a separate target directory, because
/// cargo may hold the lock of the tests' own.
pub fn entrypoint() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = root.join("target/entrypoint");
    fs::create_dir_all(&target).unwrap();
    let lock = File::create(target.join("tests.lock")).unwrap();
    lock.lock().unwrap();
    run(Command::new(env!("CARGO"))
        .args(["build", "--locked", "--quiet", "--profile", "entrypoint", "--target-dir"])
        .arg(&target)
        // Flags of the tests' own build must not affect this one.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .current_dir(root.join("crates/node/driver-entrypoint")));
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    target.join(host).join("entrypoint").join(ENTRYPOINT)
}

/// Returns a request to load the modules of a directory on a kernel.
pub fn request(release: &KernelRelease, payload: &Path, modules: &[&str]) -> BootRequest {
    let modules = modules.iter().map(ToString::to_string).collect();
    BootRequest::new(kernel_image(release), payload.to_owned(), modules, entrypoint())
}

/// Runs the boot check.
pub async fn boot(request: &BootRequest) -> BootReport {
    boot_check(request, &CancellationToken::new())
        .await
        .unwrap_or_else(|error| panic!("{error}; {}\n{error:?}", error.hint()))
}

/// Returns the outcome of each module by name.
pub fn outcomes(report: &BootReport) -> BTreeMap<&str, &BootOutcome> {
    report.modules.iter().map(|module| (module.name.as_str(), &module.outcome)).collect()
}

/// Returns the contents of /proc/PID/stat of this process's children.
pub fn children() -> Vec<String> {
    let parent = std::process::id().to_string();
    let is_child = |stat: &str| stat.rsplit(')').next().unwrap().split_whitespace().nth(1) == Some(&parent);
    fs::read_dir("/proc")
        .unwrap()
        .filter_map(|entry| {
            let path = entry.unwrap().path();
            let stat = fs::read_to_string(path.join("stat")).ok()?;
            is_child(&stat).then_some(stat)
        })
        .collect()
}
