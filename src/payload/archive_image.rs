//! Adapter: images that an engine made (`output: image`): import for publication, modules for the check.

use std::{
    collections::HashSet,
    io::{self, BufReader, BufWriter},
    ops::ControlFlow,
    path::{Path, PathBuf},
};

use fs_err::{self as fs, File};
use tar::EntryType;

use super::{
    error::{PayloadError, Result},
    layer::is_link_into_usr,
    modules::is_module_file,
};
use crate::oci::{
    Layer, LayerReader, Names, Whiteout, compress,
    docker_archive::{ImageArchive, part},
    each_entry, plain_path,
};
use crate::tree_removal::remove_tree;

/// Larger than all modules of any distribution's kernel together.
const MAX_MODULE_BYTES: u64 = 8 << 30;

/// An engine's image as files.
#[derive(Clone, Debug)]
pub struct ArchiveImage {
    /// The configuration's bytes.
    pub config: Vec<u8>,
    /// The layers, the lowest first, each with its file.
    pub layers: Vec<(PathBuf, Layer)>,
}

/// Reads a `docker save` archive and writes its layers into `work_dir`, compressed. Blocks.
///
/// Compressed layers are compressed again, so that the same image gives the same digests whichever
/// engine saved it.
pub fn import_docker_archive(archive: &Path, work_dir: &Path) -> Result<ArchiveImage> {
    let mut file = File::open(archive)?;
    let image = ImageArchive::open(BufReader::new(&file))?;
    let mut layers = Vec::new();
    for (index, (extent, wanted)) in image.layers.iter().zip(&image.diff_ids).enumerate() {
        let temporary = tempfile::NamedTempFile::new_in(work_dir)?;
        let blob = part(&mut file, *extent)?;
        let layer = LayerReader::new(blob)
            .and_then(|tar| compress(tar, BufWriter::with_capacity(256 << 10, temporary.as_file())))?;
        if layer.diff_id.as_str() != wanted {
            let found = layer.diff_id.to_string();
            return Err(PayloadError::DiffId { number: index + 1, found, wanted: wanted.clone() });
        }
        let path = work_dir.join(layer.digest.hex());
        temporary.persist(&path).map_err(|error| error.error)?;
        layers.push((path, layer));
    }
    Ok(ArchiveImage { config: image.config, layers })
}

/// Writes the modules (`*.ko`, also compressed) under any `lib/modules/` of an image archive into `dest`, as
/// the stacked layers leave them; `usr/lib/modules` becomes `lib/modules`. Returns how many. Blocks.
pub fn extract_modules(archive: &Path, dest: &Path) -> Result<usize> {
    apply_layers(&ImageLayers::Archive(archive.to_owned()), dest, &|path| {
        let is_module = has_module_name(path) && below(path, ["lib", "modules"]).is_some();
        if is_module { Keep::Content } else { Keep::Nothing }
    })?;
    let is_file = |found: &walkdir::DirEntry| found.file_type().is_file();
    Ok(walkdir::WalkDir::new(dest).into_iter().filter_map(Result::ok).filter(is_file).count())
}

/// Where an image's layers are.
#[derive(Clone, Debug)]
pub enum ImageLayers {
    /// Each a file, the lowest first.
    Files(Vec<PathBuf>),
    /// All in a `docker save` archive.
    Archive(PathBuf),
}

/// What is wanted of a file of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    /// Nothing at all.
    Nothing,
    /// That it is there: an empty file stands for it.
    Name,
    /// Its bytes.
    Content,
}

/// Puts what `keep` wants of all layers into `dest`, the lowest first.
pub(super) fn apply_layers(layers: &ImageLayers, dest: &Path, keep: &dyn Fn(&Path) -> Keep) -> Result<()> {
    let mut stack = Stack { dest, keep, left: MAX_MODULE_BYTES, written: HashSet::new() };
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

/// What the layers have left so far. Only directories and regular files are ever made below `dest`, so no path leads out of it.
struct Stack<'a> {
    dest: &'a Path,
    keep: &'a dyn Fn(&Path) -> Keep,
    /// Bytes that may still be written.
    left: u64,
    /// By the uppermost layer.
    written: HashSet<PathBuf>,
}

