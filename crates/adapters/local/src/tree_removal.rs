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
/// `NotFound` if nothing exists at the path. Otherwise the first reason why something could not be removed; everything else is
/// gone then.
pub fn remove_tree(tree: &Path) -> io::Result<()> {
    remove(tree).map_err(|error| {
        let error = io::Error::from(error);
        io::Error::new(error.kind(), format!("remove {}: {error}", tree.display()))
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
        let pass = removal.pass();
        match unlinkat(&parent, &name, AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => return Ok(()),
            Err(_) if pass.advanced => {}
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
    /// Whether anything was removed or moved up, so that another pass may remove the rest.
    advanced: bool,
    failure: Option<Errno>,
}

impl Pass {
    fn note(&mut self, outcome: Result<(), Errno>) {
        match outcome {
            Ok(()) => self.advanced = true,
            Err(Errno::NOENT) => {}
            Err(error) => self.failure = self.failure.or(Some(error)),
        }
    }
}

impl Removal {
    /// Removes everything possible on the way down and up again, and moves up directories that are too deep.
    fn pass(&mut self) -> Pass {
        let mut pass = Pass::default();
        if let [root, ..] = &mut *self.open {
            root.entries.rewind();
        }
        while let Some(here) = self.open.last_mut() {
            match here.entries.read() {
                Some(Ok(entry)) if matches!(entry.file_name().to_bytes(), b"." | b"..") => {}
                Some(Ok(entry)) => self.entry(entry.file_name(), entry.file_type(), &mut pass),
                end => {
                    if let Some(Err(error)) = end {
                        pass.note(Err(error));
                    }
                    if self.open.len() == 1 {
                        break;
                    }
                    self.leave(&mut pass);
                }
            }
        }
        pass
    }

    /// Removes an entry of the last level. A directory becomes the new last level.
    fn entry(&mut self, name: &CStr, kind: FileType, pass: &mut Pass) {
        let Some(here) = self.open.last().and_then(|here| here.entries.fd().ok()) else { return };
        if kind != FileType::Directory {
            match unlinkat(here, name, AtFlags::empty()) {
                // The file system does not report the types of its entries.
                Err(Errno::ISDIR) => {}
                outcome => return pass.note(outcome),
            }
        }
        if self.open.len() >= MAX_OPEN {
            let moved = self.move_up(name);
            return pass.note(moved);
        }
        match open_directory(here, name) {
            Ok(entries) => self.open.push(Level { name: name.to_owned(), entries }),
            Err(error) => pass.note(Err(error)),
        }
    }

    /// Removes the last level, which is empty unless something in it could not be removed.
    fn leave(&mut self, pass: &mut Pass) {
        let Some(Level { name, entries: _ }) = self.open.pop() else { return };
        let Some(above) = self.open.last().and_then(|above| above.entries.fd().ok()) else { return };
        match unlinkat(above, &name, AtFlags::REMOVEDIR) {
            // Either the first error is already recorded, or the listing skipped entries, which the next pass removes.
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            outcome => pass.note(outcome),
        }
    }

    /// Moves a directory of the last level into the tree's root, under an unused name. A rename does not follow links, and
    /// replaces nothing but an empty directory.
    fn move_up(&mut self, name: &CStr) -> Result<(), Errno> {
        let (Some(root), Some(here)) = (self.open.first(), self.open.last()) else { return Ok(()) };
        let (root, here) = (root.entries.fd()?, here.entries.fd()?);
        loop {
            let free = format!("{MOVED}{}", self.moved);
            self.moved += 1;
            match renameat(here, name, root, free.as_str()) {
                Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                // Moving a directory changes its `..` entry, so the directory itself must be writable.
                Err(Errno::ACCESS) => {
                    open_up(here, name)?;
                    return renameat(here, name, root, free.as_str());
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
            open_up(&parent, name)?;
            openat(&parent, name, flags, Mode::empty())
        }
        directory => directory,
    }?;
    if !Mode::from_raw_mode(fstat(&directory)?.st_mode).contains(Mode::RWXU) {
        fchmod(&directory, Mode::RWXU)?;
    }
    Dir::new(directory)
}

/// Gives a directory's owner all rights on it. No `chmod` call both avoids following links and works everywhere, so use the
/// descriptor's path in `/proc`.
fn open_up(parent: impl AsFd, name: &CStr) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory: OwnedFd = openat(parent, name, flags, Mode::empty())?;
    chmod(format!("/proc/self/fd/{}", directory.as_raw_fd()), Mode::RWXU)
}

#[cfg(test)]
#[path = "tree_removal_tests.rs"]
mod tests;
