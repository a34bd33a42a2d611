//! Adapter: copies a tree that the user keeps into the cache.

use std::{
    fs::{self, File, Permissions},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use super::{FetchError, io_error};

/// Copies files, directories and links (as links), with modes and times.
pub(super) fn tree(from: &Path, to: &Path, stop: &AtomicBool) -> Result<(), FetchError> {
    for entry in walkdir::WalkDir::new(from) {
        let entry = entry.map_err(|e| FetchError::Io {
            action: "list",
            path: e.path().unwrap_or(from).to_owned(),
            source: e.into(),
        })?;
        if stop.load(Ordering::Relaxed) {
            return Err(FetchError::Interrupted);
        }
        let path = entry.path();
        let dest = match path.strip_prefix(from) {
            Ok(relative) if relative.as_os_str().is_empty() => to.to_owned(),
            Ok(relative) => to.join(relative),
            Err(_) => continue,
        };
        let kind = entry.file_type();
        if kind.is_dir() || entry.depth() == 0 {
            fs::create_dir(&dest).map_err(io_error("create", &dest))?;
            let metadata = fs::metadata(path).map_err(io_error("look at", path))?;
            // The copy must be writable to be finished, and deletable.
            let mode = metadata.permissions().mode() & 0o777 | 0o700;
            fs::set_permissions(&dest, Permissions::from_mode(mode))
                .map_err(io_error("set the mode of", &dest))?;
        } else if kind.is_symlink() {
            let target = fs::read_link(path).map_err(io_error("read link", path))?;
            symlink(target, &dest).map_err(io_error("link", &dest))?;
        } else if kind.is_file() {
            file(path, &dest)?;
        } else {
            return Err(FetchError::Layout {
                wanted: "only files, directories and links".to_owned(),
                what: from.display().to_string(),
                found: format!("{} is something else", path.display()),
            });
        }
    }
    Ok(())
}

/// Copies one file with its mode and time.
pub(super) fn file(from: &Path, to: &Path) -> Result<(), FetchError> {
    fs::copy(from, to).map_err(io_error("copy to", to))?;
    let modified = fs::metadata(from).and_then(|m| m.modified()).map_err(io_error("look at", from))?;
    // Opened for reading: a file's owner may set its times, whatever its mode is.
    let copy = File::open(to).map_err(io_error("open", to))?;
    copy.set_modified(modified).map_err(io_error("set the time of", to))
}
