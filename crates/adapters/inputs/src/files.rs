//! Lists the user's trees and copies them into the cache.

use std::{
    ffi::OsString,
    fs::Permissions,
    io::Read,
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::atomic::{AtomicBool, Ordering},
};

use fs_err::{self as fs, File, os::unix::fs::symlink};

use super::{FetchError, Result};
pub(super) use farrier_local::files::read_start;

use farrier_core::{kernel::Architecture, text::some_of};
use farrier_local::files::walk_source;

/// Copies files, directories and links (as links), with modes and times. Omits version-control data.
pub(super) fn copy_tree(from: &Path, to: &Path, stop: &AtomicBool) -> Result<()> {
    for entry in walk_source(walkdir::WalkDir::new(from)) {
        let entry = entry?;
        check_not_canceled(stop)?;
        let path = entry.path();
        let dest = match path.strip_prefix(from) {
            Ok(relative) if relative.as_os_str().is_empty() => to.to_owned(),
            Ok(relative) => to.join(relative),
            Err(_) => continue,
        };
        let kind = entry.file_type();
        if kind.is_dir() || entry.depth() == 0 {
            fs::create_dir(&dest)?;
            // The copy must be writable until it is complete, and removable.
            let mode = fs::metadata(path)?.permissions().mode() & 0o777 | 0o700;
            fs::set_permissions(&dest, Permissions::from_mode(mode))?;
        } else if kind.is_symlink() {
            symlink(fs::read_link(path)?, &dest)?;
        } else if kind.is_file() {
            copy_file(path, &dest)?;
        } else {
            return Err(special(from, path));
        }
    }
    Ok(())
}

/// Copies one file with its mode and modification time.
pub(super) fn copy_file(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)?;
    // Open for reading: a file's owner may set its times, whatever its mode.
    Ok(File::open(to)?.set_modified(fs::metadata(from)?.modified()?)?)
}

/// `EM_X86_64` and `EM_AARCH64` of the ELF specification.
const MACHINES: [(u16, Architecture); 2] = [(62, Architecture::Amd64), (183, Architecture::Arm64)];

/// Description of a file that is not in ELF format, as returned by [`describe_unless_native`].
pub(super) const NOT_ELF: &str = "not an ELF program";

/// Describes a file that is not a program for this architecture; returns `None` for one that is.
pub(super) fn describe_unless_native(path: &Path, arch: Architecture) -> Result<Option<String>> {
    let mut head = Vec::with_capacity(20);
    File::open(path)?.take(20).read_to_end(&mut head)?;
    // Class 2 is 64 bits, data 1 is little-endian.
    let machine = match head.as_slice() {
        [0x7f, b'E', b'L', b'F', 2, 1, .., low, high] if head.len() == 20 => {
            u16::from_le_bytes([*low, *high])
        }
        [0x7f, b'E', b'L', b'F', ..] => {
            return Ok(Some("a program for a 32-bit or big-endian machine".to_owned()));
        }
        _ => return Ok(Some(NOT_ELF.to_owned())),
    };
    Ok(match MACHINES.iter().find(|(number, _)| *number == machine) {
        Some((_, actual)) if *actual == arch => None,
        Some((_, actual)) => Some(format!("a program for {actual}")),
        None => Some(format!("a program for another machine (ELF number {machine})")),
    })
}

/// Creates a directory with mode 0755, whatever the umask, and its parents.
pub(super) fn make_directory(path: &Path) -> Result<()> {
    fs::create_dir_all(path)?;
    Ok(fs::set_permissions(path, Permissions::from_mode(0o755))?)
}

/// Creates an error about a device, socket or FIFO in a tree.
pub(super) fn special(tree: &Path, path: &Path) -> FetchError {
    let (tree, path) = (tree.display(), path.display());
    FetchError::Layout(format!(
        "only files, directories and links in {tree}: {path} is a device, socket or FIFO"
    ))
}

/// Whether the path is a directory and not a link to one.
pub(super) fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir())
}

/// Whether the path exists; a dangling link counts.
pub(super) fn exists(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok()
}

/// Returns the last component of a path, for messages.
pub(super) fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned()
}

/// Returns the names in a directory, sorted.
pub(super) fn names_in(dir: &Path) -> Result<Vec<OsString>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        names.push(entry?.file_name());
    }
    names.sort();
    Ok(names)
}

/// Fails if the work was canceled.
pub(super) fn check_not_canceled(stop: &AtomicBool) -> Result<()> {
    if stop.load(Ordering::Relaxed) { Err(FetchError::Interrupted) } else { Ok(()) }
}

/// Joins names for a message, at most twenty.
pub(super) fn listing(names: &[OsString]) -> String {
    let names: Vec<_> = names.iter().map(|name| name.to_string_lossy()).collect();
    if names.is_empty() { "nothing".to_owned() } else { some_of(&names, 20) }
}
