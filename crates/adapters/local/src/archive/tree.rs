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
    Standalone,
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
    max_depth: usize,
    unpack_mode: UnpackMode,
    /// Cache of resolved directories: the directory in an entry's name, and its path without links, both relative to the root.
    /// Cleared when a link or a directory is removed.
    real_paths: HashMap<PathBuf, PathBuf>,
    /// Paths that the current layer has written, including all their parents.
    written: HashSet<PathBuf>,
    /// Number of directories that were created because names of entries contain them.
    implied_directories: u64,
    buffer: Vec<u8>,
}

impl<'a> Tree<'a> {
    pub(super) fn new(root: &'a Path, max_depth: usize, unpack_mode: UnpackMode) -> Self {
        let (real_paths, written) = (HashMap::new(), HashSet::new());
        let buffer = vec![0; 64 << 10];
        Self { root, max_depth, unpack_mode, real_paths, written, implied_directories: 0, buffer }
    }

    /// Returns the number of directories that entries since the last call implied.
    pub(super) fn take_implied_directories(&mut self) -> u64 {
        std::mem::take(&mut self.implied_directories)
    }

    /// Returns the treatment of existing files.
    pub(super) fn unpack_mode(&self) -> UnpackMode {
        self.unpack_mode
    }

    pub(super) fn directory(&mut self, name: &OsStr, mode: u32) -> Result<()> {
        let Some(path) = self.relative(name)? else {
            return Ok(());
        };
        let full = self.new_path(name)?;
        match fs::symlink_metadata(&full) {
            Ok(metadata) if self.unpack_mode == UnpackMode::Package && metadata.is_symlink() => {
                return self.create_dirs(&path, name).map(drop);
            }
            Ok(metadata) if self.unpack_mode == UnpackMode::Layer && !metadata.is_dir() => {
                self.remove(&full)?;
            }
            _ => {}
        }
        let implied_directories = self.implied_directories;
        let real_path = self.create_dirs(&path, name)?;
        self.implied_directories = implied_directories;
        // The owner must be able to write into the directory and to delete it.
        let mode = self.without_set_id(mode) | 0o700;
        Ok(fs::set_permissions(self.root.join(real_path), Permissions::from_mode(mode))?)
    }

