//! The parts of the other integration tests' support that these take.
#![allow(dead_code)]

pub mod node_vm;
#[path = "../../it/support/packages.rs"]
pub mod packages;

use std::{
    fs,
    path::{Path, PathBuf},
};

/// A directory whose content later runs find again.
pub fn kept(name: &str) -> PathBuf {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&place).unwrap();
    fs::canonicalize(place).unwrap()
}
