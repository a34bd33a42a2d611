//! farrier's decisions and forms: kernels, definitions, plans, rollouts, and what published images say of themselves.
//!
//! No I/O, no async runtime, no clock, no environment: `Cargo.toml` has no such dependency.
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

// One path for what the two crates below define.
mod oci {
    pub use ::oci::*;

    pub use crate::facts::*;
    pub use crate::facts::{annotations, media_type};
}
use ::kmod;
