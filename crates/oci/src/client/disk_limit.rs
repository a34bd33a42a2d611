//! Disk space for downloads. A download that cannot fit is refused before it starts, and one that exceeds its limit is
//! cut off.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

/// Bytes that stay free, for the rest of the machine and for logs of a failure.
const RESERVE: u64 = 256 << 20;

/// Number of bytes written between two checks of the free space.
const CHECK_INTERVAL: u64 = 64 << 20;

/// Bytes that may still be written to the file system of a file or directory.
pub fn free_space(path: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(path)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Fails if `bytes` more do not fit without touching [`RESERVE`].
fn ensure_free_space(directory: &Path, bytes: u64) -> io::Result<()> {
    let free = free_space(directory)?;
    if bytes <= free.saturating_sub(RESERVE) {
        return Ok(());
    }
    let message = format!(
        "not enough free space in {}: {bytes} bytes needed, {free} bytes free, {RESERVE} bytes reserved",
        directory.display()
    );
    Err(io::Error::new(io::ErrorKind::StorageFull, message))
}

/// Disk space for one download. Nothing is reserved: other processes use space at the same time, so the disk is checked
/// repeatedly.
#[derive(Debug)]
pub struct DiskLimit {
    directory: PathBuf,
    most: u64,
    left: u64,
    /// Bytes since the last check.
    unchecked: u64,
}

impl DiskLimit {
    /// Starts a download of at most `most` bytes. `stated` is the announced size, if any; a size above `most`, or one
    /// that does not fit on the disk, is an error.
    pub fn for_download(directory: &Path, stated: Option<u64>, most: u64) -> io::Result<Self> {
        let limit = Self { directory: directory.to_owned(), most, left: most, unchecked: 0 };
        match stated {
            Some(stated) if stated > most => return Err(limit.too_large()),
            stated => ensure_free_space(directory, stated.unwrap_or(0))?,
        }
        Ok(limit)
    }

    /// Accounts for bytes that are about to be written.
    pub fn take(&mut self, bytes: u64) -> io::Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| self.too_large())?;
        self.unchecked += bytes;
        if self.unchecked > CHECK_INTERVAL {
            self.unchecked = 0;
            ensure_free_space(&self.directory, 0)?;
        }
        Ok(())
    }

    fn too_large(&self) -> io::Error {
        io::Error::new(io::ErrorKind::FileTooLarge, format!("it is larger than {} bytes", self.most))
    }
}

/// A reader that fails when it exceeds its limit.
pub(super) struct Bounded<R> {
    pub(super) inner: R,
    pub(super) limit: DiskLimit,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(to)?;
        self.limit.take(read as u64)?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_fit_is_refused_and_what_does_not_end_is_cut() {
        let here = Path::new(".");
        let free = free_space(here).unwrap();
        let kind = |stated, most| DiskLimit::for_download(here, stated, most).unwrap_err().kind();
        assert_eq!(kind(Some(free), u64::MAX), io::ErrorKind::StorageFull);
        assert_eq!(kind(Some(11), 10), io::ErrorKind::FileTooLarge);

        let limit = DiskLimit::for_download(here, None, 10).unwrap();
        let mut bounded = Bounded { inner: io::repeat(0), limit };
        bounded.read_exact(&mut [0; 10]).unwrap();
        assert_eq!(bounded.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
