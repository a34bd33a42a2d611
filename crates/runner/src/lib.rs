//! What a build in place is: the steps of a Dockerfile's `modules` stage, and the forms in which farrier and the runner
//! talk about them.

pub mod plan;
pub mod pod;
pub mod wire;
