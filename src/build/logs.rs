//! Adapter: the logs of builds, as the cache keeps them.

use std::{
    fs::TryLockError,
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
};

use fs_err::{self as fs, File};

use crate::{
    cache::{Cache, CacheError},
    image::ImageName,
    kernel::KernelRelease,
    plan::Cell,
};

const KIND: &str = "logs";
/// Digits of the input hash in a log's name.
const DIGITS: usize = 12;

/// Where the log of a build goes; it stays for as long as the build does.
pub(super) fn log_path(cache: &Cache, cell: &Cell) -> Result<PathBuf, CacheError> {
    let (image, release, hash) = (&cell.image, &cell.target.release, cell.input_hash.short());
    let name = format!("{image}-{release}-{hash}.log");
    cache.hold(KIND, &name)?;
    cache.place(KIND, &name)
}

/// The log of an image's newest build for a kernel, of those that this cache keeps.
pub(crate) fn newest_log(
    cache: &Cache,
    image: &ImageName,
    release: &KernelRelease,
) -> Result<Option<PathBuf>, CacheError> {
    let start = format!("{image}-{release}-");
    let is_wanted = |name: &str| {
        let hash = name.strip_prefix(&start).and_then(|rest| rest.strip_suffix(".log"));
        hash.is_some_and(|hash| hash.len() == DIGITS && hash.bytes().all(|byte| byte.is_ascii_hexdigit()))
    };
    let entries = match fs::read_dir(cache.root().join(KIND)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    let mut newest = None;
    for entry in entries {
        let entry = entry?;
        if entry.file_name().to_str().is_some_and(is_wanted)
            // One that is removed meanwhile was not the newest.
            && let Ok(modified) = entry.metadata().and_then(|metadata| metadata.modified())
        {
            newest = newest.max(Some((modified, entry.path())));
        }
    }
    Ok(newest.map(|(_, path)| path))
}

/// Reads a log that may still be written.
pub(crate) struct LogReader(File);

impl LogReader {
    /// Opens a log, to be read from so many bytes on.
    pub(crate) fn open(path: &Path, from: u64) -> io::Result<Self> {
        let mut log = File::open(path)?;
        log.seek(SeekFrom::Start(from))?;
        Ok(Self(log))
    }

    /// What was written since the last call, and whether more will come: whoever writes a log holds its lock.
    pub(crate) fn more(&mut self) -> io::Result<(Vec<u8>, bool)> {
        // In this order: what is written between the two is read with the next call, or is not written any more.
        let is_written = matches!(self.0.try_lock_shared(), Err(TryLockError::WouldBlock));
        if !is_written {
            self.0.unlock()?;
        }
        let mut text = Vec::new();
        self.0.read_to_end(&mut text)?;
        Ok((text, is_written))
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use super::*;
    use crate::engine::{BuildLog as _, FileLog};

    #[test]
    fn the_newest_of_an_images_logs_for_a_kernel() {
        let directory = tempfile::tempdir().unwrap();
        let cache = Cache::open(directory.path().to_owned()).unwrap();
        let (image, release) = ("gpu".parse().unwrap(), "6.1.0-1-amd64".parse().unwrap());
        let newest = || newest_log(&cache, &image, &release).unwrap();
        assert_eq!(newest(), None);
        let logs = directory.path().join(KIND);
        fs::create_dir(&logs).unwrap();
        assert_eq!(newest(), None);
        let now = SystemTime::now();
        for (age, name) in [
            (3, "gpu-6.1.0-1-amd64-0123456789ab.log"),
            (2, "gpu-6.1.0-1-amd64-ba9876543210.log"),
            (1, "gpu-6.1.0-1-amd64-rt-0123456789ab.log"),
            (1, "gpu-open-6.1.0-1-amd64-0123456789ab.log"),
            (1, "gpu-6.1.0-1-amd64-0123456789ab.txt"),
        ] {
            let file = File::create(logs.join(name)).unwrap();
            file.set_modified(now - Duration::from_secs(age)).unwrap();
        }
        assert_eq!(newest(), Some(logs.join("gpu-6.1.0-1-amd64-ba9876543210.log")));
    }

    #[test]
    fn a_log_is_read_while_it_is_written_and_its_end_is_known() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("build.log");
        let log = FileLog::create(&path, |_| {}).unwrap();
        let mut reader = LogReader::open(&path, 0).unwrap();
        assert_eq!(reader.more().unwrap(), (vec![], true));
        log.line("CC [M] a.o");
        assert_eq!(reader.more().unwrap(), (b"CC [M] a.o\n".to_vec(), true));
        assert_eq!(LogReader::open(&path, 7).unwrap().more().unwrap(), (b"a.o\n".to_vec(), true));
        log.line("LD [M] a.ko");
        drop(log);
        assert_eq!(reader.more().unwrap(), (b"LD [M] a.ko\n".to_vec(), false));
        assert_eq!(reader.more().unwrap(), (vec![], false));
    }
}
