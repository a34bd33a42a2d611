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
pub mod site;
pub mod template;

// One path for what the two crates below define.
mod oci {
    pub use ::oci::*;

    pub use crate::facts::*;
    pub use crate::facts::{annotations, media_type};
}
use ::kmod;

#[cfg(test)]
mod schema_dump {
    #[test]
    fn dump() {
        let all = [
            ("driverimage", schemars::schema_for!(crate::image::DriverImage).to_value()),
            ("kernelfamily", schemars::schema_for!(crate::kernel::KernelFamily).to_value()),
            ("announcedkernels", schemars::schema_for!(crate::kernel::AnnouncedKernels).to_value()),
            ("site", schemars::schema_for!(crate::site::Site).to_value()),
        ];
        for (name, value) in all {
            std::fs::write(format!("/tmp/core/{name}.json"), serde_json::to_string_pretty(&value).unwrap() + "\n").unwrap();
        }
    }
}
