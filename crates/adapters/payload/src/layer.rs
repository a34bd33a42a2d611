//! Turns a payload directory into a layer file.

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fs::Metadata,
    io::{self, BufWriter},
    os::unix::fs::MetadataExt as _,
    path::{Component, Path, PathBuf},
};

use farrier_core::image::Digest;
use farrier_local::files::walk_source;
use fs_err::{self as fs, File};
use oci::{EntryKind, Layer, LayerError, LayerReader, LayerWriter, TopLevel, TreeDigester, top_level_entry};
use tempfile::NamedTempFile;
use walkdir::{DirEntry, WalkDir};

use super::error::{PayloadError, Result};

/// Modification time of every entry, in seconds since the Unix epoch.
const MTIME: u64 = 0;
/// Top-level names that are links into `usr/` on a usr-merged system (<https://systemd.io/THE_CASE_FOR_THE_USR_MERGE/>).
pub(super) const MERGED: [&str; 4] = ["bin", "lib", "lib64", "sbin"];

/// A payload as a layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PayloadLayer {
    /// The layer, in the requested file.
    pub layer: Layer,
    /// Digest of the payload tree, the same on every base.
    pub payload_digest: Digest,
}

pub(super) struct Entry {
    pub(super) mode: u32,
    kind: Kind,
}

enum Kind {
    /// A directory; its content is in further entries.
    Directory,
    /// A file; `source` is its path on this machine.
    File { source: PathBuf, size: u64 },
    /// A symbolic link with this target.
    Symlink(PathBuf),
}

impl Entry {
    /// Describes a local directory, symbolic link or file.
    pub(super) fn of(path: &Path, metadata: &Metadata) -> Result<Self> {
        let kind = if metadata.is_dir() {
            Kind::Directory
        } else if metadata.is_symlink() {
            Kind::Symlink(fs::read_link(path)?)
        } else {
            Kind::File { source: path.to_owned(), size: metadata.len() }
        };
        Ok(Self { mode: metadata.mode(), kind })
    }
}

type Buffered = BufWriter<NamedTempFile>;
pub(super) type Tree = BTreeMap<PathBuf, Entry>;

/// Writes the payload directory as a layer to `out`, atomically. Blocks; uses a few hundred bytes of memory per entry.
pub fn write_payload_layer(payload: &Path, usr_merged_base: bool, out: &Path) -> Result<PayloadLayer> {
    let tree = walk(payload)?;
    let needs_merge = usr_merged_base && tree.keys().any(|path| is_merged(path));
    if !needs_merge {
        let layer = write_layer(&tree, out)?;
        let payload_digest = layer.diff_id.clone();
        return Ok(PayloadLayer { layer, payload_digest });
    }
    let payload_digest = digest(&tree)?;
    let layer = write_layer(&usr_merge(tree)?, out)?;
    Ok(PayloadLayer { layer, payload_digest })
}

pub(super) fn walk(payload: &Path) -> Result<Tree> {
    entries_of(payload, WalkDir::new(payload).min_depth(1))
}

fn entries_of(
    payload: &Path,
    walk: impl IntoIterator<Item = Result<DirEntry, walkdir::Error>>,
) -> Result<Tree> {
    let mut tree = Tree::new();
    for entry in walk {
        let entry = entry?;
        let path = entry.path();
        let metadata = fs::symlink_metadata(path)?;
        let relative = path.strip_prefix(payload).unwrap_or(path).to_owned();
        if !(metadata.is_dir() || metadata.is_file() || metadata.is_symlink()) {
            return Err(PayloadError::Kind(relative));
        }
        tree.insert(relative, Entry::of(path, &metadata)?);
    }
    Ok(tree)
}

fn is_merged(path: &Path) -> bool {
    path.components().next().is_some_and(|first| MERGED.iter().any(|name| first.as_os_str() == *name))
}

/// Moves the entries below top-level `lib`, `bin`, `sbin` and `lib64` to `usr`.
///
/// On a usr-merged base these names are symbolic links. A layer with a real `lib` directory replaces the link, and hides
/// everything in the base's `usr/lib`, including its dynamic loader.
fn usr_merge(tree: Tree) -> Result<Tree> {
    let usr = Path::new("usr");
    let mut merged = Tree::new();
    let mut origins: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
    for (path, mut entry) in tree {
        let merged_path = if is_merged(&path) {
            if path.components().count() == 1 {
                match &entry.kind {
                    Kind::Directory => {}
                    // The payload is usr-merged too: the base has this link already.
                    Kind::Symlink(target) if is_link_into_usr(&path, target) => continue,
                    _ => return Err(PayloadError::HidesBase(path)),
                }
            }
            if let Kind::Symlink(target) = &mut entry.kind {
                *target = one_level_deeper(&path, target);
            }
            usr.join(&path)
        } else {
            path.clone()
        };
        match merged.get(&merged_path) {
            Some(Entry { kind: Kind::Directory, .. }) if matches!(entry.kind, Kind::Directory) => continue,
            Some(_) => {
                let first = origins.remove(&merged_path).unwrap_or_else(|| merged_path.clone());
                return Err(PayloadError::Conflict { first, second: path, path: merged_path });
            }
            None => {}
        }
        origins.insert(merged_path.clone(), path);
        merged.insert(merged_path, entry);
    }
    match merged.get(usr) {
        None => {
            merged.insert(usr.to_owned(), Entry { mode: 0o755, kind: Kind::Directory });
        }
        Some(Entry { kind: Kind::Directory, .. }) => {}
        Some(_) => return Err(PayloadError::HidesBase(usr.to_owned())),
    }
    Ok(merged)
}

