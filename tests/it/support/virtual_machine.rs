//! What boot checks need beside a kernel.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use farrier::{
    boot::{BootRequest, ENTRYPOINT, boot_check},
    kernel::KernelRelease,
    kmod::{BootOutcome, BootReport},
};
use tokio_util::sync::CancellationToken;

use super::packages::{kernel_image, run};

/// The static binary, built once with the settings that lie beside its sources. In a directory of its own: cargo
/// may hold the lock of the other one.
pub fn entrypoint() -> PathBuf {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let target = root.join("target/entrypoint");
    fs::create_dir_all(&target).unwrap();
    let lock = File::create(target.join("tests.lock")).unwrap();
    lock.lock().unwrap();
    run(Command::new(env!("CARGO"))
        .args(["build", "--locked", "--quiet", "--profile", "entrypoint", "--target-dir"])
        .arg(&target)
        // What the tests' own build was called with is not for this one.
        .env_remove("RUSTFLAGS")
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .current_dir(root.join("crates/driver-entrypoint")));
    let host = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    target.join(host).join("entrypoint").join(ENTRYPOINT)
}

/// Loads the modules of a directory on a kernel.
pub fn request(release: &KernelRelease, payload: &Path, modules: &[&str]) -> BootRequest {
    let modules = modules.iter().map(ToString::to_string).collect();
    BootRequest::new(kernel_image(release), payload.to_owned(), modules, entrypoint())
}

/// Boots.
pub async fn boot(request: &BootRequest) -> BootReport {
    boot_check(request, &CancellationToken::new())
        .await
        .unwrap_or_else(|error| panic!("{error}; {}\n{error:?}", error.hint()))
}

/// What became of each module, by its name.
pub fn outcomes(report: &BootReport) -> BTreeMap<&str, &BootOutcome> {
    report.modules.iter().map(|module| (module.name.as_str(), &module.outcome)).collect()
}

/// Ids of processes that are children of this one.
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
