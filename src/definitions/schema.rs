//! Adapter: the JSON Schemas of the definitions, made from the Rust types; `schema/` holds them as files.

use crate::{image::DriverImage, kernel::KernelFamily};

/// The schema of `images/*.yaml`.
pub fn driver_image() -> serde_json::Value {
    schemars::schema_for!(DriverImage).to_value()
}

/// The schema of `kernels/*.yaml`.
pub fn kernel_family() -> serde_json::Value {
    schemars::schema_for!(KernelFamily).to_value()
}
