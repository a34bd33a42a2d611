//! Progress reports of builds.

use std::time::Duration;

pub use farrier_core::plan::Stage;

/// Receives progress as it happens. `subject` is `<image> for <kernel release>`.
pub trait Reporter: Send + Sync {
    /// Reports the usual duration of the build that starts, if it is known.
    fn usual_duration(&self, _subject: &str, _usual: Duration) {}
    /// Reports the start of a stage.
    fn stage(&self, subject: &str, stage: Stage);
    /// Reports one line of a build's output.
    fn output(&self, subject: &str, line: &str);
    /// Reports a note that does not stop the build, such as the reason why no image was reused.
    fn note(&self, subject: &str, text: &str);
    /// Reports that work on the subject has ended; `outcome` is one line.
    fn finished(&self, subject: &str, outcome: &str);
}
