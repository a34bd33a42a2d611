//! Adapter: the JSON Schemas of the definitions and of the check report, made from the Rust types; `schema/` holds them as files.

use crate::{
    image::DriverImage,
    kernel::{AnnouncedKernels, KernelFamily},
    kmod::CheckReport,
    site::Site,
};

/// The schema of `images/*.yaml`.
pub fn driver_image() -> serde_json::Value {
    schemars::schema_for!(DriverImage).to_value()
}

/// The schema of `kernels/*.yaml`.
pub fn kernel_family() -> serde_json::Value {
    schemars::schema_for!(KernelFamily).to_value()
}

/// The schema of `announced/*.yaml`.
pub fn announced_kernels() -> serde_json::Value {
    schemars::schema_for!(AnnouncedKernels).to_value()
}

/// The schema of `site.yaml`.
pub fn site() -> serde_json::Value {
    schemars::schema_for!(Site).to_value()
}

/// The schema of the check report, as `farrier check -o json` prints it.
pub fn check_report() -> serde_json::Value {
    schemars::generate::SchemaSettings::draft2020_12()
        .for_serialize()
        .into_generator()
        .into_root_schema_for::<CheckReport>()
        .to_value()
}
