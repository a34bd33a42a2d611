//! Brings the sources to where they can be looked at: archives are unpacked, directories stay where they are.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use super::{ImportError, ImportSource, LIMITS, selection};
use crate::{
    archive::{self, Format},
    headers::{
        FetchError, digest, io_error,
        layout::{self, Form},
        source::names_in,
    },
};

/// A directory, seen from a root inside which links are followed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tree {
    pub root: PathBuf,
    /// Relative to the root, free of links.
    pub path: PathBuf,
    /// Was it unpacked by us? Then its files may be moved.
    pub is_ours: bool,
}

impl Tree {
    pub(super) fn place(&self) -> PathBuf {
        self.root.join(&self.path)
    }
}

/// What the sources turn out to be.
#[derive(Debug, Default)]
pub(super) struct Staged {
    /// The one tree rooted at `/`, with `usr/src` or `lib/modules`.
    pub rooted: Option<Tree>,
    /// Kernel trees.
    pub trees: Vec<Tree>,
    /// For provenance: file names and digests, in order.
    pub origin: Vec<String>,
    /// The sources as messages name them.
    pub names: String,
}

/// Unpacks what is packed below `directory`, which is ours.
pub(super) fn stage(
    sources: &[ImportSource],
    directory: &Path,
    stop: &AtomicBool,
) -> Result<Staged, FetchError> {
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
                let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
                if path.is_dir() {
                    staged.origin.push(format!("directory {name}"));
                    let (found, form) = layout::recognise(&path, &source.to_string())?;
                    match form {
                        Form::Rooted => {
                            roots.push(Tree { root: found, path: PathBuf::new(), is_ours: false });
                        }
                        // Links of a tree on this machine are followed as this machine does.
                        Form::Build => staged.trees.push(on_this_machine(&found)?),
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

fn existing(path: &Path) -> Result<PathBuf, FetchError> {
    fs::canonicalize(path).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => ImportError::Absent { path: path.display().to_string() }.into(),
        _ => io_error("find", path)(error),
    })
}

fn on_this_machine(path: &Path) -> Result<Tree, FetchError> {
    let path = existing(path)?;
    let path = path.strip_prefix("/").unwrap_or(&path).to_owned();
    Ok(Tree { root: PathBuf::from("/"), path, is_ours: false })
}

/// Unpacks an archive; the kernel tree that it is, or `None` for one rooted at `/`, whose `raw` then starts there.
fn unpack(
    archive: &Path,
    raw: &Path,
    source: &ImportSource,
    stop: &AtomicBool,
) -> Result<Option<Tree>, FetchError> {
    let what = source.to_string();
    fs::create_dir(raw).map_err(io_error("create", raw))?;
    let wanted = |path: &Path| !selection::is_product(path);
    archive::unpack_wanted(stop, archive, raw, &LIMITS, &wanted)
        .map_err(|source| FetchError::Unpack { what: what.clone(), source })?;
    let format = Format::of(archive).map_err(io_error("read", archive))?;
    if matches!(format, Some(Format::Deb | Format::Rpm)) {
        return Ok(None);
    }
    let (found, form) = layout::recognise(raw, &what)?;
    match form {
        Form::Build => {
            let path = found.strip_prefix(raw).unwrap_or(Path::new("")).to_owned();
            Ok(Some(Tree { root: raw.to_owned(), path, is_ours: true }))
        }
        Form::Rooted if found == raw => Ok(None),
        Form::Rooted => {
            let aside = raw.with_extension("root");
            fs::rename(&found, &aside).map_err(io_error("rename", &found))?;
            fs::remove_dir_all(raw).map_err(io_error("remove", raw))?;
            fs::rename(&aside, raw).map_err(io_error("rename", &aside))?;
            Ok(None)
        }
    }
}

/// Packages are parts of one system; a directory is a whole one.
fn one_root(mut roots: Vec<Tree>, names: &[String]) -> Result<Option<Tree>, FetchError> {
    if roots.len() > 1 && roots.iter().any(|root| !root.is_ours) {
        let sources = names.to_vec();
        return Err(ImportError::Ambiguous { what: "a file system of its own", sources }.into());
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

/// Moves what is in `from` to `to`; of two files with one name the later stays.
fn merge(from: &Path, to: &Path) -> Result<(), FetchError> {
    for name in names_in(from)? {
        let (old, new) = (from.join(&name), to.join(&name));
        let is_dir = |path: &Path| fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_dir());
        if is_dir(&old) && is_dir(&new) {
            merge(&old, &new)?;
        } else {
            fs::rename(&old, &new).map_err(io_error("rename", &old))?;
        }
    }
    Ok(())
}
