//! Writes new entries to disk before they appear in the cache.

use std::{io, path::Path};

use fs_err::File;
use rustix::fs::syncfs;
use walkdir::WalkDir;

use super::CacheError;
use crate::blocking::blocking;

/// Maximum number of files and directories that are written one by one. For more of them `syncfs` is faster, although it also
/// writes what other programs changed.
const MAX_ONE_BY_ONE: usize = 64;

/// Writes an entry to disk. Otherwise, a power loss could leave empty files in an entry that counts as complete.
pub(super) async fn write_to_disk(entry: &Path) -> Result<(), CacheError> {
    let entry = entry.to_owned();
    Ok(blocking(move || sync(&entry)).await?)
}

fn sync(entry: &Path) -> io::Result<()> {
    let contents = WalkDir::new(entry).into_iter().take(MAX_ONE_BY_ONE + 1);
    let contents = contents.collect::<Result<Vec<_>, walkdir::Error>>()?;
    if contents.len() > MAX_ONE_BY_ONE {
        return Ok(syncfs(File::open(entry)?.file())?);
    }
    for found in contents {
        let kind = found.file_type();
        if !kind.is_file() && !kind.is_dir() {
            continue;
        }
        match File::open(found.path())?.sync_all() {
            // CIFS does not sync directories.
            Err(error) if kind.is_dir() && error.kind() == io::ErrorKind::InvalidInput => {}
            synced => synced?,
        }
    }
    Ok(())
}
