//! Pure: what the loop knows about builds beside what registry and cluster say.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;

use crate::{image::ImageName, kernel::KernelTarget};

/// Where the builds of one image for one kernel stand.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BuildActivity {
    /// What it does at this moment (`compiling`, `queued`); `None` when nothing is under way.
    pub stage: Option<String>,
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