    pub(super) fn file(
        &mut self,
        name: &OsStr,
        mode: u32,
        modified: u64,
        content: &mut impl Read,
        size: u64,
    ) -> Result<()> {
        let path = self.new_path(name)?;
        // `create_new` does not follow links.
        let mut file = self.create_replacing(&path, || File::create_new(&path))?;
        let (mut remaining, mut ends_in_hole) = (size, false);
        while remaining > 0 {
            let chunk_size = usize::try_from(remaining).unwrap_or(usize::MAX).min(self.buffer.len());
            let count = match content.read(&mut self.buffer[..chunk_size]) {
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
            remaining -= count as u64;
        }
        if ends_in_hole {
            file.set_len(size)?;
        }
        // The user who unpacked a file must be able to read it.
        file.set_permissions(Permissions::from_mode(self.without_set_id(mode) | 0o400))?;
        // Keep the time, because `make` compares times. The limit is the end of the year 9999: only damaged or malicious archives
        // have later times.
        let modified = Duration::from_secs(modified.min(253_402_300_799));
        Ok(file.set_modified(SystemTime::UNIX_EPOCH + modified)?)
    }

    pub(super) fn symlink(&mut self, name: &OsStr, target: &OsStr) -> Result<()> {
        let path = self.new_path(name)?;
        if self.unpack_mode == UnpackMode::Package
            && fs::symlink_metadata(&path).is_ok_and(|metadata| metadata.is_dir())
        {
            if fs::read_dir(&path)?.next().is_some() {
                return Ok(());
            }
            fs::remove_dir(&path)?;
            self.real_paths.clear();
        }
        Ok(self.create_replacing(&path, || fs::os::unix::fs::symlink(target, &path))?)
    }

    /// Creates a hard link; returns the size of the linked file.
    pub(super) fn hard_link(&mut self, name: &OsStr, target: &OsStr) -> Result<u64> {
        let lossy = |name: &OsStr| name.to_string_lossy().into_owned();
        let target = self.relative(target)?.ok_or_else(|| UnpackError::Outside(lossy(name)))?;
        let existing = self.root.join(self.real_path(&target, name, false)?);
        let metadata = fs::symlink_metadata(&existing)?;
        // link(2) does not follow symbolic links, so in a layer the new name refers to the symbolic link itself.
        if !(metadata.is_file() || self.unpack_mode == UnpackMode::Layer && metadata.is_symlink()) {
            return Err(UnpackError::ThroughLink(lossy(name)));
        }
        let path = self.new_path(name)?;
        if path != existing {
            self.create_replacing(&path, || fs::hard_link(&existing, &path))?;
        }
        Ok(metadata.len())
    }

    /// Applies a whiteout of a layer: removes one entry, or all content of lower layers in the whiteout's directory.
    pub(super) fn white_out(&mut self, name: &OsStr, whiteout: Whiteout<'_>) -> Result<()> {
        let directory = self.new_path(name)?.parent().map(Path::to_owned).unwrap_or_default();
        Ok(match whiteout {
            Whiteout::Of(name) => self.remove_lower(&directory.join(name)),
            Whiteout::Opaque => self.remove_lower(&directory),
        }?)
    }

    /// Omits an entry, but removes the existing entry that it replaces.
    pub(super) fn omit(&mut self, name: &OsStr) -> Result<()> {
        let path = self.new_path(name)?;
        Ok(self.remove(&path)?)
    }

    /// Returns a mode without its set-id bits, and for a standalone archive also without the sticky bit.
    fn without_set_id(&self, mode: u32) -> u32 {
        mode & if self.unpack_mode == UnpackMode::Standalone { 0o777 } else { 0o1777 }
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
                Component::RootDir if self.unpack_mode == UnpackMode::Layer => continue,
                Component::ParentDir | Component::RootDir | Component::Prefix(_) => return Err(outside()),
            }
            depth += 1;
            if depth > self.max_depth {
                return Err(self.too_deep());
            }
        }
        Ok(if depth == 0 { None } else { Some(path) })
    }

    fn too_deep(&self) -> UnpackError {
        UnpackError::Limit(format!("{} nested directories", self.max_depth))
    }

    /// Returns the path for a new file or link, and creates its parents.
    fn new_path(&mut self, name: &OsStr) -> Result<PathBuf> {
        let path =
            self.relative(name)?.ok_or_else(|| UnpackError::Outside(name.to_string_lossy().into_owned()))?;
        let real = self.real_path(&path, name, true)?;
        let new_path = self.root.join(&real);
        if self.unpack_mode == UnpackMode::Layer {
            for above in real.ancestors() {
                if !self.written.insert(above.to_owned()) {
                    break;
                }
            }
        }
        Ok(new_path)
    }

    /// Resolves links in the path's parent directory; creates the parents if `creates` is set.
    fn real_path(&mut self, path: &Path, name: &OsStr, creates: bool) -> Result<PathBuf> {
        let parent = path.parent().unwrap_or(Path::new(""));
        let parent =
            if creates { self.create_dirs(parent, name)? } else { self.resolve(parent, name, false)? };
        Ok(parent.join(path.file_name().unwrap_or_default()))
    }

    /// Creates a directory and its parents, and returns its path without links.
    fn create_dirs(&mut self, path: &Path, name: &OsStr) -> Result<PathBuf> {
        if path.as_os_str().is_empty() {
            return Ok(PathBuf::new());
        }
        if let Some(real) = self.real_paths.get(path) {
            return Ok(real.clone());
        }
        let real = self.resolve(path, name, true)?;
        self.real_paths.insert(path.to_owned(), real.clone());
        Ok(real)
    }

    /// Resolves a path of directories; links never lead outside the root. Creates missing directories if `creates` is set.
    fn resolve(&mut self, path: &Path, name: &OsStr, creates: bool) -> Result<PathBuf> {
        let (mut resolved, mut followed) = (PathBuf::new(), 0);
        let mut pending = links::components(path);
        while let Some(part) = pending.pop() {
            if part == ".." {
                resolved.pop();
                continue;
            }
            resolved.push(part);
            let full = self.root.join(&resolved);
            match fs::symlink_metadata(&full) {
                Ok(metadata) if metadata.is_dir() => {}
                Ok(metadata) if metadata.is_symlink() => {
                    followed += 1;
                    if self.unpack_mode == UnpackMode::Standalone || followed > links::MAX_LINKS {
                        return Err(UnpackError::ThroughLink(name.to_string_lossy().into_owned()));
                    }
                    let target = fs::read_link(&full)?;
                    if target.is_absolute() {
                        resolved.clear();
                    } else {
                        resolved.pop();
                    }
                    pending.extend(links::components(&target));
                }
                Ok(_) => {
                    let text = format!("cannot write below {}: it is not a directory", full.display());
                    return Err(io::Error::new(io::ErrorKind::NotADirectory, text).into());
                }
                Err(e) if e.kind() == io::ErrorKind::NotFound => {
                    if resolved.components().count() > self.max_depth {
                        return Err(self.too_deep());
                    }
                    if creates {
                        fs::create_dir(&full)?;
                        fs::set_permissions(&full, Permissions::from_mode(0o755))?;
                        self.implied_directories += 1;
                    }
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(resolved)
    }

    /// Creates a file or link, replacing an earlier entry. Tries to create first, because few archives contain a name twice.
    fn create_replacing<T>(&mut self, path: &Path, make: impl Fn() -> io::Result<T>) -> io::Result<T> {
        match make() {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if self.unpack_mode == UnpackMode::Layer {
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
    fn remove_lower(&mut self, path: &Path) -> io::Result<()> {
        if !path.strip_prefix(self.root).is_ok_and(|relative| self.written.contains(relative)) {
            return self.remove(path);
        }
        if fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir()) {
            for entry in fs::read_dir(path)? {
                self.remove_lower(&entry?.path())?;
            }
        }
        Ok(())
    }
}
