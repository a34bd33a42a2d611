//! Adapter: collects the headers that a host's own driver exposes into one archive, to compile other drivers against.

use std::{
    collections::BTreeSet,
    fs::{self, Permissions},
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Component, Path, PathBuf},
    sync::atomic::{AtomicBool, Ordering},
};

use super::{
    FetchError,
    blocking::blocking,
    copy,
    host_tree::{MOST_LINKS, verify},
    io_error,
};
use crate::{archive, image::Digest, kernel::KernelRelease, payload};

/// What is collected.
#[derive(Clone, Debug)]
pub struct Collection {
    /// Where the host's file system is mounted.
    pub root: PathBuf,
    /// The kernel that the headers are for.
    pub release: KernelRelease,
    /// Files and directories, as paths on the host.
    pub paths: Vec<PathBuf>,
}

/// An archive that was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collected {
    /// Its digest: the same for the same content, whenever and wherever it is collected.
    pub digest: Digest,
    /// Its bytes.
    pub size: u64,
    /// Symbol tables in it.
    pub symvers: Vec<PathBuf>,
    /// Links that lead nowhere on the host, and were left out.
    pub left_out: Vec<PathBuf>,
}

/// Why nothing was collected.
#[derive(Debug, thiserror::Error)]
pub enum CollectError {
    /// The host does not have it.
    #[error("collect {path}: there is no such file or directory below {root}")]
    Absent {
        /// As named.
        path: String,
        /// The root.
        root: String,
    },
    /// A path with `..`, or none at all.
    #[error("collect {path}: it is not a plain path on the host")]
    Path {
        /// As named.
        path: String,
    },
    /// A link to something that was not named.
    #[error("collect {link}: it is a link to {target}, which was not named")]
    Elsewhere {
        /// The link, as a path on the host.
        link: String,
        /// What it leads to, as a path on the host.
        target: String,
    },
    /// A device, a socket, a FIFO.
    #[error("collect {path}: it is neither a file, a directory nor a link")]
    Kind {
        /// As a path on the host.
        path: String,
    },
    /// The archive cannot be written.
    #[error("write {path}")]
    Write {
        /// The archive.
        path: PathBuf,
        /// Why.
        #[source]
        source: payload::PayloadError,
    },
}

impl CollectError {
    /// What to do about it.
    pub fn remedy(&self) -> Option<String> {
        match self {
            Self::Absent { .. } => Some(
                "install the driver's development files on the host, or check where it is mounted (--root)"
                    .to_owned(),
            ),
            Self::Path { .. } => {
                Some("name absolute paths without `..`, such as /usr/src/ofa_kernel".to_owned())
            }
            Self::Elsewhere { target, .. } => Some(format!("name {target} as well")),
            Self::Kind { .. } => Some("name only directories with headers".to_owned()),
            Self::Write { source, .. } => source.hint(),
        }
    }
}

/// Writes the archive, a `.tar.gz` that appears whole or not at all. Links become relative.
///
/// # Errors
/// A path is not there or leads elsewhere, there is no `Module.symvers`, or what there is was built for another
/// kernel.
pub async fn collect(collection: Collection, out: PathBuf) -> Result<Collected, FetchError> {
    blocking(move |stop| {
        let directory = out.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let stage = tempfile::Builder::new()
            .prefix(".farrier-collect.")
            .tempdir_in(directory)
            .map_err(io_error("create a directory in", directory))?;
        let left_out = stage_all(&collection, stage.path(), stop)?;
        let symvers = verify(stage.path(), &collection.release, &collection.root.display().to_string())?;
        let layer = payload::write_payload_layer(stage.path(), false, &out)
            .map_err(|source| CollectError::Write { path: out.clone(), source })?
            .layer;
        Ok(Collected { digest: layer.digest, size: layer.size, symvers, left_out })
    })
    .await
}

