//! Adapter: removes directory trees that builds and other strangers wrote, however deep they are and whatever their modes.

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

/// Directories that are open at once, each with one descriptor. What is deeper is moved up, so that neither stack nor descriptors
/// depend on the depth.
const OPEN_AT_ONCE: usize = 12;

/// How names begin of directories that were moved up to the tree's root.
const MOVED: &str = ".farrier-moved-";

/// Removes a directory with all that is below it, or a file. Symbolic links are removed and never followed; directories may deny
/// themselves to their owner. What another process removes meanwhile is no error. Blocks.
///
/// # Errors
/// `NotFound` where nothing is there. Otherwise the first reason why something stays; all that can be removed is gone then.
pub(crate) fn remove_tree(tree: &Path) -> io::Result<()> {
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

/// A removal under way: the directories from the tree's root to the one whose entries are removed.
struct Removal {
    open: Vec<Level>,
    /// Number of the next directory that is moved up.
    moved: u64,
}

struct Level {
    /// Its name in the level above.
    name: CString,
    entries: Dir,
}

/// What one pass over a tree comes to.
#[derive(Default)]
struct Pass {
    /// Something was removed or moved up: another pass may do the rest.
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
    /// Removes what can be removed on the way down and up again, and moves up what is too deep.
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

    /// Removes an entry of the last level; a directory becomes a level of its own.
    fn entry(&mut self, name: &CStr, kind: FileType, pass: &mut Pass) {
        let Some(here) = self.open.last().and_then(|here| here.entries.fd().ok()) else { return };
        if kind != FileType::Directory {
            match unlinkat(here, name, AtFlags::empty()) {
                // The file system does not say what its entries are.
                Err(Errno::ISDIR) => {}
                outcome => return pass.note(outcome),
            }
        }
        if self.open.len() >= OPEN_AT_ONCE {
            let moved = self.move_up(name);
            return pass.note(moved);
        }
        match open_directory(here, name) {
            Ok(entries) => self.open.push(Level { name: name.to_owned(), entries }),
            Err(error) => pass.note(Err(error)),
        }
    }

    /// Removes the last level, which is empty unless something in it stays.
    fn leave(&mut self, pass: &mut Pass) {
        let Some(Level { name, entries: _ }) = self.open.pop() else { return };
        let Some(above) = self.open.last().and_then(|above| above.entries.fd().ok()) else { return };
        match unlinkat(above, &name, AtFlags::REMOVEDIR) {
            // Its first reason is noted already, or entries that a listing passed over are left for the next pass.
            Err(Errno::NOTEMPTY | Errno::EXIST) => {}
            outcome => pass.note(outcome),
        }
    }

    /// Moves a directory of the last level into the tree's root, under a name that is free there. A rename follows no link, and
    /// replaces nothing but an empty directory.
    fn move_up(&mut self, name: &CStr) -> Result<(), Errno> {
        let (Some(root), Some(here)) = (self.open.first(), self.open.last()) else { return Ok(()) };
        let (root, here) = (root.entries.fd()?, here.entries.fd()?);
        loop {
            let free = format!("{MOVED}{}", self.moved);
            self.moved += 1;
            match renameat(here, name, root, free.as_str()) {
                Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOTDIR) => {}
                // Its entry `..` changes, so that it must be writable itself.
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

/// Gives a directory's owner all rights on it. There is no `chmod` that follows no link and works everywhere: the way through
/// `/proc` leads to what the descriptor is.
fn open_up(parent: impl AsFd, name: &CStr) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory: OwnedFd = openat(parent, name, flags, Mode::empty())?;
    chmod(format!("/proc/self/fd/{}", directory.as_raw_fd()), Mode::RWXU)
}

#[cfg(test)]
#[path = "tree_removal_tests.rs"]
mod tests;
