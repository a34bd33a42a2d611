//! Adapter: what a pass tells while it runs.

use std::fmt;

/// Where a target stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// Fetching the kernel's headers.
    Headers,
    /// Fetching the driver's sources.
    Sources,
    /// Fetching what needed images expose.
    Needs,
    /// Getting or making the toolchain image.
    Toolchain,
    /// Joining toolchain and headers in the engine.
    Base,
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
            Self::Headers => "fetching headers",
            Self::Sources => "fetching sources",
            Self::Needs => "fetching needed headers",
            Self::Toolchain => "preparing the toolchain image",
            Self::Base => "putting headers into the toolchain image",
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

/// Receives what a pass does, as it does it. `subject` is `<image> for <kernel release>`.
pub trait Reporter: Send + Sync {
    /// A stage begins.
    fn stage(&self, subject: &str, stage: Stage);
    /// One line of a build's output.
    fn output(&self, subject: &str, line: &str);
    /// Something to know that stops nothing, such as why an image was not reused.
    fn note(&self, subject: &str, text: &str);
    /// The target is done; `outcome` is one line.
    fn finished(&self, subject: &str, outcome: &str);
}
