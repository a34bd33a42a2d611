//! The stand-in for OFED, compiled as a toolchain image would compile the real one.

use std::{
    fs::{self, File},
    path::{Path, PathBuf},
    process::Command,
};

use farrier::kernel::KernelRelease;
use sha2::{Digest as _, Sha256};

use super::{
    node_vm::files,
    packages::{header_tree, headers, run},
};

/// What its build leaves for a kernel: modules below `lib/modules`, headers and symbol table below `usr/src`. Made
/// once for each state of its sources.
pub fn payload(release: &KernelRelease) -> PathBuf {
    let sources = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/ofed");
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR")).join("ofed");
    fs::create_dir_all(&cache).unwrap();
    let lock = File::create(cache.join("lock")).unwrap();
    lock.lock().unwrap();
    let made = cache.join(format!("{release}-{}", identity(&sources, &headers(release))));
    if !made.exists() {
        let work = tempfile::tempdir_in(&cache).unwrap();
        compile(release, &sources, work.path());
        fs::rename(work.path().join("out"), &made).unwrap();
    }
    made
}

fn identity(sources: &Path, headers: &Path) -> String {
    let mut hash = Sha256::new();
    hash.update(headers.to_str().unwrap());
    for path in files(sources, "").iter().filter(|path| path.is_file()) {
        hash.update(path.to_str().unwrap());
        hash.update(fs::read(path).unwrap());
    }
    hex::encode(hash.finalize())[..12].to_owned()
}

fn compile(release: &KernelRelease, sources: &Path, work: &Path) {
    let headers = header_tree(release, &work.join("root"));
    let tree = work.join("tree");
    run(Command::new("cp").arg("-r").args([sources, &tree]));
    run(Command::new("./configure")
        .arg(format!("--kernel-version={release}"))
        .arg(format!("--kernel-sources={}", headers.display()))
        .args(["--default", "-j2"])
        .env("CC", "gcc-12")
        .current_dir(&tree));
    for target in ["kernel", "install"] {
        run(Command::new("make")
            // Type information is no part of what is tested.
            .args(["-s", "-j2", "CC=gcc-12", "KCFLAGS=-g0", "CONFIG_DEBUG_INFO_BTF_MODULES=", target])
            .arg(format!("INSTALL_MOD_PATH={}", work.join("out").display()))
            .current_dir(&tree));
    }
}