impl Stack<'_> {
    /// Puts a layer over those before it.
    fn apply(&mut self, tar: impl io::Read) -> Result<()> {
        self.written.clear();
        each_entry(tar, |names, entry| self.entry(names, entry).map(ControlFlow::<()>::Continue)).map(drop)
    }

    fn entry(&mut self, names: &Names, entry: &mut tar::Entry<'_, impl io::Read>) -> Result<()> {
        let Some(plain) = plain_path(Path::new(&names.path)) else { return Ok(()) };
        let (kind, link) = (entry.header().entry_type(), Path::new(&names.link));
        let merge_link = kind == EntryType::Symlink && is_link_into_usr(&plain, link);
        // `lib -> usr/lib` replaces nothing: both are one directory in `dest`.
        if kind == EntryType::Directory || merge_link {
            return Ok(());
        }
        let hard_link = (kind == EntryType::Link).then(|| plain_path(link)).flatten().map(without_usr);
        let path = without_usr(plain);
        let place = self.dest.join(&path);
        match path.file_name().and_then(Whiteout::of) {
            Some(Whiteout::Opaque) => return clear(place.parent().unwrap_or(self.dest), &self.written),
            Some(Whiteout::Of(name)) => return remove(&place.with_file_name(name)),
            None => {}
        }
        let source = hard_link.map(|target| self.dest.join(target));
        if source.as_deref() == Some(&place) {
            return Ok(());
        }
        // Whatever the entry is, it replaces what lower layers had there.
        remove(&place)?;
        let keep = (self.keep)(&path);
        let content = match source {
            // A link to something that was not written is a link to something that is not wanted.
            Some(source) if source.is_file() => Some(source),
            None if kind == EntryType::Regular => None,
            None if kind == EntryType::Symlink && keep == Keep::Name => None,
            _ => return Ok(()),
        };
        match keep {
            Keep::Nothing => return Ok(()),
            Keep::Name => {
                make_parents(self.dest, &place)?;
                File::create(&place)?;
            }
            Keep::Content => self.write(&place, content.as_deref(), entry)?,
        }
        self.written.insert(place);
        Ok(())
    }

    /// A link is copied, so it counts as often as there are names.
    fn write(
        &mut self,
        place: &Path,
        linked: Option<&Path>,
        entry: &mut tar::Entry<'_, impl io::Read>,
    ) -> Result<()> {
        make_parents(self.dest, place)?;
        let size =
            linked.map_or_else(|| Ok(entry.size()), |file| fs::metadata(file).map(|file| file.len()))?;
        self.left = self.left.checked_sub(size).ok_or(PayloadError::TooLarge(MAX_MODULE_BYTES))?;
        let copied = match linked {
            Some(file) => fs::copy(file, place)?,
            None => io::copy(entry, &mut File::create(place)?)?,
        };
        if copied == size { Ok(()) } else { Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()) }
    }
}

/// Removes the files of lower layers below a directory.
fn clear(directory: &Path, keep: &HashSet<PathBuf>) -> Result<()> {
    for found in walkdir::WalkDir::new(directory).into_iter().filter_map(Result::ok) {
        if found.file_type().is_file() && !keep.contains(found.path()) {
            remove(found.path())?;
        }
    }
    Ok(())
}

fn without_usr(path: PathBuf) -> PathBuf {
    match path.strip_prefix("usr") {
        Ok(rest) if rest.starts_with("lib") => rest.to_owned(),
        _ => path,
    }
}

/// Does a file go by a module's name?
pub(super) fn has_module_name(path: &Path) -> bool {
    path.file_name().and_then(|name| name.to_str()).is_some_and(is_module_file)
}

/// The part of a path below a directory of these two names, wherever that is.
pub(super) fn below(path: &Path, directory: [&str; 2]) -> Option<PathBuf> {
    let names: Vec<_> = path.iter().collect();
    let at = names.windows(2).position(|pair| pair == directory)?;
    Some(names.iter().skip(at + 2).collect())
}

/// Makes the directories above a file; a file of a lower layer in their way is replaced, as a runtime would.
fn make_parents(dest: &Path, file: &Path) -> Result<()> {
    let inner = file.parent().and_then(|parent| parent.strip_prefix(dest).ok());
    let mut place = dest.to_owned();
    for name in inner.unwrap_or(Path::new("")) {
        place.push(name);
        if !place.is_dir() {
            remove(&place)?;
            fs::create_dir(&place)?;
        }
    }
    Ok(())
}

fn remove(place: &Path) -> Result<()> {
    match remove_tree(place) {
        Err(error) if !matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
            Err(error.into())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
#[path = "archive_image_tests.rs"]
mod tests;
