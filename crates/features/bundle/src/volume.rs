//! The bytes of a bundle, in one file or in parts of a fixed size: `FILE.001`, `FILE.002` and so on. `cat FILE.*` joins
//! the parts.

use std::{
    fs::TryLockError,
    io::{self, Write},
    ops::Range,
    path::{Path, PathBuf},
};

use fs_err::{self as fs, File, OpenOptions, os::unix::fs::FileExt as _};

use super::{BundleError, Result};

/// Maximum number of parts. Their numbers have three digits, so that `cat FILE.*` joins them in order, and all are open at once.
pub(super) const MAX_PARTS: u64 = 999;

/// The files of a bundle, for reading.
#[derive(Debug)]
pub(super) struct Volume {
    /// The parts in order, each with its range of the bundle's bytes.
    pub(super) parts: Vec<(Range<u64>, File)>,
    pub(super) length: u64,
}

impl Volume {
    pub(super) fn open(paths: &[PathBuf]) -> io::Result<Self> {
        let (mut parts, mut length) = (Vec::new(), 0);
        for path in paths {
            let file = File::open(path)?;
            let end = length + file.metadata()?.len();
            parts.push((length..end, file));
            length = end;
        }
        Ok(Self { parts, length })
    }

    /// Reads from the part that has this offset. Returns 0 at the end of the last part.
    pub(super) fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<usize> {
        let part = self.parts.iter().find(|(range, _)| range.contains(&offset));
        part.map_or(Ok(0), |(range, file)| file.read_at(to, offset - range.start))
    }

    pub(super) fn read_exact_at(&self, mut to: &mut [u8], mut offset: u64) -> io::Result<()> {
        while !to.is_empty() {
            match self.read_at(to, offset)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => (to, offset) = (&mut to[count..], offset + count as u64),
            }
        }
        Ok(())
    }
}

/// Path of a file beside the bundle: the bundle's path with a suffix.
pub(super) fn with_suffix(bundle: &Path, suffix: &str) -> PathBuf {
    let mut path = bundle.as_os_str().to_owned();
    path.push(suffix);
    path.into()
}

/// Removes a link, through which a write would replace another file. A medium can come back with links.
pub(super) fn remove_link(path: &Path) -> io::Result<()> {
    if path.is_symlink() { fs::remove_file(path) } else { Ok(()) }
}

/// Path of a part, or of the whole file without a number.
pub(super) fn part(file: &Path, number: Option<usize>) -> PathBuf {
    with_suffix(file, &number.map(|number| format!(".{number:03}")).unwrap_or_default())
}

/// Number of a part according to its name.
fn number(path: &Path) -> Option<usize> {
    path.extension()?.to_str().filter(|end| end.len() >= 3)?.parse().ok()
}

/// Whether a part, according to its name, belongs to the bundle `name`.
fn is_part_of(name: &Path, part: &Path) -> bool {
    part.with_extension("").file_name() == name.file_name()
}

/// Returns the common name of a bundle's files, and the files in order. A single path may be a file, one part, the
/// parts' common name, or a directory of parts; the other parts are then searched for.
pub(super) fn parts_of(paths: &[PathBuf]) -> Result<(PathBuf, Vec<PathBuf>)> {
    let [path] = paths else { return in_order(paths.to_vec()) };
    // Without a `/` at the end, because the signature is next to the directory.
    let path: &PathBuf = &path.components().collect();
    if path.join("oci-layout").is_file() {
        return Ok((path.clone(), vec![path.clone()]));
    }
    if path.is_dir() {
        let parts = numbered_files(path)?;
        if parts.is_empty() {
            let reason = "the directory has no parts of a bundle".to_owned();
            return Err(BundleError::NotABundle(path.clone(), reason));
        }
        return in_order(parts);
    }
    let stem = number(path).map(|_| path.with_extension(""));
    let mut names = stem.into_iter().chain([path.clone()]);
    let Some(name) = names.find(|name| part(name, Some(1)).is_file()) else {
        return Ok((path.clone(), vec![path.clone()]));
    };
    let parent = path.parent().filter(|parent| *parent != Path::new("")).unwrap_or(Path::new("."));
    let mut parts = numbered_files(parent)?;
    parts.retain(|file| is_part_of(&name, file));
    in_order(parts)
}

