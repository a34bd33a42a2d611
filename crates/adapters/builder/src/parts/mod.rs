//! Services shared by builds, image operations and the controller: definitions, cache, registries, engine, reporter.

mod boot;
mod error;
mod lazy;
mod outputs;
mod report;
mod retry;
mod shared;

pub use boot::{BootCheck, BootCheckError, BootChecker};
pub use error::{Finding, FindingKind, Result, TargetError};
pub use lazy::{LazyEngine, LazyEntrypoint};
pub use outputs::OutputMaker;
pub use report::{Reporter, Stage};
pub use retry::with_retry;
pub use shared::{BuildLimits, NeedsRegistry, Parts};
pub use shared::{MAX_CONCURRENT_REQUESTS, entries, image_location};
