//! What `driver-entrypoint` and farrier tell each other: the work list that goes into a virtual machine, and
//! the report that comes out of it. Pure.
#![forbid(unsafe_code)]

pub mod report;
pub mod work;
