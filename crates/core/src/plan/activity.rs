//! Pure: what the loop knows about builds beside what registry and cluster say.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;

use super::BuildTime;
use crate::{image::ImageName, kernel::KernelTarget};

/// What a build does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, strum::Display)]
#[strum(serialize_all = "lowercase")]
pub enum Stage {
    /// Waiting for room.
    Queued,
    /// Beginning.
    Starting,
    /// Fetching the kernel's headers.
    #[strum(to_string = "fetching headers")]
    Headers,
    /// Fetching the driver's sources.
    #[strum(to_string = "fetching sources")]
    Sources,
    /// Fetching what needed images expose.
    #[strum(to_string = "fetching needed headers")]
    Needs,
    /// Getting or making the toolchain.
    #[strum(to_string = "preparing the toolchain")]
    Toolchain,
    /// Joining toolchain and headers in the engine.
    #[strum(to_string = "putting headers into the toolchain image")]
    Base,
    /// Waiting until the cluster has room for the build.
    #[strum(to_string = "waiting for the cluster to run the build")]
    Waiting,
    /// Compiling.
    #[strum(to_string = "compiling")]
    Compile,
    /// Looking whether an image for another kernel fits.
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
    /// Something that a process of this machine does, and does not tell.
    #[strum(to_string = "being built on this machine")]
    Elsewhere,
}

/// Where the builds of one image for one kernel stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuildActivity {
    /// What it does at this moment; `None` when nothing is under way.
    pub stage: Option<Stage>,
    /// Since when.
    pub since: Option<Timestamp>,
    /// When the build that is under way began.
    pub began: Option<Timestamp>,
    /// How long builds of this image usually take, where that is known.
    pub usual: Option<Duration>,
    /// Attempts with the present inputs.
    pub attempts: u32,
    /// When a passing fault is tried again.
    pub next_retry: Option<Timestamp>,
    /// How long the last attempt took.
    pub took: Option<Duration>,
    /// Why the last attempt failed, with causes; `None` after a success.
    pub error: Option<String>,
    /// The last lines of the build's output.
    pub log_tail: Vec<String>,
}

impl BuildActivity {
    /// How long the build that is under way has taken, and usually takes; `None` where neither is known.
    pub fn time(&self, now: Timestamp) -> Option<BuildTime> {
        let elapsed = self.began.map(|began| now.duration_since(began).as_secs().try_into().unwrap_or(0));
        let time =
            BuildTime { elapsed_seconds: elapsed, usual_seconds: self.usual.map(|usual| usual.as_secs()) };
        (time != BuildTime::default()).then_some(time)
    }
}

/// By image and kernel target.
pub type Activity = BTreeMap<(ImageName, KernelTarget), BuildActivity>;
