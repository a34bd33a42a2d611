//! farrier builds, checks, publishes and rolls out driver-container images for the kernels that a
//! Kubernetes fleet runs, or is about to run.
//!
//! Dependencies point one way: `cli` -> `controller` -> adapters -> pure modules.
#![forbid(unsafe_code)]

pub mod archive;
mod blocking;
pub mod boot;
pub mod bundle;
pub mod cache;
pub mod cli;
pub mod cluster;
pub mod controller;
pub mod definitions;
pub mod engine;
pub mod fault;
pub mod headers;
pub mod image;
mod jitter;
pub mod kernel;
pub mod kmod;
pub mod machine;
pub mod net;
pub mod oci;
pub mod payload;
pub mod plan;
pub mod provenance;
pub mod registry;
pub mod runtime;
pub mod signing;
pub mod site;
pub mod status;
pub mod store;
pub mod template;
