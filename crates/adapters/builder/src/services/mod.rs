//! Services shared by builds, image operations and the controller, in groups for the consumers: access to images, build
//! tools, and control of the process.

mod boot;
mod build_services;
mod error;
mod image_access;
mod lazy;
mod outputs;
mod process;
mod report;
mod retry;
mod tools;

pub use boot::{BootCheck, BootCheckError, BootChecker};
pub use build_services::{BuildServices, MAX_CONCURRENT_REQUESTS, entries, image_location};
pub use error::{BuildError, BuildProblem, ProblemKind, Result};
pub(crate) use image_access::MAX_DOCUMENT;
pub use image_access::{ImageAccess, NeedsRegistry};
pub use lazy::{LazyEngine, LazyEntrypoint};
pub use outputs::{MadeOutput, OutputMaker};
pub use process::ProcessControl;
pub use report::{Reporter, Stage};
pub use retry::with_retry;
pub use tools::{BuildLimits, BuildTools};
