//! File-system helpers that several modules share.

use std::{
    fs::Permissions,
    io::{self, Read as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
};

use farrier_core::image::{is_editor_file, is_version_control};
use fs_err::{self as fs, File, os::unix::fs::OpenOptionsExt as _};
use rustix::fs::OFlags;
use walkdir::{DirEntry, WalkDir};

/// Walks a source tree and skips version-control data and the files of editors. The root is visited whatever its name is.
pub fn walk_source(walk: WalkDir) -> impl Iterator<Item = Result<DirEntry, walkdir::Error>> {
    walk.into_iter().filter_entry(|entry| {
        let (name, is_file) = (entry.file_name(), !entry.file_type().is_dir());
        entry.depth() == 0 || !(is_version_control(name) || is_file && is_editor_file(name))
    })
}

/// Maps a missing file to `None`.
pub fn if_there<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Opens a regular file. Any other file type is an error. The open does not block, so a FIFO cannot hang it.
pub fn open_regular(path: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).custom_flags(OFlags::NONBLOCK.bits().cast_signed());
    let file = options.open(path)?;
    if !file.metadata()?.is_file() {
        let message = format!("cannot read {}: it is not a regular file", path.display());
        return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
    }
    Ok(file)
}

/// Returns the first `limit` bytes of a regular file, or `None` when the file does not exist. Any other file type is an error.
pub fn read_start(path: &Path, limit: u64) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = if_there(open_regular(path))? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Creates a directory and its parents, and removes every permission of the group and of others.
///
/// A directory that another user owns keeps its mode: it is a volume whose owner granted access to this user.
pub(crate) fn private_directory(path: &Path) -> io::Result<()> {
    fs::create_dir_all(path)?;
    let mode = fs::metadata(path)?.permissions().mode();
    // No permission bit of the group or of others is set.
    if mode.trailing_zeros() >= 6 {
        return Ok(());
    }
    match fs::set_permissions(path, Permissions::from_mode(0o700)) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Ok(()),
        set => set,
    }
}
