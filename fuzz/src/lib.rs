//! What the fuzz targets share: the parsers' crates, without farrier's runtime and TLS, so that the targets build in a minute.
// Each target uses a part of it.
#![allow(dead_code)]

pub use kmod;

#[path = "../../crates/core/src/template/dockerfile.rs"]
mod dockerfile;
#[path = "../../src/boot/protocol.rs"]
pub mod protocol;
#[path = "../../crates/core/src/template/steps/mod.rs"]
pub mod steps;
#[path = "../../crates/core/src/template/words.rs"]
mod words;

/// Does a Dockerfile add what an engine would fetch?
pub fn adds_more_than_copies(dockerfile: &str) -> bool {
    dockerfile::fetching_add(dockerfile).is_some()
}
