//! What the fuzz targets share: the parsers' crates, without farrier's runtime and TLS, so that the targets build in a minute.
// Each target uses a part of it.
#![allow(dead_code)]

pub use kmod;

#[path = "../../src/boot/protocol.rs"]
pub mod protocol;
