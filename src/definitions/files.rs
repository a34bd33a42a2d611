//! Adapter: the files of a definitions directory: regular ones, inside of it, of a bounded size.

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Read as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use rustix::fs::OFlags;

use crate::files::if_there;

/// The file at a path below the directory; `None` where there is none. A link may lead to a file of the same kind (its extension)
/// inside of the directory, as those of a mounted ConfigMap do. Anything else is an error, and is neither opened nor waited for: a
/// pipe, a device, a link to what farrier may read and who writes the definition may not. Blocks.
pub(crate) fn read(directory: &Path, path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(handle) = if_there(locate(directory, path))? else { return Ok(None) };
    let mut bytes = Vec::new();
    File::open(by_descriptor(&handle))?.take(most + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > most {
        return Err(refused(&format!("it is larger than {most} bytes")));
    }
    Ok(Some(bytes))
}

/// A handle by which the file can be opened, and nothing more: what is opened then is what was looked at, whatever becomes of its path.
fn locate(directory: &Path, path: &Path) -> io::Result<File> {
    let named = directory.join(path);
    let handle =
        OpenOptions::new().read(true).custom_flags(OFlags::PATH.bits().cast_signed()).open(&named)?;
    if !handle.metadata()?.is_file() {
        return Err(refused("it is no regular file"));
    }
    let real = fs::read_link(by_descriptor(&handle))?;
    if !real.starts_with(fs::canonicalize(directory)?) {
        return Err(refused("it is a link that leads out of the definitions directory"));
    }
    // Of a file that was removed meanwhile the kernel says so, behind its name.
    let extension = real.to_str().map(|real| Path::new(real.trim_end_matches(" (deleted)")).extension());
    if fs::symlink_metadata(&named)?.is_symlink() && extension != Some(named.extension()) {
        return Err(refused("it is a link to a file of another kind"));
    }
    Ok(handle)
}

fn by_descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, why.to_owned())
}
