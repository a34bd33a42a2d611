//! Paths in the image of a build in a pod, and the times that the runner and farrier agree on.

use std::time::Duration;

/// Directory of the runner's files; steps cannot write to it.
pub const OWN: &str = "/.farrier";
/// The runner, which is the image's command.
pub const RUNNER: &str = "/.farrier/runner";
/// The [plan](crate::plan::Plan), encoded like the content of a frame.
pub const PLAN: &str = "/.farrier/plan";
/// The build context.
pub const CONTEXT: &str = "/.farrier/context";
/// How long the runner keeps the result for farrier to fetch. The pod's deadline must exceed the build's by at least this
/// time.
pub const HOLD: Duration = Duration::from_mins(15);
/// Interval of heartbeats, which are empty frames, to the followers of a build without output.
pub const BEAT: Duration = Duration::from_secs(10);
