//! Reads files of a definitions directory: only regular files inside the directory, up to a size limit.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use farrier_local::files::if_there;
use rustix::fs::OFlags;

/// Reads the file at a path below the directory; `None` if it does not exist. Blocks the thread.
///
/// A link may point to a file with the same extension inside the directory, like the links of a mounted ConfigMap. Other links,
/// pipes and devices are errors and are not opened: a pipe or device could block farrier, and a link could lead to a file that
/// the author of the definitions may not read.
pub fn read(directory: &Path, path: &Path, max_bytes: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(handle) = if_there(checked_handle(directory, path))? else { return Ok(None) };
    let mut bytes = Vec::new();
    File::open(by_descriptor(&handle))?.take(max_bytes + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > max_bytes {
        return Err(refused(&format!("it is larger than {max_bytes} bytes")));
    }
    Ok(Some(bytes))
}

/// Returns a handle that can only be used to open the file. The opened file is the checked one, even if its path changes.
fn checked_handle(directory: &Path, path: &Path) -> io::Result<File> {
    let path = directory.join(path);
    let handle = OpenOptions::new().read(true).custom_flags(OFlags::PATH.bits().cast_signed()).open(&path)?;
    if !handle.metadata()?.is_file() {
        return Err(refused("it is not a regular file"));
    }
    let real = fs::read_link(by_descriptor(&handle))?;
    if !real.starts_with(fs::canonicalize(directory)?) {
        return Err(refused("it is a symbolic link that leads out of the definitions directory"));
    }
    // The kernel appends a note to the name of a file that was removed in the meantime.
    let extension = real.to_str().map(|real| Path::new(real.trim_end_matches(" (deleted)")).extension());
    if fs::symlink_metadata(&path)?.is_symlink() && extension != Some(path.extension()) {
        return Err(refused("it is a symbolic link to a file with another extension"));
    }
    Ok(handle)
}

fn by_descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why.to_owned())
}
