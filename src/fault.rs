//! Errors in words.

pub use ::oci::client::chain;
