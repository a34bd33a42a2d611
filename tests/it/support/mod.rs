//! Helpers shared by the integration tests. Each test program uses some of them.
#![allow(dead_code)]

pub mod certificates;
pub mod cosign;
pub mod cutting_proxy;
pub mod docker;
pub mod fake_http;
pub mod git_server;
pub mod kernels;
pub mod kube_api;
pub mod live;
#[path = "../../../crates/adapters/builder/src/testing/logs.rs"]
pub mod logs;
pub mod netns;
pub mod node_vm;
pub mod ofed;
pub mod own_kernel;
pub mod packages;
pub mod pages;
pub mod published;
pub mod registry_process;
pub mod registry_quirks;
pub mod rpm_repository;
pub mod scripted_registry;
pub mod site;
pub mod tiny_image;
pub mod tls_archive;
pub mod tunnels;
pub mod virtual_machine;

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

/// Returns a command that runs a program as root.
pub fn as_root(program: &str) -> Command {
    if rustix::process::geteuid().is_root() {
        return Command::new(program);
    }
    let mut command = Command::new("sudo");
    command.args(["-n", program]);
    command
}

/// Returns a directory whose content persists between runs. Compilers and apt store its path in their output, and `ci/test`
/// accesses it through a link, so the path is canonicalized and stays the same.
pub fn kept(name: &str) -> PathBuf {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&place).unwrap();
    fs::canonicalize(place).unwrap()
}
