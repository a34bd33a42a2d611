//! Writes an archive's entries below a directory, and nowhere else.

use std::{
    collections::{HashMap, HashSet},
    ffi::OsStr,
    fs::Permissions,
    io::{self, Read, Seek as _, SeekFrom, Write},
    os::unix::fs::PermissionsExt,
    path::{Component, Path, PathBuf},
    time::{Duration, SystemTime},
};

use fs_err::{self as fs, File};
use oci::Whiteout;

use super::{Result, UnpackError, links};
use crate::{files::if_there, tree_removal::remove_tree};

/// Treatment of files and directories that already exist in the destination.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnpackMode {
    /// A standalone archive: paths through a symbolic link are refused, and a directory is never replaced.
    #[default]
    Alone,
    /// A package on top of earlier ones. Paths lead through links, as with `dpkg`. A directory entry keeps an existing link, and
    /// a link entry replaces an existing directory only if the directory is empty.
    Package,
    /// An image layer on top of lower ones (OCI image spec, `layer.md`): paths lead through links, any entry replaces any other,
    /// whiteouts delete, and devices are omitted.
    Layer,
}

/// The destination directory of an archive. No other program writes there during unpacking.
pub(super) struct Tree<'a> {
    root: &'a Path,
    depth: usize,
    manner: UnpackMode,
    /// Maps the directories of entries' names to their paths without links, both relative to the root. Cleared when a link or a
    /// directory is removed.
    real_paths: HashMap<PathBuf, PathBuf>,
    /// Paths that the current layer has written, including all their parents.
    written: HashSet<PathBuf>,
    buffer: Vec<u8>,
}

impl<'a> Tree<'a> {
    pub(super) fn new(root: &'a Path, depth: usize, manner: UnpackMode) -> Self {
        let (real_paths, written) = (HashMap::new(), HashSet::new());
        Self { root, depth, manner, real_paths, written, buffer: vec![0; 64 << 10] }
    }

    /// Returns the treatment of existing files.
    pub(super) fn manner(&self) -> UnpackMode {
        self.manner
    }

    pub(super) fn directory(&mut self, name: &OsStr, mode: u32) -> Result<()> {
        let Some(path) = self.relative(name)? else {
            return Ok(());
        };
        let place = self.place(name)?;
        match fs::symlink_metadata(&place) {
            Ok(found) if self.manner == UnpackMode::Package && found.is_symlink() => {
                return self.enter(&path, name).map(drop);
            }
            Ok(found) if self.manner == UnpackMode::Layer && !found.is_dir() => self.remove(&place)?,
            _ => {}
        }
        let real = self.enter(&path, name)?;
        // The owner must be able to write into the directory and to delete it.
        let mode = self.allowed(mode) | 0o700;
        Ok(fs::set_permissions(self.root.join(real), Permissions::from_mode(mode))?)
    }

    pub(super) fn file(
        &mut self,
        name: &OsStr,
        mode: u32,
        modified: u64,
        content: &mut impl Read,
        size: u64,
    ) -> Result<()> {
        let path = self.place(name)?;
        // `create_new` does not follow links.
        let mut file = self.instead(&path, || File::create_new(&path))?;
        let (mut left, mut ends_in_hole) = (size, false);
        while left > 0 {
            let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(self.buffer.len());
            let count = match content.read(&mut self.buffer[..wanted]) {
                Ok(0) => return Err(super::truncated()),
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Err(UnpackError::Damaged(e)),
            };
            // Keep holes, so that a sparse file takes no more disk space here than on its original machine.
            let chunk = &self.buffer[..count];
            ends_in_hole = chunk.iter().all(|byte| *byte == 0);
            if ends_in_hole {
                file.seek(SeekFrom::Current(i64::try_from(count).unwrap_or(i64::MAX)))?;
            } else {
                file.write_all(chunk)?;
            }
            left -= count as u64;
        }
        if ends_in_hole {
            file.set_len(size)?;
        }
        // The user who unpacked a file must be able to read it.
        file.set_permissions(Permissions::from_mode(self.allowed(mode) | 0o400))?;
        // `make` compares times. The limit is the end of the year 9999: a later time means that the archive is damaged or
        // malicious.
        let modified = Duration::from_secs(modified.min(253_402_300_799));
        Ok(file.set_modified(SystemTime::UNIX_EPOCH + modified)?)
    }

