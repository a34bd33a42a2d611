//! Adapter: what several modules do with files.

use std::{
    io::{self, Read as _},
    path::Path,
};

use fs_err::File;
use walkdir::{DirEntry, WalkDir};

use crate::image::is_version_control;

/// Walks a source tree without version-control data. The root itself is visited whatever its name is.
pub(crate) fn without_version_control(
    walk: WalkDir,
) -> impl Iterator<Item = Result<DirEntry, walkdir::Error>> {
    walk.into_iter().filter_entry(|entry| entry.depth() == 0 || !is_version_control(entry.file_name()))
}

/// What was found; nothing where there is no such file.
pub(crate) fn if_there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A file's bytes, no more than so many; `None` when it is not there.
pub(crate) fn read_start(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = if_there(File::open(path))? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}
