//! Support code of the other integration tests that this suite shares.
#![allow(dead_code)]

pub mod node_vm;
#[path = "../../it/support/packages.rs"]
pub mod packages;

use std::{
    fs,
    path::{Path, PathBuf},
};

/// Returns a directory whose content later runs reuse.
pub fn kept(name: &str) -> PathBuf {
    let place = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    fs::create_dir_all(&place).unwrap();
    fs::canonicalize(place).unwrap()
}