    pub(super) fn symlink(&mut self, name: &OsStr, target: &OsStr) -> Result<()> {
        let path = self.place(name)?;
        if self.manner == UnpackMode::Package && fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir())
        {
            if fs::read_dir(&path)?.next().is_some() {
                return Ok(());
            }
            fs::remove_dir(&path)?;
            self.real_paths.clear();
        }
        Ok(self.instead(&path, || fs::os::unix::fs::symlink(target, &path))?)
    }

    /// Creates a hard link; returns the size of the linked file.
    pub(super) fn hard_link(&mut self, name: &OsStr, target: &OsStr) -> Result<u64> {
        let lossy = |name: &OsStr| name.to_string_lossy().into_owned();
        let target = self.relative(target)?.ok_or_else(|| UnpackError::Outside(lossy(name)))?;
        let existing = self.root.join(self.real_path(&target, name, false)?);
        let metadata = fs::symlink_metadata(&existing)?;
        // link(2) does not follow symbolic links, so in a layer the new name refers to the symbolic link itself.
        if !(metadata.is_file() || self.manner == UnpackMode::Layer && metadata.is_symlink()) {
            return Err(UnpackError::ThroughLink(lossy(name)));
        }
        let path = self.place(name)?;
        if path != existing {
            self.instead(&path, || fs::hard_link(&existing, &path))?;
        }
        Ok(metadata.len())
    }

    /// Applies a whiteout of a layer: removes one entry, or all content of lower layers in the whiteout's directory.
    pub(super) fn white_out(&mut self, name: &OsStr, whiteout: Whiteout<'_>) -> Result<()> {
        let directory = self.place(name)?.parent().map(Path::to_owned).unwrap_or_default();
        Ok(match whiteout {
            Whiteout::Of(name) => self.hide(&directory.join(name)),
            Whiteout::Opaque => self.hide(&directory),
        }?)
    }

    /// Omits an entry: removes only the existing entry that it would replace.
    pub(super) fn leave_out(&mut self, name: &OsStr) -> Result<()> {
        let place = self.place(name)?;
        Ok(self.remove(&place)?)
    }

    /// Removes the set-id bits from a mode, and for a standalone archive also the sticky bit.
    fn allowed(&self, mode: u32) -> u32 {
        mode & if self.manner == UnpackMode::Alone { 0o777 } else { 0o1777 }
    }

    /// Converts the name to a relative path of plain components; returns `None` for the root itself.
    fn relative(&self, name: &OsStr) -> Result<Option<PathBuf>> {
        let outside = || UnpackError::Outside(name.to_string_lossy().into_owned());
        let mut path = PathBuf::new();
        let mut depth = 0;
        for component in Path::new(name).components() {
            match component {
                Component::Normal(part) => path.push(part),
                Component::CurDir => continue,
                // Some image builders write every name as an absolute path. Such names are relative to the image's root.
                Component::RootDir if self.manner == UnpackMode::Layer => continue,
                Component::ParentDir | Component::RootDir | Component::Prefix(_) => return Err(outside()),
            }
            depth += 1;
            if depth > self.depth {
                return Err(self.too_deep());
            }
        }
        Ok(if depth == 0 { None } else { Some(path) })
    }

    fn too_deep(&self) -> UnpackError {
        UnpackError::Limit(format!("{} nested directories", self.depth))
    }

    /// Returns the path for a new file or link, and creates its parents.
    fn place(&mut self, name: &OsStr) -> Result<PathBuf> {
        let path =
            self.relative(name)?.ok_or_else(|| UnpackError::Outside(name.to_string_lossy().into_owned()))?;
        let real = self.real_path(&path, name, true)?;
        let place = self.root.join(&real);
        if self.manner == UnpackMode::Layer {
            for above in real.ancestors() {
                if !self.written.insert(above.to_owned()) {
                    break;
                }
            }
        }
        Ok(place)
    }

    /// Resolves links in the path's parent directory; creates the parents if `make` is set.
    fn real_path(&mut self, path: &Path, name: &OsStr, make: bool) -> Result<PathBuf> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let parent = if make { self.enter(parent, name)? } else { self.follow(parent, name, false)? };
        Ok(parent.join(path.file_name().unwrap_or_default()))
    }

    /// Creates a directory and its parents, and returns its path without links.
    fn enter(&mut self, path: &Path, name: &OsStr) -> Result<PathBuf> {
        if path.as_os_str().is_empty() {
            return Ok(PathBuf::new());
        }
        if let Some(real) = self.real_paths.get(path) {
            return Ok(real.clone());
        }
        let real = self.follow(path, name, true)?;
        self.real_paths.insert(path.to_owned(), real.clone());
        Ok(real)
    }

    /// Walks down a path of directories; links never lead outside the root. Creates missing directories if `make` is set.
    fn follow(&mut self, path: &Path, name: &OsStr, make: bool) -> Result<PathBuf> {
        let (mut real, mut links) = (PathBuf::new(), 0);
        let mut waiting = links::components(path);
        while let Some(part) = waiting.pop() {
            if part == ".." {
                real.pop();
                continue;
            }
            real.push(part);
            let full = self.root.join(&real);
            match fs::symlink_metadata(&full) {
                Ok(metadata) if metadata.is_dir() => {}
                Ok(metadata) if metadata.is_symlink() => {
                    links += 1;
                    if self.manner == UnpackMode::Alone || links > links::MAX_LINKS {
                        return Err(UnpackError::ThroughLink(name.to_string_lossy().into_owned()));
                    }
                    let target = fs::read_link(&full)?;
                    if target.is_absolute() {
                        real.clear();
                    } else {
                        real.pop();
                    }
                    waiting.extend(links::components(&target));
                }
                Ok(_) => {
                    let text = format!("write below {}: it is not a directory", full.display());
                    return Err(io::Error::new(io::ErrorKind::NotADirectory, text).into());
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    if real.components().count() > self.depth {
                        return Err(self.too_deep());
                    }
                    if make {
                        fs::create_dir(&full)?;
                        fs::set_permissions(&full, Permissions::from_mode(0o755))?;
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(real)
    }

    /// Creates a file or link, replacing an earlier entry. Tries to create first, because few archives contain a name twice.
    fn instead<T>(&mut self, path: &Path, make: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match make() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if self.manner == UnpackMode::Layer {
                    self.remove(path)?;
                } else {
                    fs::remove_file(path)?;
                    self.real_paths.clear();
                }
                make()
            }
            other => other,
        }
    }

    /// Removes a file, link or tree, if it exists.
    fn remove(&mut self, path: &Path) -> io::Result<()> {
        let Some(metadata) = if_there(fs::symlink_metadata(path))? else { return Ok(()) };
        if metadata.is_file() {
            return fs::remove_file(path);
        }
        self.real_paths.clear();
        remove_tree(path)
    }

    /// Removes the content of lower layers at a path; entries written by the current layer stay.
    fn hide(&mut self, path: &Path) -> io::Result<()> {
        if !path.strip_prefix(self.root).is_ok_and(|relative| self.written.contains(relative)) {
            return self.remove(path);
        }
        if fs::symlink_metadata(path).is_ok_and(|found| found.is_dir()) {
            for entry in fs::read_dir(path)? {
                self.hide(&entry?.path())?;
            }
        }
        Ok(())
    }
}
