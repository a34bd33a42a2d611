//! Parsers of `driver-entrypoint`: module files in each compression, and text files on a node. The crate's library does
//! not contain these parsers, so this target includes their source files. The target is also an example of that crate,
//! so that every build of the workspace checks that it compiles.
#![cfg_attr(fuzzing, no_main)]
// The rest of the program is not called from here.
#![allow(dead_code, unused_imports, unexpected_cfgs, clippy::pedantic, clippy::restriction)]

#[path = "../../crates/node/driver-entrypoint/src/blacklist.rs"]
mod blacklist;
#[path = "../../crates/node/driver-entrypoint/src/connectivity.rs"]
mod connectivity;
#[path = "../../crates/node/driver-entrypoint/src/devices.rs"]
mod devices;
#[path = "../../crates/node/driver-entrypoint/src/disruption.rs"]
mod disruption;
#[path = "../../crates/node/driver-entrypoint/src/error.rs"]
mod error;
#[path = "../../crates/node/driver-entrypoint/src/failure.rs"]
mod failure;
#[path = "../../crates/node/driver-entrypoint/src/files.rs"]
mod files;
#[path = "../../crates/node/driver-entrypoint/src/firmware.rs"]
mod firmware;
#[path = "../../crates/node/driver-entrypoint/src/forecast/mod.rs"]
mod forecast;
#[path = "../../crates/node/driver-entrypoint/src/guard/mod.rs"]
mod guard;
#[path = "../../crates/node/driver-entrypoint/src/host_modules.rs"]
mod host_modules;
#[path = "../../crates/node/driver-entrypoint/src/isolated.rs"]
mod isolated;
#[path = "../../crates/node/driver-entrypoint/src/kernel.rs"]
mod kernel;
#[path = "../../crates/node/driver-entrypoint/src/kmsg.rs"]
mod kmsg;
#[path = "../../crates/node/driver-entrypoint/src/lock.rs"]
mod lock;
#[path = "../../crates/node/driver-entrypoint/src/log.rs"]
mod log;
#[path = "../../crates/node/driver-entrypoint/src/logind.rs"]
mod logind;
#[path = "../../crates/node/driver-entrypoint/src/module_file.rs"]
mod module_file;
#[path = "../../crates/node/driver-entrypoint/src/modules/mod.rs"]
mod modules;
#[path = "../../crates/node/driver-entrypoint/src/mountinfo.rs"]
mod mountinfo;
#[path = "../../crates/node/driver-entrypoint/src/mounts.rs"]
mod mounts;
#[path = "../../crates/node/driver-entrypoint/src/node.rs"]
mod node;
#[path = "../../crates/node/driver-entrypoint/src/personality/mod.rs"]
mod personality;
#[path = "../../crates/node/driver-entrypoint/src/pod_interfaces.rs"]
mod pod_interfaces;
#[path = "../../crates/node/driver-entrypoint/src/program.rs"]
mod program;
#[path = "../../crates/node/driver-entrypoint/src/routes/mod.rs"]
mod routes;
#[path = "../../crates/node/driver-entrypoint/src/selinux.rs"]
mod selinux;
#[path = "../../crates/node/driver-entrypoint/src/signals.rs"]
mod signals;
#[path = "../../crates/node/driver-entrypoint/src/storage.rs"]
mod storage;

use std::{fs, io, path::Path, sync::OnceLock};

use module_file::{Compression, ModuleFile, ModuleInfo, Origin};
use modules::{index::Index, loaded::Loaded, parameters::Parameters};
use node::{Node, Paths};
use personality::{mofed::sriov, nvidia::parameters};

const RELEASE: &str = "6.1.0-1-amd64";
/// Limit on decompressed bytes, to save memory.
const LIMIT: u64 = 64 << 20;

#[cfg(fuzzing)]
libfuzzer_sys::fuzz_target!(|data: &[u8]| read(data));

#[cfg(not(fuzzing))]
fn main() {
    std::env::args_os().skip(1).for_each(|file| read(&fs::read(file).unwrap()));
}