/// Returns the files in a directory whose names end with the number of a part.
fn numbered_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let files = fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path()));
    let mut files: Vec<PathBuf> = files.collect::<io::Result<_>>()?;
    files.retain(|file| number(file).is_some());
    Ok(files)
}

/// Sorts the parts of one bundle, and returns them with their common name. Fails unless each part is there once.
fn in_order(mut parts: Vec<PathBuf>) -> Result<(PathBuf, Vec<PathBuf>)> {
    parts.sort_by_key(|path| number(path));
    let name = parts.first().map(|first| first.with_extension("")).unwrap_or_default();
    for (expected, path) in (1..).zip(&parts) {
        if !is_part_of(&name, path) || number(path) != Some(expected) {
            let reason = format!("part {expected} is missing or given twice, before {}", path.display());
            return Err(BundleError::NotABundle(name, reason));
        }
    }
    Ok((name, parts))
}

/// Writes a bundle's files. The content of an earlier run stays until [`Self::truncate`].
pub(super) struct VolumeWriter {
    base: PathBuf,
    /// Size of a part in bytes; `None` for one file.
    size: Option<u64>,
    pub(super) parts: Vec<File>,
    pub(super) offset: u64,
}

impl VolumeWriter {
    pub(super) fn open(base: &Path, size: Option<u64>) -> Result<Self> {
        let mut writer = Self { base: base.to_owned(), size, parts: Vec::new(), offset: 0 };
        loop {
            let path = part(base, writer.number());
            if !writer.parts.is_empty() && !path.exists() {
                break;
            }
            remove_link(&path)?;
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&path)?;
            // Every writer locks the first part first, so a second one stops there.
            match file.try_lock() {
                Err(TryLockError::WouldBlock) => return Err(BundleError::Busy(path)),
                Err(TryLockError::Error(error)) => return Err(error.into()),
                Ok(()) => {}
            }
            let length = file.metadata()?.len();
            if size.is_some_and(|size| length > size) {
                file.set_len(0)?;
            }
            writer.parts.push(file);
            if Some(length) != size {
                break;
            }
        }
        Ok(writer)
    }

    /// Number of the next part, if the bundle has parts.
    fn number(&self) -> Option<usize> {
        self.size.map(|_| self.parts.len() + 1)
    }

    pub(super) fn paths(&self) -> Vec<PathBuf> {
        self.parts.iter().map(|file| file.path().to_owned()).collect()
    }

    /// Continues at this offset, and drops everything after it.
    pub(super) fn truncate(&mut self, offset: u64) -> io::Result<()> {
        let size = self.size.unwrap_or(u64::MAX);
        let kept = usize::try_from(offset.div_ceil(size)).unwrap_or(usize::MAX).max(1).min(self.parts.len());
        for file in self.parts.drain(kept..) {
            fs::remove_file(file.path())?;
        }
        if let Some(last) = self.parts.last() {
            last.set_len(offset - size.saturating_mul(kept as u64 - 1))?;
        }
        self.offset = offset;
        Ok(())
    }

    /// Makes the files durable, and gives them their final names. The first part comes last: without it an interrupted run
    /// continues.
    pub(super) fn finish(self, to: &Path) -> io::Result<()> {
        self.parts.iter().try_for_each(File::sync_data)?;
        for (index, file) in self.parts.iter().enumerate().rev() {
            fs::rename(file.path(), part(to, self.size.map(|_| index + 1)))?;
        }
        Ok(())
    }
}

impl Write for VolumeWriter {
    fn write(&mut self, data: &[u8]) -> io::Result<usize> {
        let size = self.size.unwrap_or(u64::MAX);
        let (index, start) = (usize::try_from(self.offset / size).unwrap_or(usize::MAX), self.offset % size);
        if index == self.parts.len() {
            let path = part(&self.base, self.number());
            remove_link(&path)?;
            self.parts.push(File::create(path)?);
        }
        let limit = data.len().min(usize::try_from(size - start).unwrap_or(usize::MAX));
        let file = self.parts.get(index).ok_or(io::ErrorKind::NotFound)?;
        let count = file.write_at(&data[..limit], start)?;
        self.offset += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