/// Copies everything that was named to below `stage`.
fn stage_all(collection: &Collection, stage: &Path, stop: &AtomicBool) -> Result<Vec<PathBuf>, FetchError> {
    let Collection { root, release: _, paths } = collection;
    let named = paths.iter().map(|path| plain(path)).collect::<Result<BTreeSet<PathBuf>, _>>()?;
    let mut left_out = Vec::new();
    for path in &named {
        let from = root.join(path);
        if fs::symlink_metadata(&from).is_err() {
            let (path, root) = (on_host(path), root.display().to_string());
            return Err(CollectError::Absent { path, root }.into());
        }
        for parent in path.ancestors().skip(1).collect::<Vec<_>>().into_iter().rev() {
            directory(&stage.join(parent))?;
        }
        for entry in walkdir::WalkDir::new(&from).follow_root_links(false).sort_by_file_name() {
            let entry = entry.map_err(|error| FetchError::Io {
                action: "list",
                path: error.path().unwrap_or(&from).to_owned(),
                source: error.into(),
            })?;
            if stop.load(Ordering::Relaxed) {
                return Err(FetchError::Interrupted);
            }
            let relative = entry.path().strip_prefix(root).unwrap_or(entry.path()).to_owned();
            let (kind, to) = (entry.file_type(), stage.join(&relative));
            if kind.is_dir() {
                directory(&to)?;
            } else if kind.is_file() {
                copy::file(entry.path(), &to)?;
            } else if !kind.is_symlink() {
                return Err(CollectError::Kind { path: on_host(&relative) }.into());
            } else if fs::symlink_metadata(&to).is_err() {
                match relative_target(root, &named, &relative)? {
                    Some(target) => symlink(target, &to).map_err(io_error("link", &to))?,
                    None => left_out.push(Path::new("/").join(&relative)),
                }
            }
        }
    }
    Ok(left_out)
}

/// Makes a directory with a mode that no umask and no host decides.
fn directory(path: &Path) -> Result<(), FetchError> {
    fs::create_dir_all(path).map_err(io_error("create", path))?;
    fs::set_permissions(path, Permissions::from_mode(0o755)).map_err(io_error("set the mode of", path))
}

/// A path on the host, relative to its root.
fn plain(path: &Path) -> Result<PathBuf, CollectError> {
    let inner = path.strip_prefix("/").unwrap_or(path);
    let is_plain = inner.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if is_plain && inner.file_name().is_some() {
        return Ok(inner.components().filter(|part| matches!(part, Component::Normal(_))).collect());
    }
    Err(CollectError::Path { path: path.display().to_string() })
}

fn on_host(path: &Path) -> String {
    Path::new("/").join(path).display().to_string()
}

/// What a link says when it is made relative, led straight to what it means; `None` where it leads nowhere. Chains go
/// through `/etc/alternatives`, which is not collected.
fn relative_target(
    root: &Path,
    named: &BTreeSet<PathBuf>,
    link: &Path,
) -> Result<Option<PathBuf>, FetchError> {
    let Some(target) = resolve(root, link)? else { return Ok(None) };
    if !named.iter().any(|named| target.starts_with(named)) {
        return Err(CollectError::Elsewhere { link: on_host(link), target: on_host(&target) }.into());
    }
    let parent = link.parent().unwrap_or(Path::new(""));
    Ok(Some(archive::way(parent, &target)))
}

/// Where a path leads on the host, relative to its root, all links followed as if the root were `/`: a link of the
/// host must not lead into the pod that collects. `None` where there is nothing, or a circle.
fn resolve(root: &Path, path: &Path) -> Result<Option<PathBuf>, FetchError> {
    let mut waiting: Vec<PathBuf> =
        path.components().rev().map(|part| PathBuf::from(part.as_os_str())).collect();
    let (mut resolved, mut links) = (PathBuf::new(), 0);
    while let Some(part) = waiting.pop() {
        match part.components().next() {
            Some(Component::ParentDir) => {
                resolved.pop();
                continue;
            }
            Some(Component::RootDir) => {
                resolved.clear();
                continue;
            }
            Some(Component::Normal(_)) => {}
            Some(Component::CurDir | Component::Prefix(_)) | None => continue,
        }
        let next = root.join(&resolved).join(&part);
        let Ok(metadata) = fs::symlink_metadata(&next) else { return Ok(None) };
        if !metadata.is_symlink() {
            resolved.push(part);
            continue;
        }
        links += 1;
        if links > MOST_LINKS {
            return Ok(None);
        }
        let target = fs::read_link(&next).map_err(io_error("read link", &next))?;
        waiting.extend(target.components().rev().map(|part| PathBuf::from(part.as_os_str())));
    }
    Ok(Some(resolved))
}

#[cfg(test)]
#[path = "collect_tests.rs"]
mod tests;
