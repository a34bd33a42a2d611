//! Adapter: the network: who may be asked, how, and with which secrets.

mod secrets;

pub use secrets::{Secret, SecretError, SecretReader};
