//! Disk space for downloads. A download that cannot fit is refused before it starts. A download that exceeds its limit is aborted.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

/// Bytes that stay free for other programs, and for logs of a failure; on small file systems a twentieth of the size.
const RESERVE: u64 = 256 << 20;

/// Number of bytes written between two checks of the free space.
const CHECK_INTERVAL: u64 = 64 << 20;

/// Returns the free bytes on the file system of a file or directory.
pub fn free_space(path: &Path) -> io::Result<u64> {
    Ok(free_and_size(path)?.0)
}

/// Returns the free bytes and the size of a file system.
fn free_and_size(path: &Path) -> io::Result<(u64, u64)> {
    let stats = rustix::fs::statvfs(path)?;
    let bytes = |blocks: u64| blocks.saturating_mul(stats.f_frsize);
    Ok((bytes(stats.f_bavail), bytes(stats.f_blocks)))
}

/// Returns the bytes that stay free on a file system of `size` bytes.
fn reserve_of(size: u64) -> u64 {
    RESERVE.min(size / 20)
}

/// Fails if `bytes` more do not fit above the reserve.
fn ensure_free_space(directory: &Path, bytes: u64) -> io::Result<()> {
    let (free, size) = free_and_size(directory)?;
    let reserve = reserve_of(size);
    if bytes <= free.saturating_sub(reserve) {
        return Ok(());
    }
    let message = format!(
        "not enough free space in {}: {bytes} bytes needed, {free} bytes free, {reserve} bytes reserved",
        directory.display()
    );
    Err(io::Error::new(io::ErrorKind::StorageFull, message))
}

/// Disk space for one download. Checks the free space repeatedly instead of reserving it, because other processes use the disk too.
#[derive(Debug)]
pub struct DiskLimit {
    directory: PathBuf,
    max_bytes: u64,
    remaining: u64,
    /// Bytes since the last check.
    unchecked: u64,
}

impl DiskLimit {
    /// Starts a download of at most `max_bytes` bytes. Fails if the announced size, if any, is above `max_bytes` or does not fit on
    /// the disk.
    pub fn for_download(directory: &Path, announced: Option<u64>, max_bytes: u64) -> io::Result<Self> {
        let limit = Self { directory: directory.to_owned(), max_bytes, remaining: max_bytes, unchecked: 0 };
        match announced {
            Some(announced) if announced > max_bytes => return Err(limit.too_large()),
            announced => ensure_free_space(directory, announced.unwrap_or(0))?,
        }
        Ok(limit)
    }

    /// Accounts for bytes that are about to be written.
    pub fn take(&mut self, bytes: u64) -> io::Result<()> {
        self.remaining = self.remaining.checked_sub(bytes).ok_or_else(|| self.too_large())?;
        self.unchecked += bytes;
        if self.unchecked > CHECK_INTERVAL {
            self.unchecked = 0;
            ensure_free_space(&self.directory, 0)?;
        }
        Ok(())
    }

    fn too_large(&self) -> io::Error {
        let message = format!("the download is larger than {} bytes", self.max_bytes);
        io::Error::new(io::ErrorKind::FileTooLarge, message)
    }
}

/// A reader that fails when it exceeds its limit.
pub struct Bounded<R> {
    /// The reader.
    pub inner: R,
    /// Disk space that the bytes may take.
    pub limit: DiskLimit,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(buffer)?;
        self.limit.take(read as u64)?;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `/run` of a small machine has less than [`RESERVE`].
    #[test]
    fn small_file_systems_have_a_small_reserve() {
        assert_eq!(reserve_of(100 << 20), 5 << 20);
        assert_eq!(reserve_of(100 << 30), RESERVE);
    }

    #[test]
    fn too_large_downloads_are_refused_or_aborted() {
        let here = Path::new(".");
        let free = free_space(here).unwrap();
        let kind =
            |announced, max_bytes| DiskLimit::for_download(here, announced, max_bytes).unwrap_err().kind();
        assert_eq!(kind(Some(free), u64::MAX), io::ErrorKind::StorageFull);
        assert_eq!(kind(Some(11), 10), io::ErrorKind::FileTooLarge);

        let limit = DiskLimit::for_download(here, None, 10).unwrap();
        let mut bounded = Bounded { inner: io::repeat(0), limit };
        bounded.read_exact(&mut [0; 10]).unwrap();
        assert_eq!(bounded.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
