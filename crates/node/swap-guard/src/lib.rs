//! The plan of a guarded driver swap.
//!
//! A driver container writes a [request](request::Request). The guard on the host performs the swap, and records each
//! phase in a [journal](journal::Journal) before it begins. [`swap`] decides which phase follows, also after the guard was
//! killed. The program `driver-entrypoint` has both sides: it performs the phases, and it follows the journal.
#![forbid(unsafe_code)]

pub mod journal;
pub mod request;
pub mod swap;
