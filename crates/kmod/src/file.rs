//! Access to the bytes of a module, in memory or in an open file.

use std::{
    cell::RefCell,
    io::{self, Read, Seek, SeekFrom},
    rc::Rc,
};

use object::{ReadRef, read::ReadCache};

/// Bytes of a module file. Tables are read as references, which stay in memory. Everything else is copied into a buffer of the
/// caller.
pub trait ModuleBytes<'d>: ReadRef<'d> {
    /// Fills the buffer with the bytes at an offset.
    ///
    /// # Errors
    ///
    /// The file ends before the buffer is full, or cannot be read.
    fn copy_at(self, offset: u64, buffer: &mut [u8]) -> io::Result<()>;
}

impl<'d> ModuleBytes<'d> for &'d [u8] {
    fn copy_at(self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let bytes = self.read_bytes_at(offset, buffer.len() as u64);
        buffer.copy_from_slice(bytes.map_err(|()| io::ErrorKind::UnexpectedEof)?);
        Ok(())
    }
}

/// Module file of which only the needed parts are read.
#[derive(Debug)]
pub struct CachedFile<F: Read + Seek> {
    cache: ReadCache<Shared<F>>,
    file: Shared<F>,
}

impl<F: Read + Seek> CachedFile<F> {
    /// Wraps an open file.
    pub fn new(file: F) -> Self {
        let file = Shared(Rc::new(RefCell::new(file)));
        Self { cache: ReadCache::new(file.clone()), file }
    }
}

impl<'d, F: Read + Seek> ReadRef<'d> for &'d CachedFile<F> {
    fn len(self) -> Result<u64, ()> {
        self.cache.len()
    }

    fn read_bytes_at(self, offset: u64, size: u64) -> Result<&'d [u8], ()> {
        self.cache.read_bytes_at(offset, size)
    }

    fn read_bytes_at_until(self, range: std::ops::Range<u64>, delimiter: u8) -> Result<&'d [u8], ()> {
        self.cache.read_bytes_at_until(range, delimiter)
    }
}

impl<'d, F: Read + Seek> ModuleBytes<'d> for &'d CachedFile<F> {
    fn copy_at(self, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let mut file = self.file.0.borrow_mut();
        file.seek(SeekFrom::Start(offset))?;
        file.read_exact(buffer)
    }
}

/// File that the cache and the copying reader share.
#[derive(Debug)]
struct Shared<F>(Rc<RefCell<F>>);

impl<F> Clone for Shared<F> {
    fn clone(&self) -> Self {
        Self(Rc::clone(&self.0))
    }
}

impl<F: Read> Read for Shared<F> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.borrow_mut().read(buffer)
    }
}

impl<F: Seek> Seek for Shared<F> {
    fn seek(&mut self, to: SeekFrom) -> io::Result<u64> {
        self.0.borrow_mut().seek(to)
    }
}
