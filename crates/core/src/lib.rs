//! Decides what farrier builds and rolls out, as pure functions for the controller and the commands.
//!
//! The data model covers kernels, definitions, plans, rollouts, and the metadata of published images.
//!
//! The crate has no I/O, async runtime, clock or environment access: `Cargo.toml` has no dependency that offers them.
#![forbid(unsafe_code)]

pub mod definition;
pub mod facts;
pub mod image;
pub mod kernel;
pub mod plan;
pub mod provenance;
pub mod shell;
pub mod site;
pub mod template;
pub mod text;

// Combines the `oci` crate and the module `facts` under one path.
mod oci {
    pub use ::oci::*;

    pub use crate::facts::*;
    pub use crate::facts::{annotations, media_type};
}
use ::kmod;
