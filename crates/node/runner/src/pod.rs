//! Paths in the image of a build in a pod, and the times that both the runner and farrier use.

use std::time::Duration;

/// Directory of the runner's files. Steps cannot write to it.
pub const RUNNER_DIR: &str = "/.farrier";
/// The runner, which is the image's command.
pub const RUNNER: &str = "/.farrier/runner";
/// The [plan](crate::plan::Plan), encoded like the content of a frame.
pub const PLAN: &str = "/.farrier/plan";
/// The build context.
pub const CONTEXT: &str = "/.farrier/context";
/// How long the runner keeps the result for farrier to fetch. The pod's deadline must be at least this much later than the
/// build's deadline.
pub const RESULT_TTL: Duration = Duration::from_mins(15);
/// Interval of heartbeats to followers while a build has no output. A heartbeat is an empty frame.
pub const HEARTBEAT: Duration = Duration::from_secs(10);
