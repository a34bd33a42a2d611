//! Pure: where things are in the image of a build in a pod, and how long the runner there waits.

use std::time::Duration;

/// The directory of all that is the runner's: no step writes there.
pub const OWN: &str = "/.farrier";
/// The runner itself: the image's command.
pub const RUNNER: &str = "/.farrier/runner";
/// The [plan](crate::plan::Plan), as the bytes of a frame.
pub const PLAN: &str = "/.farrier/plan";
/// The build context.
pub const CONTEXT: &str = "/.farrier/context";
/// How long the result waits to be fetched. A pod's own deadline has to be longer than the build's by at least so much.
pub const HOLD: Duration = Duration::from_mins(15);
/// How often whoever follows a build that says nothing hears that it is there: by a frame without a byte.
pub const BEAT: Duration = Duration::from_secs(10);
