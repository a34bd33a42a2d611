//! Builds, checks and publishes one driver image for one kernel, for the controller and the commands.
//!
//! Each stage of the pipeline is a file in `src/`. The module [`images`] signs, verifies, copies and combines published
//! images.
#![forbid(unsafe_code)]

mod assemble;
mod base;
mod cell;
mod cell_build;
mod check;
mod compile;
mod cross;
pub mod diagnosis;
mod document;
mod engine_images;
mod failures;
mod file_log;
mod firmware;
mod headers;
mod host_tools;
pub mod images;
mod logs;
mod needs;
mod pipeline;
mod pod;
mod publish;
pub mod resolve;
mod reuse;
pub mod services;
mod sign;
mod single;
#[cfg(any(test, feature = "testing"))]
#[allow(clippy::unwrap_used, clippy::expect_used, clippy::missing_panics_doc, clippy::new_without_default)]
pub mod testing;
mod verified_tree;

pub use cell::add_needs;
pub use cell::{dockerfile, plan_cell};
pub use check::check_with_kernel_image;
pub use document::{file_digest, source_material, terms};
pub use failures::{Attempts, attempt, builds_elsewhere, forget_failure, known_failures};
pub use file_log::FileLog;
pub use logs::{DAYS, LogReader, LogTimes, log_of, logs_for};
pub use pipeline::{BuildOptions, Built, build};
pub use publish::add_tags;
pub use single::{BuildOutcome, build_one};
