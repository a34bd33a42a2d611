//! What `driver-entrypoint` and farrier tell each other: the work list that goes into a virtual machine, the report that
//! comes out of it, and who holds modules on a node. Pure.
#![forbid(unsafe_code)]

pub mod holders;
pub mod report;
pub mod work;
