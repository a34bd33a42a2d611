//! Makes the tree and its layer in one pass: every file is read once.

use std::{
    fs::{self, File, Permissions},
    io::{self, BufReader, BufWriter, Read, Write as _},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
    time::SystemTime,
};

use super::{
    ImportError,
    gather::{Entries, Entry},
};
use crate::{
    headers::{FetchError, io_error},
    oci::{ArtifactWriter, EntryKind, Layer, LayerError},
};

/// Bytes of a file that are read at once.
const PORTION: usize = 64 << 10;
/// Every file's modification time: what is built is the same wherever the set came from.
const MTIME: u64 = 0;

/// Writes the set below `tree` and as a layer into the file `to`.
pub(super) fn write(
    entries: &Entries,
    tree: &Path,
    to: &Path,
    stop: &AtomicBool,
) -> Result<Layer, FetchError> {
    fs::create_dir(tree).map_err(io_error("create", tree))?;
    fs::set_permissions(tree, Permissions::from_mode(0o755)).map_err(io_error("set the mode of", tree))?;
    let file = File::create_new(to).map_err(io_error("create", to))?;
    let failed = |source| ImportError::Layer { path: to.to_owned(), source };
    let out = BufWriter::with_capacity(256 << 10, file);
    let mut layer = ArtifactWriter::new(out, MTIME).map_err(LayerError::Finish).map_err(failed)?;
    for (path, entry) in entries {
        if stop.load(Ordering::Relaxed) {
            return Err(FetchError::Interrupted);
        }
        let place = tree.join(path);
        match entry {
            Entry::Directory => {
                fs::create_dir(&place).map_err(io_error("create", &place))?;
                fs::set_permissions(&place, Permissions::from_mode(0o755))
                    .map_err(io_error("set the mode of", &place))?;
                layer.entry(path, 0o755, EntryKind::Directory).map_err(failed)?;
            }
            Entry::Link { target } => {
                symlink(target, &place).map_err(io_error("link", &place))?;
                layer.entry(path, 0o777, EntryKind::Symlink { target }).map_err(failed)?;
            }
            Entry::File { from, is_ours, is_executable, size } => {
                let mode = if *is_executable { 0o755 } else { 0o644 };
                let mut add = |content: &mut dyn Read| {
                    // Most files are smaller than this, and so are read with one call.
                    let mut content = BufReader::with_capacity(PORTION, content);
                    layer
                        .entry(path, mode, EntryKind::File { size: *size, content: &mut content })
                        .map_err(failed)
                };
                let file = if *is_ours {
                    fs::rename(from, &place).map_err(io_error("rename", from))?;
                    let mut file = File::open(&place).map_err(io_error("open", &place))?;
                    add(&mut file)?;
                    file
                } else {
                    let to = File::create_new(&place).map_err(io_error("create", &place))?;
                    let from = File::open(from).map_err(io_error("open", from))?;
                    let mut content = Copying { from, to };
                    add(&mut content)?;
                    content.to
                };
                file.set_permissions(Permissions::from_mode(mode))
                    .and_then(|()| file.set_modified(SystemTime::UNIX_EPOCH))
                    .map_err(io_error("set mode and time of", &place))?;
            }
        }
    }
    Ok(layer.finish().map_err(failed)?.0)
}

/// Hands on what it reads, and keeps a copy.
struct Copying {
    from: File,
    to: File,
}

impl Read for Copying {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        self.to.write_all(buffer.get(..count).unwrap_or_default())?;
        Ok(count)
    }
}
