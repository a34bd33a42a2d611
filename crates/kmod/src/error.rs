//! Pure: why a file is no kernel module.

use std::fmt;

use super::Verdict;

/// What reading a module gives.
pub(super) type Result<T, E = ModuleError> = std::result::Result<T, E>;

/// Why a file is no module that a kernel would take.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct ModuleError {
    message: String,
    verdict: Verdict,
    remedy: &'static str,
}

impl ModuleError {
    /// The kernel refuses such a file.
    pub(super) fn refused(message: impl Into<String>, remedy: &'static str) -> Self {
        Self { message: message.into(), verdict: Verdict::Refused, remedy }
    }

    /// Only this reader cannot tell what the kernel would say.
    pub(super) fn unknown(message: impl Into<String>, remedy: &'static str) -> Self {
        Self { message: message.into(), verdict: Verdict::Unknown, remedy }
    }

    pub(super) fn damaged(message: impl Into<String>) -> Self {
        Self::refused(message, "build it again: the file is damaged, or is no kernel module")
    }

    pub(super) fn header(reason: &str) -> Self {
        Self::damaged(format!("the ELF header is damaged: {reason}"))
    }

    pub(super) fn malformed(section: &str, reason: &str) -> Self {
        Self::damaged(format!("section {section} {reason}"))
    }

    /// The bytes could not be had, though the file should hold them.
    pub(super) fn read(what: &str) -> Self {
        Self::unknown(format!("read {what} of the module"), "look for a fault of the disk, and build again")
    }

    /// The file's compression is damaged, or hides too much.
    pub fn decompress(reason: impl fmt::Display) -> Self {
        Self::damaged(format!("decompress the module: {reason}"))
    }

    /// Does the kernel refuse such a file, or is it only this reader that cannot tell?
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        self.remedy
    }
}
