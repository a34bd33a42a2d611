//! Streams cpio archives in the `newc` format, which the kernel unpacks as an initramfs
//! (`Documentation/driver-api/early-userspace/buffer-format.rst`).

use std::{
    io::{self, Read, Write},
    os::unix::ffi::OsStrExt as _,
    path::Path,
};

/// Maximum size of a file in bytes: the header stores sizes in 32 bits.
const MAX_FILE: u64 = u32::MAX as u64;

const DIRECTORY: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// Writer for an archive whose times are 0 and whose owners are root. The parent directories of an entry must be written before
/// the entry.
pub struct CpioWriter<W> {
    out: W,
    inode: u32,
}

impl<W: Write> CpioWriter<W> {
    /// Starts an archive.
    pub fn new(out: W) -> Self {
        Self { out, inode: 0 }
    }

    /// Writes a directory.
    pub fn directory(&mut self, name: impl AsRef<Path>) -> io::Result<()> {
        self.header(name, DIRECTORY | 0o755, 0, (0, 0))
    }

    /// Writes `/dev/console`, which the kernel opens for init before `/dev` is mounted.
    pub fn console(&mut self) -> io::Result<()> {
        self.header("dev/console", CHARACTER_DEVICE | 0o600, 0, (5, 1))
    }

    /// Writes a symbolic link.
    pub fn symlink(&mut self, name: impl AsRef<Path>, target: &Path) -> io::Result<()> {
        let target = target.as_os_str().as_bytes();
        self.entry(name, SYMLINK | 0o777, target.len() as u64, &mut &*target)
    }

    /// Writes a file from memory.
    pub fn bytes(&mut self, name: impl AsRef<Path>, mode: u32, bytes: &[u8]) -> io::Result<()> {
        self.file(name, mode, bytes.len() as u64, &mut &*bytes)
    }

    /// Writes a file of `size` bytes. Fails if the reader has fewer bytes.
    pub fn file(
        &mut self,
        name: impl AsRef<Path>,
        mode: u32,
        size: u64,
        reader: &mut dyn Read,
    ) -> io::Result<()> {
        self.entry(name, REGULAR | mode, size, reader)
    }

    fn entry(
        &mut self,
        name: impl AsRef<Path>,
        mode: u32,
        size: u64,
        reader: &mut dyn Read,
    ) -> io::Result<()> {
        if size > MAX_FILE {
            return Err(io::Error::new(
                io::ErrorKind::FileTooLarge,
                "a file in an initramfs must be smaller than 4 GiB",
            ));
        }
        self.header(name, mode, size, (0, 0))?;
        let copied = io::copy(&mut reader.take(size), &mut self.out)?;
        if copied < size {
            return Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the file was truncated during the read",
            ));
        }
        self.pad(size)
    }

    /// Writes the trailer.
    pub fn finish(mut self) -> io::Result<()> {
        self.header("TRAILER!!!", 0, 0, (0, 0))?;
        self.out.flush()
    }

    fn header(
        &mut self,
        name: impl AsRef<Path>,
        mode: u32,
        size: u64,
        (major, minor): (u32, u32),
    ) -> io::Result<()> {
        self.inode += 1;
        let (inode, name) = (self.inode, name.as_ref().as_os_str().as_bytes());
        let length = name.len() + 1;
        // Fields: inode, mode, user, group, links, time, size, device (major, minor), special device (major, minor), length of
        // the name, checksum.
        write!(
            self.out,
            "070701{inode:08x}{mode:08x}{:08x}{:08x}{:08x}{:08x}{size:08x}{:08x}{:08x}{major:08x}{minor:08x}\
             {length:08x}{:08x}",
            0, 0, 1, 0, 0, 0, 0
        )?;
        self.out.write_all(name)?;
        self.out.write_all(&[0])?;
        // The header has 110 bytes.
        self.pad(110 + length as u64)
    }

    /// Pads to a multiple of four bytes.
    fn pad(&mut self, written: u64) -> io::Result<()> {
        io::copy(&mut io::repeat(0).take(written.next_multiple_of(4) - written), &mut self.out).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        process::{Command, Stdio},
    };

    use super::*;

    fn sample() -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut archive = CpioWriter::new(&mut bytes);
        archive.directory("d").unwrap();
        archive.bytes("d/empty", 0o400, b"").unwrap();
        archive.symlink("d/link", Path::new("empty")).unwrap();
        for length in 1..=5 {
            archive.bytes(format!("d/{length}"), 0o640, &b"abcde"[..length]).unwrap();
        }
        archive.finish().unwrap();
        bytes
    }

    #[test]
    fn busybox_unpacks_the_archive() {
        let dir = tempfile::tempdir().unwrap();
        let mut cpio = Command::new("busybox")
            .args(["cpio", "-i", "-d", "-m"])
            .current_dir(dir.path())
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("start busybox (Debian package busybox)");
        cpio.stdin.take().unwrap().write_all(&sample()).unwrap();
        let output = cpio.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(fs::read(dir.path().join("d/empty")).unwrap(), b"");
        assert_eq!(fs::read_link(dir.path().join("d/link")).unwrap(), Path::new("empty"));
        for length in 1..=5 {
            assert_eq!(fs::read(dir.path().join(format!("d/{length}"))).unwrap(), b"abcde"[..length]);
        }
    }

    #[test]
    fn headers_are_110_bytes_and_entries_are_aligned() {
        let bytes = sample();
        assert_eq!(bytes.len() % 4, 0);
        let starts: Vec<usize> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"070701")).collect();
        assert_eq!(starts.len(), 9);
        assert!(starts.iter().all(|start| start % 4 == 0), "{starts:?}");
        // The name of the first entry follows its header.
        assert_eq!(&bytes[110..112], b"d\0");
    }

    #[test]
    fn a_file_that_shrinks_or_is_too_large_is_an_error() {
        let mut archive = CpioWriter::new(io::sink());
        let error = archive.file("x", 0o400, 2, &mut &b"a"[..]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        let error = archive.file("x", 0o400, 1 << 32, &mut io::empty()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::FileTooLarge);
    }
}
