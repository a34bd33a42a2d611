//! Defines the types that farrier's engines share with the program `farrier-runner`.
//!
//! The types are the steps of a Dockerfile's `modules` stage, the paths in a pod, and the wire protocol.

pub mod plan;
pub mod pod;
pub mod wire;