/// Whether this is the link of a usr-merged system, such as `lib -> usr/lib`.
pub(super) fn is_link_into_usr(name: &Path, target: &Path) -> bool {
    target.strip_prefix("/").unwrap_or(target) == Path::new("usr").join(name)
}

/// Adapts a link that moves into `usr`. A relative target that leaves its top-level directory needs one more `..` there. If the
/// target then enters `lib` or `bin`, the base's links resolve the path.
fn one_level_deeper(link: &Path, target: &Path) -> PathBuf {
    // Number of directories between the image's root and the current path.
    let mut depth = link.components().count() - 1;
    let mut components = target.components();
    let mut deeper = PathBuf::new();
    while let Some(component) = components.next() {
        deeper.push(component);
        match component {
            Component::Normal(_) => depth += 1,
            Component::ParentDir if depth == 1 => {
                deeper.push("..");
                deeper.push(components.as_path());
                return deeper;
            }
            Component::ParentDir => depth -= 1,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => break,
        }
    }
    target.to_owned()
}

/// Calls `write` for each entry. The entry kind borrows the link target or the open file for the call.
fn each_entry(
    tree: &Tree,
    mut write: impl FnMut(&Path, u32, EntryKind<'_>) -> Result<(), LayerError>,
) -> Result<()> {
    for (path, entry) in tree {
        match &entry.kind {
            Kind::File { source, size } => {
                let mut file = File::open(source)?;
                write(path, entry.mode, EntryKind::File { size: *size, content: &mut file })?;
            }
            Kind::Symlink(target) => write(path, entry.mode, EntryKind::Symlink(target))?,
            Kind::Directory => write(path, entry.mode, EntryKind::Directory)?,
        }
    }
    Ok(())
}

pub(super) fn digest(tree: &Tree) -> Result<Digest> {
    let mut digester = TreeDigester::new(MTIME);
    each_entry(tree, |path, mode, kind| digester.entry(path, mode, kind))?;
    Ok(digester.finish()?)
}

/// Writes a whole root file system as a layer to `out`, with gzip level `level`. Every entry gets the modification time
/// `mtime` (seconds since the Unix epoch), and hard links become files. Blocks.
pub fn write_tree_layer(root: &Path, mtime: u64, level: u32, out: &Path) -> Result<Layer> {
    write_entries(&walk(root)?, |file| LayerWriter::at(file, mtime, level), out)
}

/// Writes a source tree as a layer to `out`, without its version-control data. Blocks.
pub fn write_source_layer(root: &Path, out: &Path) -> Result<Layer> {
    let walk = walk_source(WalkDir::new(root).min_depth(1));
    write_layer(&entries_of(root, walk)?, out)
}

fn write_layer(tree: &Tree, out: &Path) -> Result<Layer> {
    write_entries(tree, |file| LayerWriter::new(file, MTIME), out)
}

fn write_entries(
    tree: &Tree,
    start: impl FnOnce(Buffered) -> LayerWriter<Buffered>,
    out: &Path,
) -> Result<Layer> {
    let directory = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let file = tempfile::Builder::new().prefix(&prefix_of(out)).tempfile_in(directory)?;
    let mut writer = start(BufWriter::with_capacity(256 << 10, file));
    each_entry(tree, |path, mode, kind| writer.entry(path, mode, kind))?;
    let (layer, buffered) = writer.finish()?;
    let file = buffered.into_inner().map_err(io::IntoInnerError::into_error)?;
    file.persist(out).map_err(|error| error.error)?;
    Ok(layer)
}

fn prefix_of(out: &Path) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(out.file_name().unwrap_or_default());
    prefix.push(".");
    prefix
}

/// Whether `lib` is a link into `usr` in an image with these layer files (lowest first). Blocks.
pub fn is_usr_merged(layers: &[PathBuf]) -> Result<bool> {
    let name = "lib";
    // Search from the top, because the topmost layer with the name decides. Large base layers are then rarely read.
    for path in layers.iter().rev() {
        let tar = LayerReader::new(File::open(path)?)?;
        match top_level_entry(tar, name)? {
            Some(TopLevel::Symlink(target)) => return Ok(is_link_into_usr(Path::new(name), &target)),
            Some(TopLevel::Other | TopLevel::Deleted) => return Ok(false),
            None => {}
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests;