fn read(data: &[u8]) {
    let Some((&kind, data)) = data.split_first() else { return };
    match kind {
        b'0' => module(Compression::None, data),
        b'1' => module(Compression::Gzip, data),
        b'2' => module(Compression::Xz, data),
        b'3' => module(Compression::Zstd, data),
        _ => texts(data),
    }
}

fn module(compression: Compression, data: &[u8]) {
    let Ok(bytes) = compression.decompress(data, LIMIT) else { return };
    assert!(bytes.len() as u64 <= LIMIT);
    let _ = ModuleInfo::parse(&bytes).map(|info| info.identity());
}

/// Reads the text files of a node on which every file holds this text.
fn texts(data: &[u8]) {
    static ROOT: OnceLock<tempfile::TempDir> = OnceLock::new();
    let root = ROOT.get_or_init(|| tempfile::tempdir().unwrap());
    let paths = Paths::new(root.path());
    let tree = paths.host_modules(RELEASE);
    let files = [
        "/proc/1/net/route",
        "/proc/1/net/ipv6_route",
        "/proc/1/net/tcp6",
        "/host/etc/kubernetes/kubelet.conf",
        "/proc/1/mountinfo",
        "/proc/modules",
        "/proc/swaps",
        "/proc/self/mountinfo",
        "/proc/cmdline",
        "/etc/modprobe.d/a.conf",
        "/drivers/nvidia.conf",
        "/run/kept",
    ];
    for path in files
        .map(|path| paths.at(path))
        .into_iter()
        .chain([tree.join("modules.dep"), tree.join("modules.builtin")])
    {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, data).unwrap();
    }
    let node = Node { paths, kernel: &Refuses, log: log::Log::to(Box::new(io::sink())) };
    if let Ok(loaded) = Loaded::read(&node.paths) {
        modules::versions::ExportedVersions::default().add(&node.paths.at("/run/kept"), &loaded);
        loaded.names().for_each(|name| assert!(loaded.contains(name) || name.contains('-')));
    }
    let _ = Parameters::read(&node.paths).soft_dependencies("mlx5_core");
    let _ = Index::read(RELEASE, &[(Origin::Host, tree)]);
    let _ = mounts::conceal(&node, "/run/x");
    let _ = parameters::check(&node, &parameters::MODULES);
    let _ = sriov::NetworkState::load_if_unloaded(&node, "/run/kept").map(|state| state.summary());
    let _ = kmsg::message(data);
    let _ = storage::uses(&node.paths);
    let _ = routes::Network::read(&node.paths).uses(&node.paths.at("/sys/class/net/eth0"));
}

/// A kernel that refuses every operation.
struct Refuses;

impl kernel::Kernel for Refuses {
    fn release(&self) -> String {
        RELEASE.to_owned()
    }

    fn load(
        &self,
        _: &ModuleFile,
        _: &str,
        _: kernel::Progress<'_>,
    ) -> Result<Vec<String>, error::LoadRefusal> {
        Err(error::LoadRefusal { errno: rustix::io::Errno::PERM, locked_down: false, messages: Vec::new() })
    }

    fn load_within(&self, _: &ModuleFile, _: &str, _: std::time::Duration) -> Result<(), kernel::LoadError> {
        Err(kernel::LoadError::Failed("refused".to_owned()))
    }

    fn unload(&self, _: &str, _: kernel::Progress<'_>) -> Result<(), rustix::io::Errno> {
        Err(rustix::io::Errno::PERM)
    }

    fn bind(&self, _: &Path, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn unmount(&self, _: &Path) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn propagation(&self, _: &Path, _: rustix::mount::MountPropagationFlags) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn make_device(&self, _: &Path, _: u32) -> io::Result<()> {
        Err(io::ErrorKind::PermissionDenied.into())
    }

    fn connects(&self, _: std::net::SocketAddr, _: std::time::Duration) -> bool {
        false
    }

    fn pause(&self, _: std::time::Duration) {}
}
