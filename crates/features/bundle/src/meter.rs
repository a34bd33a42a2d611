//! Progress reports of exports, verifications and imports.

/// Phase of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// Verifies the file of an interrupted export.
    Resume,
    /// Fetches and writes blobs.
    Export,
    /// Reads and verifies all frames.
    Verify,
    /// Pushes blobs.
    Push,
}

/// Receives the progress of an operation. It must not block.
pub trait Meter: Send + Sync {
    /// Starts a phase of this many bytes.
    fn begin(&self, phase: Phase, bytes: u64);
    /// Reports progress by this many bytes.
    fn advance(&self, bytes: u64);
    /// Ends the phase.
    fn end(&self);
}

/// Ignores the progress.
impl Meter for () {
    fn begin(&self, _: Phase, _: u64) {}
    fn advance(&self, _: u64) {}
    fn end(&self) {}
}
