//! Path resolution inside the build's root file system.
//!
//! Build steps control the tree: they may create links to anywhere, and replace directories at any time. Every resolution stays
//! below the root (`RESOLVE_IN_ROOT`) and follows no magic links of `/proc` (`RESOLVE_NO_MAGICLINKS`).

use std::{
    ffi::OsStr,
    io,
    os::fd::{AsRawFd as _, BorrowedFd, OwnedFd},
    path::{Path, PathBuf},
    time::SystemTime,
};

use rustix::{
    fs::{
        AtFlags, FileType, Mode, OFlags, ResolveFlags, Timespec, Timestamps, UTIME_OMIT, chmodat, mkdirat,
        open, openat, openat2, statat, unlinkat, utimensat,
    },
    io::Errno,
};

const IN_ROOT: ResolveFlags = ResolveFlags::IN_ROOT.union(ResolveFlags::NO_MAGICLINKS);
const DIRECTORY: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

/// An open root directory of a build.
pub struct Root(OwnedFd);

impl Root {
    /// Opens a directory as the root.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self(open(path, DIRECTORY, Mode::empty())?))
    }

    /// Opens an existing directory.
    pub fn existing_directory(&self, path: &Path) -> io::Result<OwnedFd> {
        Ok(openat2(&self.0, path, DIRECTORY, Mode::empty(), IN_ROOT)?)
    }

    /// Opens a directory. Creates the directory and its parents if they are missing.
    pub fn directory(&self, path: &Path) -> io::Result<OwnedFd> {
        match openat2(&self.0, path, DIRECTORY, Mode::empty(), IN_ROOT) {
            Err(Errno::NOENT) => {}
            opened => return Ok(opened?),
        }
        let (parent, name) = path.parent().zip(path.file_name()).ok_or(Errno::NOENT)?;
        let parent = self.directory(parent)?;
        mkdirat(&parent, name, Mode::from_raw_mode(0o777)).map_err(|error| match error {
            Errno::EXIST => io::Error::new(io::ErrorKind::NotFound, "a link in the path leads to nothing"),
            error => error.into(),
        })?;
        self.existing_directory(path)
    }

    /// Whether a path leads to a directory.
    pub fn is_directory(&self, path: &Path) -> bool {
        self.existing_directory(path).is_ok()
    }
}

/// Returns a path to an open file, which is valid only in this process.
pub fn path_of(file: &OwnedFd) -> PathBuf {
    Path::new("/proc/self/fd").join(file.as_raw_fd().to_string())
}

/// Creates a file for writing. Replaces a file or link of the same name.
pub fn create(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    remove_file(directory, name)?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(openat(directory, name, flags, Mode::from_raw_mode(0o666))?)
}

/// Removes a file or link, but not a directory.
pub fn remove_file(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    match entry_type(directory, name)? {
        None | Some(FileType::Directory) => Ok(()),
        Some(_) => Ok(unlinkat(directory, name, AtFlags::empty())?),
    }
}

/// Returns the type of a directory entry without following links. Returns `None` if the entry does not exist.
pub fn entry_type(directory: BorrowedFd<'_>, name: &OsStr) -> io::Result<Option<FileType>> {
    match statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(status) => Ok(Some(FileType::from_raw_mode(status.st_mode))),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// Sets the permission bits of a directory that [`Root`] opened.
pub fn set_mode(directory: &OwnedFd, bits: u32) -> io::Result<()> {
    Ok(chmodat(directory, ".", Mode::from_raw_mode(bits), AtFlags::empty())?)
}

/// Sets the modification time of a directory that [`Root`] opened.
pub fn set_modified(directory: &OwnedFd, time: SystemTime) -> io::Result<()> {
    let since_epoch = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    let modified = Timespec {
        tv_sec: since_epoch.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: since_epoch.subsec_nanos().into(),
    };
    let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
    let times = Timestamps { last_access: omit, last_modification: modified };
    Ok(utimensat(directory, ".", &times, AtFlags::empty())?)
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::{fd::AsFd as _, unix::fs::symlink},
    };

    use super::*;

    fn root() -> (tempfile::TempDir, Root) {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir_all(dir.path().join("root/there")).unwrap();
        let root = Root::open(&dir.path().join("root")).unwrap();
        (dir, root)
    }

    #[test]
    fn directories_are_created_inside_the_root() {
        let (dir, root) = root();
        symlink("/there", dir.path().join("root/link")).unwrap();
        symlink("../../..", dir.path().join("root/up")).unwrap();
        for (path, expected) in [
            ("/a/b/c", "root/a/b/c"),
            ("/link/d", "root/there/d"),
            ("/up/e", "root/e"),
            ("/../../f", "root/f"),
        ] {
            root.directory(Path::new(path)).unwrap();
            assert!(dir.path().join(expected).is_dir(), "{path}");
        }
        root.directory(Path::new("/")).unwrap();
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }

    #[test]
    fn magic_links_and_broken_links_are_refused() {
        let (dir, root) = root();
        let outside = fs::File::open(dir.path()).unwrap();
        symlink("/nowhere", dir.path().join("root/broken")).unwrap();
        assert!(root.directory(Path::new("/broken/x")).is_err());
        assert!(root.directory(Path::new("/broken")).is_err());
        let proc = Root::open(Path::new("/")).unwrap();
        let magic = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&outside));
        assert!(proc.existing_directory(Path::new(&magic)).is_err());
        assert!(proc.directory(&Path::new(&magic).join("x")).is_err());
    }

    #[test]
    fn a_created_file_replaces_a_link() {
        let (dir, root) = root();
        let there = dir.path().join("root/there");
        fs::write(there.join("kept"), "kept").unwrap();
        symlink("kept", there.join("x")).unwrap();
        let directory = root.existing_directory(Path::new("/there")).unwrap();
        drop(create(directory.as_fd(), OsStr::new("x")).unwrap());
        assert_eq!(fs::read(there.join("kept")).unwrap(), b"kept");
        assert_eq!(fs::read(there.join("x")).unwrap(), b"");
        assert!(create(directory.as_fd(), OsStr::new("..")).is_err());
    }
}
