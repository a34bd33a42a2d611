//! Pure: what the loop knows about builds beside what registry and cluster say.

use std::{collections::BTreeMap, fmt, time::Duration};

use jiff::Timestamp;

use crate::{image::ImageName, kernel::KernelTarget};

/// What a build does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Waiting for room.
    Queued,
    /// Beginning.
    Starting,
    /// Fetching the kernel's headers.
    Headers,
    /// Fetching the driver's sources.
    Sources,
    /// Fetching what needed images expose.
    Needs,
    /// Getting or making the toolchain.
    Toolchain,
    /// Joining toolchain and headers in the engine.
    Base,
    /// Waiting until the cluster has room for the build.
    Waiting,
    /// Compiling.
    Compile,
    /// Looking whether an image for another kernel fits.
    Reuse,
    /// Checking the modules against the kernel.
    Check,
    /// Signing the modules.
    Sign,
    /// Booting the kernel and loading the modules.
    Boot,
    /// Writing the image.
    Assemble,
    /// Pushing the image.
    Publish,
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Queued => "queued",
            Self::Starting => "starting",
            Self::Headers => "fetching headers",
            Self::Sources => "fetching sources",
            Self::Needs => "fetching needed headers",
            Self::Toolchain => "preparing the toolchain",
            Self::Base => "putting headers into the toolchain image",
            Self::Waiting => "waiting for the cluster to run the build",
            Self::Compile => "compiling",
            Self::Reuse => "looking for an image to reuse",
            Self::Check => "checking",
            Self::Sign => "signing the modules",
            Self::Boot => "booting the kernel to load the modules",
            Self::Assemble => "assembling the image",
            Self::Publish => "publishing",
        })
    }
}

/// Where the builds of one image for one kernel stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuildActivity {
    /// What it does at this moment; `None` when nothing is under way.
    pub stage: Option<Stage>,
    /// Since when.
    pub since: Option<Timestamp>,
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

/// By image and kernel target.
pub type Activity = BTreeMap<(ImageName, KernelTarget), BuildActivity>;
