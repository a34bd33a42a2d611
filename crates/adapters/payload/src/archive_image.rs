//! Images made by an engine (`output: image`): imports them for publication and extracts their modules for the check.

use std::{
    collections::HashSet,
    io::{self, BufReader, BufWriter},
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use farrier_local::tree_removal::remove_tree;
use fs_err::{self as fs, File};
use oci::{
    Layer, LayerReader, Names, Whiteout, compress,
    docker_archive::{ImageArchive, part},
    each_entry, plain_path,
};
use tar::EntryType;

use super::{
    error::{PayloadError, Result},
    layer::is_link_into_usr,
    modules::is_module_file,
};

/// Maximum total size of modules in bytes, larger than all modules of any distribution's kernel.
const MAX_MODULE_BYTES: u64 = 8 << 30;
/// Maximum number of files that are written for an image, as in an archive.
const MAX_FILES: u64 = 500_000;

/// An engine's image as files.
#[derive(Clone, Debug)]
pub struct ArchiveImage {
    /// The configuration's bytes.
    pub config: Vec<u8>,
    /// Layers with their files, lowest first.
    pub layers: Vec<(PathBuf, Layer)>,
}

/// Reads a `docker save` archive and writes its layers into `work_dir`, compressed. Blocks.
///
/// Compressed layers are compressed again, so that the same image has the same digests whichever engine saved it.
pub fn import_docker_archive(archive: &Path, work_dir: &Path) -> Result<ArchiveImage> {
    let mut file = File::open(archive)?;
    let image = ImageArchive::open(BufReader::new(&file))?;
    let mut layers = Vec::new();
    for (index, (extent, expected)) in image.layers.iter().zip(&image.diff_ids).enumerate() {
        let temporary = tempfile::NamedTempFile::new_in(work_dir)?;
        let blob = part(&mut file, *extent)?;
        let layer = LayerReader::new(blob)
            .and_then(|tar| compress(tar, BufWriter::with_capacity(256 << 10, temporary.as_file())))?;
        if layer.diff_id.as_str() != expected {
            let actual = layer.diff_id.to_string();
            return Err(PayloadError::DiffId { number: index + 1, actual, expected: expected.clone() });
        }
        let path = work_dir.join(layer.digest.hex());
        temporary.persist(&path).map_err(|error| error.error)?;
        layers.push((path, layer));
    }
    Ok(ArchiveImage { config: image.config, layers })
}

/// Writes the modules (`*.ko`, also compressed) below any `lib/modules/` of an image archive into `dest`, as the stacked layers
/// show them. `usr/lib/modules` becomes `lib/modules`. Returns the number of modules. Blocks.
pub fn extract_modules(archive: &Path, dest: &Path) -> Result<usize> {
    apply_layers(&ImageLayers::Archive(archive.to_owned()), dest, &|path| {
        let is_module = has_module_name(path) && below(path, ["lib", "modules"]).is_some();
        if is_module { Keep::Content } else { Keep::Nothing }
    })?;
    let is_file = |entry: &walkdir::DirEntry| entry.file_type().is_file();
    Ok(walkdir::WalkDir::new(dest).into_iter().filter_map(Result::ok).filter(is_file).count())
}

/// Location of an image's layers.
#[derive(Clone, Debug)]
pub enum ImageLayers {
    /// One file per layer, lowest first.
    Files(Vec<PathBuf>),
    /// A `docker save` archive with all layers.
    Archive(PathBuf),
}

/// How much of a file in an image is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// The file is skipped.
    Nothing,
    /// An empty file with the same name.
    Name,
    /// The file with its content.
    Content,
}

/// Writes the files selected by `keep` into `dest`, applying the layers from the lowest up.
pub(super) fn apply_layers(layers: &ImageLayers, dest: &Path, keep: &dyn Fn(&Path) -> Keep) -> Result<()> {
    let mut stack = Stack { dest, keep, budget: MAX_MODULE_BYTES, files: MAX_FILES, written: HashSet::new() };
    match layers {
        ImageLayers::Files(files) => {
            for path in files {
                stack.apply(LayerReader::new(File::open(path)?)?)?;
            }
        }
        ImageLayers::Archive(path) => {
            let mut file = File::open(path)?;
            let image = ImageArchive::open(BufReader::new(&file))?;
            for extent in &image.layers {
                stack.apply(LayerReader::new(part(&mut file, *extent)?)?)?;
            }
        }
    }
    Ok(())
}

/// The layers applied so far. Only directories and regular files are created below `dest`, so no path leads out of it.
struct Stack<'a> {
    dest: &'a Path,
    keep: &'a dyn Fn(&Path) -> Keep,
    /// Number of bytes that may still be written.
    budget: u64,
    /// Number of files that may still be written.
    files: u64,
    /// Files written by the current layer.
    written: HashSet<PathBuf>,
}

