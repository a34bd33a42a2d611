//! Removes directory trees that builds and other untrusted programs wrote, whatever their depth and modes.

use std::{
    ffi::{CStr, CString},
    io,
    os::{
        fd::{AsFd, AsRawFd as _, OwnedFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
};

use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, chmod, fchmod, fstat, open, openat, renameat, unlinkat},
    io::Errno,
};

/// Maximum number of open directories, each with one descriptor. Deeper directories are moved up, so that neither stack nor
/// descriptors depend on the depth.
const MAX_OPEN: usize = 12;

/// Name prefix of directories that were moved up to the tree's root.
const MOVED: &str = ".farrier-moved-";

/// Removes a file, or a directory with everything below it. Removes symbolic links without following them. Directories need not
/// be accessible to their owner. Files removed concurrently by another process are not an error. Blocks.
///
/// # Errors
/// `NotFound` if nothing exists at the path. Otherwise the error of the first entry that could not be removed, after the removal
/// of all other entries.
pub fn remove_tree(tree: &Path) -> io::Result<()> {
    remove(tree).map_err(|error| {
        let error = io::Error::from(error);
        io::Error::new(error.kind(), format!("cannot remove {}: {error}", tree.display()))
    })
}

fn remove(tree: &Path) -> Result<(), Errno> {
    let name = tree.file_name().ok_or(Errno::INVAL)?;
    let name = CString::new(name.as_bytes()).map_err(|_| Errno::INVAL)?;
    let parent = match tree.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let parent = open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    let root = match open_directory(&parent, &name) {
        Err(Errno::NOTDIR | Errno::LOOP) => return unlinkat(&parent, &name, AtFlags::empty()),
        root => root?,
    };
    let mut removal = Removal { open: vec![Level { name: CString::default(), entries: root }], moved: 0 };
    loop {
        let pass = removal.run_pass();
        match unlinkat(&parent, &name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(_) if pass.made_progress => {}
            Err(error) => return Err(pass.failure.unwrap_or(error)),
        }
    }
}

/// A removal in progress: the open directories from the tree's root down to the one being emptied.
struct Removal {
    open: Vec<Level>,
    /// Number of the next directory to be moved up.
    moved: u64,
}

struct Level {
    /// Name in the level above.
    name: CString,
    entries: Dir,
}

/// Outcome of one pass over a tree.
#[derive(Default)]
struct Pass {
    /// Whether anything was removed or moved up, so that another pass may remove the remaining entries.
    made_progress: bool,
    failure: Option<Errno>,
}

impl Pass {
    fn record(&mut self, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) => self.made_progress = true,
            Err(Errno::NOENT) => {}
            Err(error) => self.failure = self.failure.or(Some(error)),
        }
    }
}

impl Removal {
    /// Removes every entry that can be removed, depth first, and moves up directories that are too deep.
    fn run_pass(&mut self) -> Pass {
        let mut pass = Pass::default();
        if let [root, ..] = &mut *self.open {
            root.entries.rewind();
        }
        while let Some(last) = self.open.last_mut() {
            match last.entries.read() {
                Some(Ok(entry)) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
                Some(Ok(entry)) => self.remove_entry(entry.file_name(), entry.file_type(), &mut pass),
                end => {
                    if let Some(Err(error)) = end {
                        pass.record(Err(error));
                    }
                    if self.open.len() == 1 {
                        break;
                    }
                    self.remove_last_level(&mut pass);
                }
            }
        }
        pass
    }

    /// Removes an entry of the last level. A directory is not removed yet but becomes the new last level.
    fn remove_entry(&mut self, name: &CStr, kind: FileType, pass: &mut Pass) {
        let Some(dir) = self.open.last().and_then(|last| last.entries.fd().ok()) else {
            return;
        };
        if kind != FileType::Directory {
            match unlinkat(dir, name, AtFlags::empty()) {
                // A directory on a file system that does not report the types of its entries.
                Err(Errno::ISDIR) => {}
                outcome => return pass.record(outcome),
            }
        }
        if self.open.len() >= MAX_OPEN {
            let moved = self.move_up(name);
            return pass.record(moved);
        }
        match open_directory(dir, name) {
            Ok(entries) => self.open.push(Level { name: name.to_owned(), entries }),
            Err(error) => pass.record(Err(error)),
        }
    }

    /// Removes the last level, which is empty unless something in it could not be removed.
    fn remove_last_level(&mut self, pass: &mut Pass) {
        let Some(Level { name, entries: _ }) = self.open.pop() else { return };
        let Some(parent) = self.open.last().and_then(|parent| parent.entries.fd().ok()) else { return };
        match unlinkat(parent, &name, AtFlags::REMOVEDIR) {
            // Either the first error is already recorded, or the listing skipped entries, which the next pass removes.
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            outcome => pass.record(outcome),
        }
    }

    /// Moves a directory of the last level into the tree's root, under an unused name. A rename does not follow links, and
    /// replaces nothing but an empty directory.
    fn move_up(&mut self, name: &CStr) -> Result<(), Errno> {
        let (Some(root), Some(directory)) = (self.open.first(), self.open.last()) else { return Ok(()) };
        let (root, directory) = (root.entries.fd()?, directory.entries.fd()?);
        loop {
            let new_name = format!("{MOVED}{}", self.moved);
            self.moved += 1;
            match renameat(directory, name, root, new_name.as_str()) {
                Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                // Moving a directory changes its `..` entry, so the directory itself must be writable.
                Err(Errno::ACCESS) => {
                    make_accessible(directory, name)?;
                    return renameat(directory, name, root, new_name.as_str());
                }
                outcome => return outcome,
            }
        }
    }
}

/// Opens a directory so that its entries can be listed and removed.
fn open_directory(parent: impl AsFd, name: &CStr) -> Result<Dir, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = match openat(&parent, name, flags, Mode::empty()) {
        Err(Errno::ACCESS) => {
            make_accessible(&parent, name)?;
            openat(&parent, name, flags, Mode::empty())
        }
        directory => directory,
    }?;
    if !Mode::from_raw_mode(fstat(&directory)?.st_mode).contains(Mode::RWXU) {
        fchmod(&directory, Mode::RWXU)?;
    }
    Dir::new(directory)
}

/// Gives a directory's owner all permissions. Uses the descriptor's path in `/proc`, because not all kernels have a `chmod` that
/// does not follow links.
fn make_accessible(parent: impl AsFd, name: &CStr) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory: OwnedFd = openat(parent, name, flags, Mode::empty())?;
    chmod(format!("/proc/self/fd/{}", directory.as_raw_fd()), Mode::RWXU)
}

#[cfg(test)]
#[path = "tree_removal_tests.rs"]
mod tests;
