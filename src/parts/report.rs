//! Adapter: what a pass tells while it runs.

use std::time::Duration;

pub use crate::plan::Stage;

/// Receives what a pass does, as it does it. `subject` is `<image> for <kernel release>`.
pub trait Reporter: Send + Sync {
    /// How long the build that begins usually takes, where that is known.
    fn usual(&self, _subject: &str, _usual: Duration) {}
    /// A stage begins.
    fn stage(&self, subject: &str, stage: Stage);
    /// One line of a build's output.
    fn output(&self, subject: &str, line: &str);
    /// Something to know that stops nothing, such as why an image was not reused.
    fn note(&self, subject: &str, text: &str);
    /// The target is done; `outcome` is one line.
    fn finished(&self, subject: &str, outcome: &str);
}