impl Stack<'_> {
    /// Applies a layer on top of the earlier ones.
    fn apply(&mut self, tar: impl io::Read) -> Result<()> {
        self.written.clear();
        each_entry(tar, |names, entry| self.entry(names, entry).map(ControlFlow::<()>::Continue)).map(drop)
    }

    fn entry(&mut self, names: &Names, entry: &mut tar::Entry<'_, impl io::Read>) -> Result<()> {
        let Some(plain) = plain_path(Path::new(&names.path)) else { return Ok(()) };
        let (kind, link) = (entry.header().entry_type(), Path::new(&names.link));
        let merge_link = kind == EntryType::Symlink && is_link_into_usr(&plain, link);
        // `lib -> usr/lib` replaces nothing: both are the same directory in `dest`.
        if kind == EntryType::Directory || merge_link {
            return Ok(());
        }
        let hard_link = (kind == EntryType::Link).then(|| plain_path(link)).flatten().map(without_usr);
        let path = without_usr(plain);
        let full = self.dest.join(&path);
        match path.file_name().and_then(Whiteout::of) {
            Some(Whiteout::Opaque) => return clear(full.parent().unwrap_or(self.dest), &self.written),
            Some(Whiteout::Of(name)) => return remove(&full.with_file_name(name)),
            None => {}
        }
        let source = hard_link.map(|target| self.dest.join(target));
        if source.as_deref() == Some(&full) {
            return Ok(());
        }
        // Any entry replaces what lower layers have at the path.
        remove(&full)?;
        let keep = (self.keep)(&path);
        let content = match source {
            // A hard link to a file that the filter skipped matches the last arm.
            Some(source) if source.is_file() => Some(source),
            None if kind == EntryType::Regular => None,
            None if kind == EntryType::Symlink && keep == Keep::Name => None,
            _ => return Ok(()),
        };
        if keep == Keep::Nothing {
            return Ok(());
        }
        self.files = self.files.checked_sub(1).ok_or(PayloadError::TooManyFiles(MAX_FILES))?;
        if keep == Keep::Name {
            make_parents(self.dest, &full)?;
            File::create(&full)?;
        } else {
            self.write(&full, content.as_deref(), entry)?;
        }
        self.written.insert(full);
        Ok(())
    }

    /// Writes a file. A hard link is copied, so its content counts once per name.
    fn write(
        &mut self,
        path: &Path,
        linked: Option<&Path>,
        entry: &mut tar::Entry<'_, impl io::Read>,
    ) -> Result<()> {
        make_parents(self.dest, path)?;
        let size =
            linked.map_or_else(|| Ok(entry.size()), |file| fs::metadata(file).map(|file| file.len()))?;
        self.budget = self.budget.checked_sub(size).ok_or(PayloadError::TooLarge(MAX_MODULE_BYTES))?;
        let copied = match linked {
            Some(file) => fs::copy(file, path)?,
            None => io::copy(entry, &mut File::create(path)?)?,
        };
        if copied == size { Ok(()) } else { Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()) }
    }
}

/// Removes the files of lower layers below a directory.
fn clear(directory: &Path, written: &HashSet<PathBuf>) -> Result<()> {
    for entry in walkdir::WalkDir::new(directory).into_iter().filter_map(Result::ok) {
        if entry.file_type().is_file() && !written.contains(entry.path()) {
            remove(entry.path())?;
        }
    }
    Ok(())
}

fn without_usr(path: PathBuf) -> PathBuf {
    match path.strip_prefix("usr") {
        Ok(path_in_usr) if path_in_usr.starts_with("lib") => path_in_usr.to_owned(),
        _ => path,
    }
}

/// Whether a file has the name of a module.
pub(super) fn has_module_name(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_module_file)
}

/// Returns the part of a path below the first directory with these two names.
pub(super) fn below(path: &Path, directory: [&str; 2]) -> Option<PathBuf> {
    let names: Vec<_> = path.iter().collect();
    let index = names.windows(2).position(|pair| pair == directory)?;
    Some(names.iter().skip(index + 2).collect())
}

/// Creates the parent directories of a file. As in a container runtime, a directory replaces a file of a lower layer.
fn make_parents(dest: &Path, file: &Path) -> Result<()> {
    let parents = file.parent().and_then(|parent| parent.strip_prefix(dest).ok());
    let mut directory = dest.to_owned();
    for name in parents.unwrap_or(Path::new("")) {
        directory.push(name);
        if !directory.is_dir() {
            remove(&directory)?;
            fs::create_dir(&directory)?;
        }
    }
    Ok(())
}

fn remove(path: &Path) -> Result<()> {
    match remove_tree(path) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Err(error.into())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "archive_image_tests.rs"]
mod tests;
