//! How far an export, a verification or an import is.

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// What an interrupted export left is verified.
    Resume,
    /// Blobs are fetched and written.
    Export,
    /// Every frame is read and compared.
    Verify,
    /// Blobs are pushed.
    Push,
}

/// Receives the progress of an operation. It must not block.
pub trait Meter: Send + Sync {
    /// A phase begins, of these many bytes.
    fn begin(&self, phase: Phase, bytes: u64);
    /// So many bytes more are done.
    fn advance(&self, bytes: u64);
    /// The phase is over.
    fn end(&self);
}
