//! Adapter: the build pipeline: builds one image for one kernel, from headers to a published digest. Each stage has a
//! file.

mod assemble;
mod base;
mod cell;
mod check;
mod compile;
mod cross;
pub(crate) mod diagnosis;
mod document;
mod failures;
mod file_log;
mod headers;
mod host_tools;
mod job;
mod kept;
mod logs;
mod needs;
mod pipeline;
mod pod;
mod publish;
mod reuse;
mod sign;
mod single;
#[cfg(test)]
pub(crate) mod testing;
mod verified_tree;

pub(crate) use cell::add_needs;
pub use cell::{cell, dockerfile};
pub use check::check_with_kernel_image;
pub(crate) use failures::{Attempts, attempt, builds_elsewhere, forget_failure, known_failures};
pub use file_log::FileLog;
pub(crate) use logs::{LogReader, LogTimes, log_of, logs_for};
pub use pipeline::{BuildOptions, Built, build};
pub(crate) use publish::add_tags;
pub use single::{BuildOutcome, build_one};
