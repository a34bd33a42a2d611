//! Lays out a source's tree: the whole original, or the part that a definition names.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::image::{
    checked::{InnerPattern, matches_glob},
    is_version_control,
};
use farrier_local::{archive::Format, tree_removal::remove_tree};
use fs_err as fs;

use super::{
    FetchError, Result, TREE,
    files::{copy_file, listing, names_in},
    unpack,
};

/// Returns the whole original as a tree: a directory in place, anything else in `dir/raw`. `name` is the file's name in the
/// definition.
pub(super) fn original_tree(stop: &AtomicBool, (from, name): (&Path, &str), dir: &Path) -> Result<PathBuf> {
    if from.is_dir() {
        return Ok(from.to_owned());
    }
    let raw = dir.join("raw");
    fs::create_dir(&raw)?;
    if Format::of(from)?.is_some() {
        unpack(stop, from, &raw, &from.display().to_string())?;
    } else {
        // A file that is not an archive becomes a tree with one file.
        copy_file(from, &raw.join(name))?;
    }
    Ok(raw)
}

/// Makes `dir/tree` from the used part of the original.
pub(super) fn lay_out(
    stop: &AtomicBool,
    base: PathBuf,
    dir: &Path,
    inner: Option<&InnerPattern>,
    subdir: Option<&InnerPattern>,
) -> Result<()> {
    let base = match inner {
        None => base,
        Some(inner) => {
            let archive = only_match(&base, inner, "file", Path::is_file)?;
            let unpacked = dir.join("inner");
            fs::create_dir(&unpacked)?;
            unpack(stop, &archive, &unpacked, inner)?;
            unpacked
        }
    };
    // The part may be a link to another directory of the original, which is removed below.
    let (chosen, tree) = (fs::canonicalize(select_directory(&base, subdir)?)?, dir.join(TREE));
    fs::rename(&chosen, &tree)?;
    for temporary in [dir.join("raw"), dir.join("inner")].iter().filter(|temporary| temporary.exists()) {
        remove_tree(temporary)?;
    }
    Ok(())
}

/// Returns the directory named by `subdir`, a relative path whose last component may contain one `*`.
pub(super) fn select_directory(base: &Path, subdir: Option<&InnerPattern>) -> Result<PathBuf> {
    match subdir {
        None => Ok(base.to_owned()),
        Some(subdir) => only_match(base, subdir, "directory", Path::is_dir),
    }
}

/// Returns the only match of a relative path whose last component may contain one `*`.
fn only_match(base: &Path, path: &InnerPattern, kind: &str, is_kind: fn(&Path) -> bool) -> Result<PathBuf> {
    let pattern = Path::new(path.as_str());
    let parent = base.join(pattern.parent().unwrap_or(Path::new("")));
    let last = pattern.file_name().and_then(OsStr::to_str).unwrap_or_default();
    if !contains(base, &parent) || !parent.is_dir() {
        return Err(absent(path, base)?);
    }
    let names = names_in(&parent)?;
    let matching = names.iter().filter(|name| name.to_str().is_some_and(|name| matches_glob(last, name)));
    let mut found =
        matching.map(|name| parent.join(name)).filter(|path| contains(base, path) && is_kind(path));
    match (found.next(), found.next()) {
        (Some(only), None) => Ok(only),
        (None, _) => Err(absent(path, &parent)?),
        (Some(_), Some(_)) => {
            let among = listing(&names);
            Err(FetchError::Layout(format!("one {kind} {path:?} in the source: several match among {among}")))
        }
    }
}

fn absent(pattern: &str, dir: &Path) -> Result<FetchError> {
    Ok(FetchError::Layout(format!("{pattern:?} in the source: there is {}", listing(&names_in(dir)?))))
}

/// Whether a path, with links resolved, is inside the directory and not part of its version-control data.
fn contains(base: &Path, path: &Path) -> bool {
    let (Ok(base), Ok(path)) = (fs::canonicalize(base), fs::canonicalize(path)) else { return false };
    path.strip_prefix(&base).is_ok_and(|relative| !relative.iter().any(is_version_control))
}
