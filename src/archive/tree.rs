//! Adapter: writes entries below a directory, and nowhere else.

use std::{
    collections::HashSet,
    ffi::OsStr,
    fs::Permissions,
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt,
    path::{Component, Path, PathBuf},
    time::{Duration, SystemTime},
};

use fs_err::{self as fs, File};

use super::UnpackError;

/// The directory that an archive is unpacked into. Nobody else writes there meanwhile.
pub(super) struct Tree<'a> {
    root: &'a Path,
    depth: usize,
    /// Directories (relative) known to be real ones. None can become anything else: an entry may replace
    /// a file or a link, never a directory.
    directories: HashSet<PathBuf>,
    buffer: Vec<u8>,
}

impl<'a> Tree<'a> {
    pub(super) fn new(root: &'a Path, depth: usize) -> Self {
        Self { root, depth, directories: HashSet::new(), buffer: vec![0; 64 << 10] }
    }

    pub(super) fn directory(&mut self, name: &OsStr, mode: u32) -> Result<(), UnpackError> {
        let Some(path) = self.relative(name)? else {
            return Ok(());
        };
        self.ensure_directory(&path, name)?;
        // The owner must be able to go on writing, and to delete it.
        self.set_mode(&path, mode & 0o777 | 0o700)
    }

    pub(super) fn file(
        &mut self,
        name: &OsStr,
        mode: u32,
        modified: u64,
        content: &mut impl Read,
        size: u64,
    ) -> Result<(), UnpackError> {
        let path = self.place(name)?;
        // `create_new` follows no link.
        let mut file = instead(&path, || File::create_new(&path))?;
        let mut left = size;
        while left > 0 {
            let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(self.buffer.len());
            let count = match content.read(&mut self.buffer[..wanted]) {
                Ok(0) => return Err(super::truncated()),
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(UnpackError::Damaged(e)),
            };
            file.write_all(&self.buffer[..count])?;
            left -= count as u64;
        }
        // Whoever unpacked a file must be able to read it.
        file.set_permissions(Permissions::from_mode(mode & 0o777 | 0o400))?;
        // `make` compares times. The end of year 9999; further ones only come from damage or malice.
        let modified = Duration::from_secs(modified.min(253_402_300_799));
        Ok(file.set_modified(SystemTime::UNIX_EPOCH + modified)?)
    }

    pub(super) fn symlink(&mut self, name: &OsStr, target: &OsStr) -> Result<(), UnpackError> {
        let path = self.place(name)?;
        Ok(instead(&path, || fs::os::unix::fs::symlink(target, &path))?)
    }

    pub(super) fn hard_link(&mut self, name: &OsStr, target: &OsStr) -> Result<(), UnpackError> {
        let lossy = |name: &OsStr| name.to_string_lossy().into_owned();
        let target = self.relative(target)?.ok_or_else(|| UnpackError::Outside(lossy(name)))?;
        self.check_parents(&target, name)?;
        let existing = self.root.join(&target);
        if !fs::symlink_metadata(&existing)?.is_file() {
            return Err(UnpackError::ThroughLink(lossy(name)));
        }
        if self.relative(name)?.is_some_and(|path| path == target) {
            return Ok(());
        }
        let path = self.place(name)?;
        Ok(instead(&path, || fs::hard_link(&existing, &path))?)
    }

    /// The name as a relative path of plain components; `None` for the root itself.
    fn relative(&self, name: &OsStr) -> Result<Option<PathBuf>, UnpackError> {
        let outside = || UnpackError::Outside(name.to_string_lossy().into_owned());
        let mut path = PathBuf::new();
        let mut depth = 0;
        for component in Path::new(name).components() {
            match component {
                Component::Normal(part) => path.push(part),
                Component::CurDir => continue,
                Component::ParentDir | Component::RootDir | Component::Prefix(_) => return Err(outside()),
            }
            depth += 1;
            if depth > self.depth {
                return Err(UnpackError::Limit(format!("{} directories inside each other", self.depth)));
            }
        }
        Ok(if depth == 0 { None } else { Some(path) })
    }

    /// Where a new file or link goes, with its parents made.
    fn place(&mut self, name: &OsStr) -> Result<PathBuf, UnpackError> {
        let path =
            self.relative(name)?.ok_or_else(|| UnpackError::Outside(name.to_string_lossy().into_owned()))?;
        if let Some(parent) = path.parent() {
            self.ensure_directory(parent, name)?;
        }
        Ok(self.root.join(path))
    }

    /// Makes the directory and those above it, none of which may be a symbolic link.
    fn ensure_directory(&mut self, path: &Path, name: &OsStr) -> Result<(), UnpackError> {
        if path.as_os_str().is_empty() || self.directories.contains(path) {
            return Ok(());
        }
        if let Some(parent) = path.parent() {
            self.ensure_directory(parent, name)?;
        }
        if !self.is_directory(path, name)? {
            fs::create_dir(self.root.join(path))?;
            self.set_mode(path, 0o755)?;
        }
        self.directories.insert(path.to_owned());
        Ok(())
    }

    /// Refuses a path that leads through a link.
    fn check_parents(&self, path: &Path, name: &OsStr) -> Result<(), UnpackError> {
        for parent in path.ancestors().skip(1).filter(|p| !p.as_os_str().is_empty()) {
            self.is_directory(parent, name)?;
        }
        Ok(())
    }

    /// Whether it exists, and then as a directory.
    fn is_directory(&self, path: &Path, name: &OsStr) -> Result<bool, UnpackError> {
        let full = self.root.join(path);
        match fs::symlink_metadata(&full) {
            Ok(metadata) if metadata.is_dir() => Ok(true),
            Ok(metadata) if metadata.is_symlink() => {
                Err(UnpackError::ThroughLink(name.to_string_lossy().into_owned()))
            }
            Ok(_) => {
                let text = format!("write below {}: it is not a directory", full.display());
                Err(io::Error::new(io::ErrorKind::NotADirectory, text).into())
            }
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn set_mode(&self, path: &Path, mode: u32) -> Result<(), UnpackError> {
        Ok(fs::set_permissions(self.root.join(path), Permissions::from_mode(mode))?)
    }
}

/// Makes a file or link, in place of an earlier entry's. Few archives name a file twice.
fn instead<T>(path: &Path, make: impl Fn() -> io::Result<T>) -> io::Result<T> {
    match make() {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            fs::remove_file(path).and_then(|()| make())
        }
        other => other,
    }
}
