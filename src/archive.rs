//! Adapter: unpacking of untrusted archives.

use std::{
    io::Read,
    path::{Path, PathBuf},
};

/// Bounds on what an archive may hold.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Entries.
    pub entries: u64,
    /// Bytes of all files together, unpacked.
    pub bytes: u64,
    /// Path components of one entry.
    pub depth: usize,
}

impl Default for Limits {
    /// 500,000 entries, 16 GiB, 64 levels: several times the largest driver tree.
    fn default() -> Self {
        Self { entries: 500_000, bytes: 16 << 30, depth: 64 }
    }
}

/// Why an archive was not unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// A path that leaves the destination, is absolute, or holds `..`.
    #[error("entry {0:?} would be outside the archive's own tree")]
    Outside(String),
    /// A device, a socket, a FIFO.
    #[error("entry {0:?} is a {1}, which no source or payload holds")]
    Kind(String, &'static str),
    /// Over a limit.
    #[error("archive holds more than {0}")]
    Limit(String),
    /// Truncated or damaged.
    #[error("archive is damaged or truncated")]
    Damaged(#[source] std::io::Error),
    /// Writing failed.
    #[error("write {path}")]
    Write {
        /// What was written.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: std::io::Error,
    },
}

/// Unpacks a tar stream (not compressed) into `dest`, which exists. Regular files, directories, hard
/// and symbolic links; modes kept without set-id bits, owners not kept. A symbolic link may point
/// anywhere, but nothing is ever written through one.
pub fn unpack_tar(reader: impl Read, dest: &Path, limits: &Limits) -> Result<(), UnpackError> {
    let _ = (reader, dest, limits);
    todo!("headers")
}

/// As [`unpack_tar`], for a file that is plain or compressed with gzip, xz or zstd (told by its first bytes).
pub fn unpack_file(archive: &Path, dest: &Path, limits: &Limits) -> Result<(), UnpackError> {
    let _ = (archive, dest, limits);
    todo!("headers")
}
