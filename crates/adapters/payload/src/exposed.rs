//! Exposed headers: the headers and symbol tables that a payload offers to drivers compiled against it.

use std::{
    fs::Metadata,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use farrier_core::{
    image::{Digest, checked::matches_glob},
    text::some_of,
};
use farrier_local::archive::{self, UnpackError, links};
use fs_err::{self as fs, os::unix::fs::symlink};
use oci::plain_path;
use walkdir::WalkDir;

use super::{
    error::{PayloadError, Result},
    layer::{self, MERGED},
};

/// File name of a symbol table, anywhere in an exposed tree.
const SYMBOL_TABLE: &str = "Module.symvers";
/// Maximum size of all symbol tables of an image in bytes, which farrier reads into memory. A kernel's own table has 2 MB.
const MAX_TABLES: u64 = 64 << 20;
/// Directory in which templates create the payload. An absolute link target in this directory refers to the payload's root.
const OUT: &str = "out";
/// Maximum number of names listed when an exposed path is missing.
const NEARBY: usize = 8;

/// The exposed trees of a payload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exposed {
    /// The trees, relative to the payload, sorted; none is inside another.
    pub paths: Vec<PathBuf>,
    /// Digest over the trees' paths, kinds, link targets, bytes and executable bits.
    pub digest: Digest,
    /// Symbol tables in the trees, relative to the payload, sorted.
    pub tables: Vec<PathBuf>,
}

impl Exposed {
    /// Returns the trees without a symbol table: no driver can be linked against them.
    pub fn without_tables(&self) -> impl Iterator<Item = &Path> {
        let has_table = |path: &Path| self.tables.iter().any(|table| table.starts_with(path));
        self.paths.iter().map(PathBuf::as_path).filter(move |path| !has_table(path))
    }
}

/// Finds the exposed trees in a payload directory. `exposes` are absolute paths whose last component may contain one `*`. Makes
/// absolute links in the trees relative, because they would lead elsewhere behind a bind mount or in another build. Blocks.
pub fn expose(payload: &Path, exposes: &[impl AsRef<str>]) -> Result<Exposed> {
    let paths = find(payload, exposes)?;
    for path in &paths {
        each_entry(payload, path, |path, metadata| {
            if metadata.is_symlink() { make_link_relative(payload, path, &paths) } else { Ok(()) }
        })?;
    }
    exposed_of(payload, paths)
}

/// Reads a tree that was exposed before, without changing it. Blocks.
pub fn read_exposed(tree: &Path, exposes: &[impl AsRef<str>]) -> Result<Exposed> {
    exposed_of(tree, find(tree, exposes)?)
}

/// Unpacks only the exposed trees of a payload's layer into an existing directory. Blocks.
pub fn unpack_exposed(layer: &Path, exposes: &[impl AsRef<str>], dest: &Path) -> Result<(), UnpackError> {
    let is_selected = |path: &Path| {
        plain_path(path)
            .is_some_and(|path| exposes.iter().any(|exposed| is_at_or_below(&path, exposed.as_ref())))
    };
    archive::unpack_layer(layer, dest, &archive::Options { is_selected: &is_selected, ..Default::default() })
}

/// Unpacks only one kernel's module files of a payload's layer into an existing directory. Blocks.
pub fn unpack_modules(layer: &Path, release: &str, dest: &Path) -> Result<(), UnpackError> {
    let is_selected = |path: &Path| {
        let Some(path) = plain_path(path) else { return false };
        let inner = path.strip_prefix("usr").unwrap_or(&path);
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        inner.starts_with(Path::new("lib/modules").join(release)) && super::modules::is_module_file(name)
    };
    archive::unpack_layer(layer, dest, &archive::Options { is_selected: &is_selected, ..Default::default() })
}

/// Returns the symbol tables in an exposed tree, with their text. Blocks.
pub fn read_symbol_tables(tree: &Path) -> Result<Vec<(PathBuf, String)>> {
    let (mut tables, mut size) = (Vec::new(), 0);
    each_entry(tree, Path::new(""), |path, metadata| {
        if count_symbol_table(path, metadata, &mut size)? {
            let path_on_disk = tree.join(path);
            // Bytes that are not UTF-8 cannot be part of a symbol; the table's parser rejects them.
            let text = fs::read(&path_on_disk)?;
            tables.push((path.to_owned(), String::from_utf8_lossy(&text).into_owned()));
        }
        Ok(())
    })?;
    Ok(tables)
}

/// Returns whether an entry is a symbol table. Adds the size of a table to `size`, and fails above [`MAX_TABLES`].
fn count_symbol_table(path: &Path, metadata: &Metadata, size: &mut u64) -> Result<bool> {
    let is_table = metadata.is_file() && path.file_name().is_some_and(|name| name == SYMBOL_TABLE);
    if is_table {
        *size = size.saturating_add(metadata.len());
        if *size > MAX_TABLES {
            return Err(PayloadError::SymbolTables { table: path.to_owned(), mib: MAX_TABLES >> 20 });
        }
    }
    Ok(is_table)
}

/// Whether a path of the payload matches the pattern or is below a match.
fn is_at_or_below(path: &Path, exposed: &str) -> bool {
    let mut names = path.iter();
    let mut parts = exposed.trim_start_matches('/').split('/').peekable();
    while let Some(part) = parts.next() {
        let Some(name) = names.next().and_then(|name| name.to_str()) else { return false };
        let fits = if parts.peek().is_some() { part == name } else { matches_glob(part, name) };
        if !fits {
            return false;
        }
    }
    true
}

