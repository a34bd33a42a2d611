//! Provides the cache directory, the unpacking of untrusted archives, and this machine's resources to all crates that do I/O.
#![forbid(unsafe_code)]

pub mod archive;
pub mod blocking;
pub mod cache;
pub mod cpio;
pub mod files;
pub mod machine;
pub mod run_notes;
pub mod tree_removal;
