//! Adapter: room on a disk: what cannot fit is refused before it is fetched, and what does not end is cut.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

/// Bytes that are left free: for the rest of the machine, and for words about what failed.
const RESERVE: u64 = 256 << 20;

/// How many bytes are taken between two looks at the disk.
const LOOK_EVERY: u64 = 64 << 20;

/// Bytes that may still be written to the file system of a file or directory.
pub fn free_space(place: &Path) -> io::Result<u64> {
    let found = rustix::fs::statvfs(place)?;
    Ok(found.f_bavail.saturating_mul(found.f_frsize))
}

/// Fails where so many more bytes do not fit beside [`RESERVE`].
fn ensure_room(directory: &Path, bytes: u64) -> io::Result<()> {
    let free = free_space(directory)?;
    if bytes <= free.saturating_sub(RESERVE) {
        return Ok(());
    }
    let words = format!(
        "not enough room in {}: {bytes} bytes are to be written, {free} are free, and {RESERVE} are left free",
        directory.display()
    );
    Err(io::Error::new(io::ErrorKind::StorageFull, words))
}

/// Room for one download. Nothing is set aside: others take room meanwhile, so that the disk is looked at again and again.
#[derive(Debug)]
pub struct Room {
    directory: PathBuf,
    most: u64,
    left: u64,
    /// Bytes since the last look.
    unseen: u64,
}

impl Room {
    /// Room for what states its size, or does not, of which at most `most` bytes are taken.
    pub fn for_download(directory: &Path, stated: Option<u64>, most: u64) -> io::Result<Self> {
        let room = Self { directory: directory.to_owned(), most, left: most, unseen: 0 };
        match stated {
            Some(stated) if stated > most => return Err(room.too_long()),
            stated => ensure_room(directory, stated.unwrap_or(0))?,
        }
        Ok(room)
    }

    /// Takes so many bytes, before they are written.
    pub fn take(&mut self, bytes: u64) -> io::Result<()> {
        self.left = self.left.checked_sub(bytes).ok_or_else(|| self.too_long())?;
        self.unseen += bytes;
        if self.unseen > LOOK_EVERY {
            self.unseen = 0;
            ensure_room(&self.directory, 0)?;
        }
        Ok(())
    }

    fn too_long(&self) -> io::Error {
        io::Error::new(io::ErrorKind::FileTooLarge, format!("it is longer than {} bytes", self.most))
    }
}

/// A reader that gives no more than there is room for.
pub(super) struct Bounded<R> {
    pub(super) inner: R,
    pub(super) room: Room,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let read = self.inner.read(to)?;
        self.room.take(read as u64)?;
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
        let kind = |stated, most| Room::for_download(here, stated, most).unwrap_err().kind();
        assert_eq!(kind(Some(free), u64::MAX), io::ErrorKind::StorageFull);
        assert_eq!(kind(Some(11), 10), io::ErrorKind::FileTooLarge);

        let room = Room::for_download(here, None, 10).unwrap();
        let mut bounded = Bounded { inner: io::repeat(0), room };
        bounded.read_exact(&mut [0; 10]).unwrap();
        assert_eq!(bounded.read(&mut [0]).unwrap_err().kind(), io::ErrorKind::FileTooLarge);
    }
}
