//! Progress of builds. Only this process knows it: neither the registry nor the cluster stores it.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;

use super::BuildTime;
use crate::{image::ImageName, kernel::KernelTarget};

/// Stage that a build is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Stage {
    /// Waiting for a free builder.
    Queued,
    /// Starting.
    Starting,
    /// Fetching the kernel's headers.
    #[strum(to_string = "fetching headers")]
    Headers,
    /// Fetching the driver's sources.
    #[strum(to_string = "fetching sources")]
    Sources,
    /// Fetching the exposed headers of needed images.
    #[strum(to_string = "fetching needed headers")]
    Needs,
    /// Fetching or building the toolchain.
    #[strum(to_string = "preparing the toolchain")]
    Toolchain,
    /// Combining toolchain and headers in the engine.
    #[strum(to_string = "putting headers into the toolchain image")]
    Base,
    /// Waiting until the cluster has room for the build.
    #[strum(to_string = "waiting for the cluster to run the build")]
    Waiting,
    /// Compiling.
    #[strum(to_string = "compiling")]
    Compile,
    /// Looking for an image of another kernel to reuse.
    #[strum(to_string = "looking for an image to reuse")]
    Reuse,
    /// Checking the modules against the kernel.
    #[strum(to_string = "checking")]
    Check,
    /// Signing the modules.
    #[strum(to_string = "signing the modules")]
    Sign,
    /// Booting the kernel and loading the modules.
    #[strum(to_string = "booting the kernel to load the modules")]
    Boot,
    /// Writing the image.
    #[strum(to_string = "assembling the image")]
    Assemble,
    /// Pushing the image.
    #[strum(to_string = "publishing")]
    Publish,
    /// Built by another process on this machine, which does not report its stage.
    #[strum(to_string = "being built on this machine")]
    Elsewhere,
}

/// Build state of one image for one kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuildActivity {
    /// Current stage; `None` when no build runs.
    pub stage: Option<Stage>,
    /// Start of the current stage.
    pub since: Option<Timestamp>,
    /// Start of the running build.
    pub began: Option<Timestamp>,
    /// Usual duration of this image's builds, where known.
    pub usual: Option<Duration>,
    /// Number of attempts with the current inputs.
    pub attempts: u32,
    /// Time of the next retry after a transient fault.
    pub next_retry: Option<Timestamp>,
    /// Duration of the last attempt.
    pub took: Option<Duration>,
    /// Error of the last attempt with its causes; `None` after a success.
    pub error: Option<String>,
    /// Last lines of the build's output.
    pub log_tail: Vec<String>,
}

impl BuildActivity {
    /// Returns the running build's elapsed time and the usual time; `None` where neither is known.
    pub fn time(&self, now: Timestamp) -> Option<BuildTime> {
        let elapsed = self.began.map(|began| now.duration_since(began).as_secs().try_into().unwrap_or(0));
        let time =
            BuildTime { elapsed_seconds: elapsed, usual_seconds: self.usual.map(|usual| usual.as_secs()) };
        (time != BuildTime::default()).then_some(time)
    }
}

/// Build activity by image and kernel target.
pub type Activity = BTreeMap<(ImageName, KernelTarget), BuildActivity>;
