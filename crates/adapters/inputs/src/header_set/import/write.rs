//! Writes the tree and its layer in one pass, so that every file is read once.

use std::{
    fs::Permissions,
    io::{self, BufReader, BufWriter, Read, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::Path,
    sync::atomic::AtomicBool,
    time::SystemTime,
};

use fs_err::{self as fs, File, os::unix::fs::symlink};
use oci::{EntryKind, Layer, LayerWriter};

use super::gather::{Entries, Entry};
use crate::{
    Result,
    files::{check_not_canceled, make_directory},
};

/// Size of the read buffer in bytes.
const PORTION: usize = 64 << 10;
/// Modification time of every file: the origin of the header set does not affect the layer.
const MTIME: u64 = 0;

/// Writes the header set as a tree below `tree` and as a layer into `layer_file`.
pub(super) fn write(entries: &Entries, tree: &Path, layer_file: &Path, stop: &AtomicBool) -> Result<Layer> {
    make_directory(tree)?;
    let out = BufWriter::with_capacity(256 << 10, File::create_new(layer_file)?);
    let mut layer = LayerWriter::artifact(out, MTIME)?;
    for (path, entry) in entries {
        check_not_canceled(stop)?;
        let dest = tree.join(path);
        match entry {
            Entry::Directory => {
                make_directory(&dest)?;
                layer.entry(path, 0o755, EntryKind::Directory)?;
            }
            Entry::Link { target } => {
                symlink(target, &dest)?;
                layer.entry(path, 0o777, EntryKind::Symlink(target))?;
            }
            Entry::File { from, is_ours, is_executable, size } => {
                let mode = if *is_executable { 0o755 } else { 0o644 };
                let mut add = |content: &mut dyn Read| {
                    // Most files are smaller than the buffer, so one call reads them.
                    let mut content = BufReader::with_capacity(PORTION, content);
                    layer.entry(path, mode, EntryKind::File { size: *size, content: &mut content })
                };
                let file = if *is_ours {
                    fs::rename(from, &dest)?;
                    let mut file = File::open(&dest)?;
                    add(&mut file)?;
                    file
                } else {
                    let mut content = CopyingReader { from: File::open(from)?, to: File::create_new(&dest)? };
                    add(&mut content)?;
                    content.to
                };
                file.set_permissions(Permissions::from_mode(mode))?;
                file.set_modified(SystemTime::UNIX_EPOCH)?;
            }
        }
    }
    Ok(layer.finish()?.0)
}

/// A reader that also writes a copy of the data.
struct CopyingReader {
    from: File,
    to: File,
}

impl Read for CopyingReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.from.read(buffer)?;
        self.to.write_all(buffer.get(..count).unwrap_or_default())?;
        Ok(count)
    }
}