/// Returns the existing exposed paths, relative to the payload.
fn find(payload: &Path, exposes: &[impl AsRef<str>]) -> Result<Vec<PathBuf>> {
    let (mut found, mut missing) = (Vec::new(), Vec::new());
    for exposed in exposes.iter().map(AsRef::as_ref) {
        let pattern = Path::new(exposed.trim_start_matches('/'));
        if pattern.iter().next().is_some_and(|first| MERGED.iter().any(|name| first == *name)) {
            return Err(PayloadError::Merged(exposed.to_owned()));
        }
        let parent = pattern.parent().unwrap_or(Path::new(""));
        let name = pattern.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let previous_count = found.len();
        if deepest_directory(payload, parent) == parent {
            let names = names_in(payload, parent)?;
            let matching = names.iter().filter(|candidate| matches_glob(name, candidate));
            found.extend(matching.map(|candidate| parent.join(candidate)));
        }
        if found.len() == previous_count {
            missing.push(exposed.to_owned());
        }
    }
    if let Some(first) = missing.first() {
        let nearby = nearby(payload, Path::new(first.trim_start_matches('/')))?;
        return Err(PayloadError::Missing(missing, nearby));
    }
    found.sort();
    found.dedup_by(|path, earlier| path.starts_with(earlier));
    Ok(found)
}

/// Returns the longest prefix of a path that consists of real directories: a link could lead out of the payload.
pub(super) fn deepest_directory(payload: &Path, path: &Path) -> PathBuf {
    let mut deepest = PathBuf::new();
    for name in path {
        let next = deepest.join(name);
        if !fs::symlink_metadata(payload.join(&next)).is_ok_and(|metadata| metadata.is_dir()) {
            break;
        }
        deepest = next;
    }
    deepest
}

fn names_in(payload: &Path, directory: &Path) -> Result<Vec<String>> {
    let path = payload.join(directory);
    let listing = fs::read_dir(&path)?;
    let mut names = Vec::new();
    for entry in listing {
        let entry = entry?;
        names.push(entry.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Describes, for messages, what exists near a missing path.
fn nearby(payload: &Path, missing: &Path) -> Result<String> {
    let directory = deepest_directory(payload, missing.parent().unwrap_or(Path::new("")));
    let names = names_in(payload, &directory)?;
    if names.is_empty() {
        return Ok(format!("/{} is empty", directory.display()));
    }
    Ok(format!("/{} has {}", directory.display(), some_of(&names, NEARBY)))
}

/// Makes an absolute link relative. Refuses a link that would dangle elsewhere.
fn make_link_relative(payload: &Path, link: &Path, exposed: &[PathBuf]) -> Result<()> {
    let link_path = payload.join(link);
    let target = fs::read_link(&link_path)?;
    let refuse = |why| PayloadError::Link { link: Path::new("/").join(link), target: target.clone(), why };
    let parent = link.parent().unwrap_or(Path::new(""));
    let resolved =
        links::target_of(parent, &target).ok_or_else(|| refuse("its target is outside the payload"))?;
    let exists = |path: &Path| fs::symlink_metadata(payload.join(path)).is_ok();
    let resolved = match resolved.strip_prefix(OUT) {
        Ok(inner) if target.is_absolute() && !exists(&resolved) && exists(inner) => inner.to_owned(),
        _ => resolved,
    };
    if exposed.iter().any(|path| path == link) && !exposed.iter().any(|path| resolved.starts_with(path)) {
        return Err(refuse("the link is exposed, but its target is not"));
    }
    if target.is_absolute() {
        fs::remove_file(&link_path)?;
        symlink(links::relative(parent, &resolved), &link_path)?;
    }
    Ok(())
}

fn exposed_of(tree: &Path, paths: Vec<PathBuf>) -> Result<Exposed> {
    let (mut entries, mut tables, mut size) = (layer::Tree::new(), Vec::new(), 0);
    for path in &paths {
        each_entry(tree, path, |path, metadata| {
            // Modes that survive packing and unpacking on any machine.
            let mode = match metadata.permissions().mode() {
                _ if metadata.is_symlink() => 0o777,
                mode if metadata.is_dir() || mode & 0o111 != 0 => 0o755,
                _ => 0o644,
            };
            if count_symbol_table(path, metadata, &mut size)? {
                tables.push(path.to_owned());
            }
            let mut entry = layer::Entry::of(&tree.join(path), metadata)?;
            entry.mode = mode;
            entries.insert(path.to_owned(), entry);
            Ok(())
        })?;
    }
    tables.sort();
    Ok(Exposed { digest: layer::digest(&entries)?, paths, tables })
}

/// Visits an entry and everything below it.
fn each_entry(tree: &Path, path: &Path, mut visit: impl FnMut(&Path, &Metadata) -> Result<()>) -> Result<()> {
    for entry in
        WalkDir::new(tree.join(path)).follow_links(false).follow_root_links(false).sort_by_file_name()
    {
        let entry = entry?;
        let metadata = fs::symlink_metadata(entry.path())?;
        let path = entry.path().strip_prefix(tree).unwrap_or(entry.path());
        if !(metadata.is_file() || metadata.is_dir() || metadata.is_symlink()) {
            return Err(PayloadError::ExposedKind(path.to_owned()));
        }
        visit(path, &metadata)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
