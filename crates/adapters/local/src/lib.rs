//! Adapter: this machine: archives that may be hostile, the cache directory with its quotas and its quarantine, processors and
//! memory.
#![forbid(unsafe_code)]

pub mod archive;
pub mod blocking;
pub mod cache;
pub mod files;
pub mod machine;
pub mod run_notes;
pub mod tree_removal;
