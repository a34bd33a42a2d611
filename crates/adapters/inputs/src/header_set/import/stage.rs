//! Stages the sources of an import for inspection: archives are unpacked, directories stay in place.

use std::{
    io,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_local::{
    archive::{self, Format, Options},
    tree_removal::remove_tree,
};
use fs_err as fs;

use super::{ImportSource, LIMITS, selection};
use crate::{
    FetchError, Result, digest,
    files::{is_directory, name_of, names_in},
    header_set::layout::{self, TreeLayout},
};

/// A directory below a root; links are resolved inside that root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tree {
    pub root: PathBuf,
    /// Path relative to the root, without links.
    pub path: PathBuf,
    /// Whether farrier unpacked the tree, so that its files may be moved.
    pub is_ours: bool,
}

impl Tree {
    pub(super) fn full_path(&self) -> PathBuf {
        self.root.join(&self.path)
    }
}

/// The sources of an import, after staging.
#[derive(Debug, Default)]
pub(super) struct Staged {
    /// The one tree rooted at `/`, with `usr/src` or `lib/modules`.
    pub rooted: Option<Tree>,
    /// Kernel trees.
    pub trees: Vec<Tree>,
    /// File names and digests, in order, for provenance.
    pub origin: Vec<String>,
    /// Names of the sources, for messages.
    pub names: String,
}

/// Stages the sources. Archives are unpacked below `directory`, a working directory.
pub(super) fn stage(sources: &[ImportSource], directory: &Path, stop: &AtomicBool) -> Result<Staged> {
    let mut staged = Staged::default();
    let (mut roots, mut names) = (Vec::new(), Vec::new());
    for (index, source) in sources.iter().enumerate() {
        names.push(source.to_string());
        match source {
            ImportSource::Node(root) => {
                let root = existing(root)?;
                staged.origin.push("collected from a node".to_owned());
                roots.push(Tree { root, path: PathBuf::new(), is_ours: false });
            }
            ImportSource::Path(path) => {
                let path = existing(path)?;
                let name = name_of(&path);
                if path.is_dir() {
                    staged.origin.push(format!("directory {name}"));
                    let (directory, tree_layout) = layout::detect_layout(&path, &source.to_string())?;
                    match tree_layout {
                        TreeLayout::Rooted => {
                            roots.push(Tree { root: directory, path: PathBuf::new(), is_ours: false });
                        }
                        // Links in a tree on this machine are resolved against the machine's root.
                        TreeLayout::Build => staged.trees.push(on_this_machine(&directory)?),
                    }
                } else {
                    staged.origin.push(format!("{name} sha256:{}", digest::of_file(&path, stop)?));
                    let raw = directory.join(format!("raw-{index}"));
                    if let Some(tree) = unpack(&path, &raw, source, stop)? {
                        staged.trees.push(tree);
                    } else {
                        roots.push(Tree { root: raw, path: PathBuf::new(), is_ours: true });
                    }
                }
            }
        }
    }
    staged.origin.sort();
    staged.rooted = one_root(roots, &names)?;
    staged.names = names.join(", ");
    Ok(staged)
}

fn existing(path: &Path) -> Result<PathBuf> {
    fs::canonicalize(path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => FetchError::unusable(
            format!("cannot import {}: there is no such file or directory", path.display()),
            "name a tarball, a directory, or .deb or .rpm files",
        ),
        _ => error.into(),
    })
}

fn on_this_machine(path: &Path) -> Result<Tree> {
    let path = existing(path)?;
    let path = path.strip_prefix("/").unwrap_or(&path).to_owned();
    Ok(Tree { root: PathBuf::from("/"), path, is_ours: false })
}

/// Unpacks an archive and returns its kernel tree. Returns `None` for an archive rooted at `/`; `raw` is then that root.
fn unpack(archive: &Path, raw: &Path, source: &ImportSource, stop: &AtomicBool) -> Result<Option<Tree>> {
    let what = source.to_string();
    fs::create_dir(raw)?;
    let is_selected = |path: &Path| !selection::is_excluded(path);
    archive::unpack_file(
        archive,
        raw,
        &Options { limits: LIMITS, is_selected: &is_selected, stop, ..Options::default() },
    )
    .map_err(|source| FetchError::Unpack(what.clone(), source))?;
    if matches!(Format::of(archive)?, Some(Format::Deb | Format::Rpm)) {
        return Ok(None);
    }
    let (found, tree_layout) = layout::detect_layout(raw, &what)?;
    match tree_layout {
        TreeLayout::Build => {
            let path = found.strip_prefix(raw).unwrap_or(Path::new("")).to_owned();
            Ok(Some(Tree { root: raw.to_owned(), path, is_ours: true }))
        }
        TreeLayout::Rooted if found == raw => Ok(None),
        TreeLayout::Rooted => {
            let aside = raw.with_extension("root");
            fs::rename(&found, &aside)?;
            remove_tree(raw)?;
            fs::rename(&aside, raw)?;
            Ok(None)
        }
    }
}

/// Merges the roots of several packages, which are parts of one system. A directory is a whole system and must be the only root.
fn one_root(mut roots: Vec<Tree>, names: &[String]) -> Result<Option<Tree>> {
    if roots.len() > 1 && roots.iter().any(|root| !root.is_ours) {
        return Err(ambiguous(&names.join(", "), "a root file system"));
    }
    let Some(first) = (!roots.is_empty()).then(|| roots.remove(0)) else { return Ok(None) };
    for other in roots {
        merge(&other.root, &first.root)?;
    }
    if first.is_ours {
        layout::merge_usr(&first.root)?;
    }
    Ok(Some(first))
}

/// Creates an error about several candidates for one role.
pub(super) fn ambiguous(sources: &str, what: &str) -> FetchError {
    FetchError::unusable(
        format!("cannot import {sources}: each of them is {what}"),
        "name the sources of one header set only",
    )
}

/// Moves the content of `from` into `to`. Of two files with the same name, the later one stays.
fn merge(from: &Path, to: &Path) -> Result<()> {
    for name in names_in(from)? {
        let (old, new) = (from.join(&name), to.join(&name));
        if is_directory(&old) && is_directory(&new) {
            merge(&old, &new)?;
        } else {
            fs::rename(&old, &new)?;
        }
    }
    Ok(())
}
