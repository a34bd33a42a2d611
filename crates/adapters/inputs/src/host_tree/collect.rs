//! Collects the headers that a host's own driver exposes into one archive, as a need for compiling other drivers.

use std::{
    collections::BTreeSet,
    path::{Component, Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::{image::Digest, kernel::KernelRelease};
use farrier_local::{archive::links, blocking::stoppable, files::walk_source};
use farrier_payload as payload;
use fs_err::os::unix::fs::symlink;

use super::verify;
use crate::{
    FetchError, Result,
    files::{check_not_canceled, copy_file, exists, make_directory},
};

/// Parameters of a collection.
#[derive(Clone, Debug)]
pub struct Collection {
    /// Mount point of the host's file system.
    pub root: PathBuf,
    /// The kernel that the headers are for.
    pub release: KernelRelease,
    /// Files and directories, as paths on the host.
    pub paths: Vec<PathBuf>,
}

/// A finished archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Collected {
    /// Digest of the archive. The same content gives the same digest, whatever the time and host of the collection.
    pub digest: Digest,
    /// Size in bytes.
    pub size: u64,
    /// Symbol tables in the archive.
    pub symvers: Vec<PathBuf>,
    /// Omitted links: their targets do not exist on the host.
    pub omitted_links: Vec<PathBuf>,
}

/// Writes a `.tar.gz` archive atomically. Links become relative.
///
/// # Errors
/// A path does not exist or leads elsewhere, there is no `Module.symvers`, or the headers were built for another kernel.
pub async fn collect(collection: Collection, out: PathBuf) -> Result<Collected> {
    stoppable(move |stop| {
        let directory = out.parent().filter(|path| !path.as_os_str().is_empty()).unwrap_or(Path::new("."));
        let stage = tempfile::Builder::new().prefix(".farrier-collect.").tempdir_in(directory)?;
        let omitted_links = stage_all(&collection, stage.path(), stop)?;
        let symvers = verify(stage.path(), &collection.release, &collection.root.display().to_string())?;
        let layer = payload::write_payload_layer(stage.path(), false, &out)?.layer;
        Ok(Collected { digest: layer.digest, size: layer.size, symvers, omitted_links })
    })
    .await
}

/// Copies all named paths below `stage`.
fn stage_all(collection: &Collection, stage: &Path, stop: &AtomicBool) -> Result<Vec<PathBuf>> {
    let Collection { root, release: _, paths } = collection;
    let selected = paths.iter().map(|path| from_root(path)).collect::<Result<BTreeSet<PathBuf>, _>>()?;
    let mut omitted_links = Vec::new();
    for path in &selected {
        let from = root.join(path);
        if !exists(&from) {
            let (path, root) = (on_host(path), root.display());
            return Err(FetchError::unusable(
                format!("cannot collect {path}: there is no such file or directory below {root}"),
                "install the driver's development files on the host, or check where it is mounted (--root)",
            ));
        }
        for parent in path.ancestors().skip(1).collect::<Vec<_>>().into_iter().rev() {
            make_directory(&stage.join(parent))?;
        }
        let walk = walkdir::WalkDir::new(&from).follow_root_links(false).sort_by_file_name();
        for entry in walk_source(walk) {
            let entry = entry?;
            check_not_canceled(stop)?;
            let relative = entry.path().strip_prefix(root).unwrap_or(entry.path()).to_owned();
            let (kind, to) = (entry.file_type(), stage.join(&relative));
            if kind.is_dir() {
                make_directory(&to)?;
            } else if kind.is_file() {
                copy_file(entry.path(), &to)?;
            } else if !kind.is_symlink() {
                return Err(FetchError::unusable(
                    format!(
                        "cannot collect {}: it is neither a file, a directory nor a link",
                        on_host(&relative)
                    ),
                    "name only directories with headers",
                ));
            } else if !exists(&to) {
                match relative_target(root, &selected, &relative)? {
                    Some(target) => symlink(target, &to)?,
                    None => omitted_links.push(Path::new("/").join(&relative)),
                }
            }
        }
    }
    Ok(omitted_links)
}

/// Converts a path on the host to one relative to its root.
fn from_root(path: &Path) -> Result<PathBuf> {
    let relative = path.strip_prefix("/").unwrap_or(path);
    let is_plain = relative.components().all(|part| matches!(part, Component::Normal(_) | Component::CurDir));
    if is_plain && relative.file_name().is_some() {
        return Ok(relative.components().filter(|part| matches!(part, Component::Normal(_))).collect());
    }
    Err(FetchError::unusable(
        format!("cannot collect {}: it is not a path below / without `..`", path.display()),
        "name absolute paths without `..`, such as /usr/src/ofa_kernel",
    ))
}

fn on_host(path: &Path) -> String {
    Path::new("/").join(path).display().to_string()
}

/// Returns a relative target for a link, directly to the final file or directory. Returns `None` for a dangling or circular link.
/// Chains pass through `/etc/alternatives`, which is not collected.
fn relative_target(root: &Path, selected: &BTreeSet<PathBuf>, link: &Path) -> Result<Option<PathBuf>> {
    // Resolve links as if the root were `/`: a link of the host must not lead into the collecting pod.
    let Ok(Some(target)) = links::resolve(root, link) else { return Ok(None) };
    if !selected.iter().any(|path| target.starts_with(path)) {
        let (link, target) = (on_host(link), on_host(&target));
        return Err(FetchError::unusable(
            format!("cannot collect {link}: it is a link to {target}, which was not named"),
            format!("name {target} as well"),
        ));
    }
    Ok(Some(links::relative(link.parent().unwrap_or(Path::new("")), &target)))
}

#[cfg(test)]
#[path = "collect_tests.rs"]
mod tests;
