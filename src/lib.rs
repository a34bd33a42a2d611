//! farrier builds, checks, publishes and rolls out driver-container images for the kernels that a
//! Kubernetes fleet runs, or is about to run.
//!
//! Dependencies point one way: `cli` -> `controller` -> `build` -> `images` -> `parts` -> adapters -> pure crates.
#![forbid(unsafe_code)]

pub mod archive;
mod blocking;
pub mod boot;
pub mod build;
pub mod bundle;
pub mod cache;
pub mod cli;
pub mod cluster;
pub mod collected;
pub mod controller;
pub mod definitions;
pub mod engine;
mod files;
mod git;
pub mod images;
mod init;
pub mod inputs;
pub mod machine;
pub mod net;
pub mod page;
pub mod parts;
pub mod payload;
pub mod registry;
mod resolve;
mod run_notes;
pub mod runtime;
pub mod signing;
pub mod status;
pub mod store;
mod tree_removal;
mod yaml;
