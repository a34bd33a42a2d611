//! Types that farrier and the runner share: the steps of a Dockerfile's `modules` stage, the paths in a pod, and the wire
//! protocol.

pub mod plan;
pub mod pod;
pub mod wire;
