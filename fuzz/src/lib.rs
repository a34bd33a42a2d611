//! farrier's pure modules, compiled by themselves: they know no runtime, no TLS and no file, so the targets
//! build in a minute instead of five.
// Each target uses a part of them.
#![allow(dead_code, unused_imports)]

#[path = "../../src/image/mod.rs"]
pub mod image;
#[path = "../../src/kernel/mod.rs"]
pub mod kernel;
#[path = "../../src/kmod/mod.rs"]
pub mod kmod;
#[path = "../../src/site/mod.rs"]
pub mod site;
#[path = "../../src/template/mod.rs"]
pub mod template;
#[path = "../../src/boot/protocol.rs"]
pub mod protocol;
