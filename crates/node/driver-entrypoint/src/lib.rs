//! Defines the formats that the program `driver-entrypoint` exchanges with farrier's boot check and cluster crates.
//!
//! The formats are the work list for a virtual machine, the report from it, and the list of processes that hold a
//! node's modules.
#![forbid(unsafe_code)]

pub mod holders;
pub mod report;
pub mod work;
