//! Pure: formats that `driver-entrypoint` and farrier exchange. These are the work list for a virtual machine, the
//! report from it, and the list of holders of modules on a node.
#![forbid(unsafe_code)]

pub mod holders;
pub mod report;
pub mod work;
