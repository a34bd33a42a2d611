//! Reasons why a file is not a valid kernel module.

use std::fmt;

use super::{Verdict, vmlinuz::Method};

/// Result of reading a module.
pub(super) type Result<T, E = ModuleError> = std::result::Result<T, E>;

/// Reason why a kernel would not accept a file as a module, or why this crate cannot read it.
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

    /// This parser cannot predict the kernel's answer.
    pub(super) fn unknown(message: impl Into<String>, remedy: &'static str) -> Self {
        Self { message: message.into(), verdict: Verdict::Unknown, remedy }
    }

    pub(super) fn damaged(message: impl Into<String>) -> Self {
        Self::refused(message, "rebuild it: the file is damaged, or is not a kernel module")
    }

    /// The file does not start as an ELF object does. The name of a compressed file must have the suffix of the compression.
    pub(super) fn not_elf(start: &[u8]) -> Self {
        let (compression, remedy) = match Method::of(start) {
            Some(Method::Gzip) => ("gzip", "name the file .ko.gz, or decompress it with gzip -d"),
            Some(Method::Xz) => ("xz", "name the file .ko.xz, or decompress it with xz -d"),
            Some(Method::Zstd) => ("zstd", "name the file .ko.zst, or decompress it with zstd -d"),
            _ => return Self::damaged("the file is not an ELF object"),
        };
        Self::refused(
            format!("the file is compressed with {compression}, which its name does not say"),
            remedy,
        )
    }

    pub(super) fn header(reason: &str) -> Self {
        Self::damaged(format!("the ELF header is damaged: {reason}"))
    }

    pub(super) fn malformed(section: &str, reason: &str) -> Self {
        Self::damaged(format!("section {section} {reason}"))
    }

    /// The file's bytes could not be read.
    pub(super) fn read(part: &str) -> Self {
        Self::unknown(format!("cannot read {part} of the module"), "check the disk for faults, and rebuild")
    }

    /// The compressed data is damaged, or decompresses to too much.
    pub fn decompress(reason: impl fmt::Display) -> Self {
        Self::damaged(format!("cannot decompress the module: {reason}"))
    }

    /// The uncompressed module is larger than `limit` bytes.
    pub fn too_large(limit: u64) -> Self {
        let remedy =
            "strip its debug information (strip --strip-debug), and look for data behind the ELF file";
        Self::refused(format!("the module is larger than {} MiB", limit >> 20), remedy)
    }

    /// Whether the kernel refuses such a file (`refused`) or only this parser cannot read it (`unknown`).
    pub fn verdict(&self) -> Verdict {
        self.verdict
    }

    /// Advice on how to fix the error.
    pub fn remedy(&self) -> &'static str {
        self.remedy
    }
}
