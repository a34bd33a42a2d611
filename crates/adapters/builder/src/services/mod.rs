//! Services shared by builds, image operations and the controller: definitions, cache, registries, engine, reporter.

mod boot;
mod build_services;
mod error;
mod lazy;
mod outputs;
mod report;
mod retry;

pub use boot::{BootCheck, BootCheckError, BootChecker};
pub use build_services::{BuildLimits, BuildServices, NeedsRegistry};
pub use build_services::{MAX_CONCURRENT_REQUESTS, entries, image_location};
pub use error::{BuildError, BuildProblem, ProblemKind, Result};
pub use lazy::{LazyEngine, LazyEntrypoint};
pub use outputs::OutputMaker;
pub use report::{Reporter, Stage};
pub use retry::with_retry;
