//! Finds files of a source that look like credentials, and version-control data that cannot be omitted.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::{
    image::{SourceEntry, SourceOrigin, SourceSpec, is_version_control},
    text::some_of,
};
use farrier_local::{archive::Format, blocking::stoppable};
use fs_err::File;

use super::{Result, Sources, files, unpack};

/// Kind of the cache records, each with the suspicious files of one archive.
pub(super) const RECORDS: &str = "source-suspects";
/// Maximum number of files that a warning names.
const MAX_NAMED: usize = 20;

impl Sources<'_> {
    /// Returns a warning about credentials in a local directory or file. Archives are not opened.
    pub async fn warning(self, spec: &SourceSpec) -> Result<Option<String>> {
        let Some(path) = self.local(spec) else { return Ok(None) };
        let record = self.0.digest_of(&path).await?;
        Ok(warning(
            spec,
            &record.credentials,
            "remove them: builds can read them, and registries that store the source contain them",
        ))
    }

    /// Returns a warning about credentials or version-control data in a local archive. The archive is stored unchanged, because
    /// it is verified by its digest.
    pub async fn archive_warning(self, spec: &SourceSpec) -> Result<Option<String>> {
        let Some(path) = self.local(spec).filter(|path| path.is_file()) else { return Ok(None) };
        if Format::of(&path)?.is_none() {
            return Ok(None);
        }
        let sha256 = self.0.digest_of(&path).await?.digest;
        let suspects: Vec<String> = if let Some(recorded) = self.0.cache.read_record(RECORDS, &sha256)? {
            recorded
        } else {
            let scratch = self.0.cache.scratch()?;
            let work = scratch.path().to_owned();
            let suspects = stoppable(move |stop| {
                unpack(stop, &path, &work, &path.display().to_string())?;
                of_tree(&work, stop)
            });
            let suspects = suspects.await?;
            self.0.cache.write_record(RECORDS, &sha256, &suspects)?;
            suspects
        };
        Ok(warning(spec, &suspects, "pack the archive without them: registries store it unchanged"))
    }

    /// Returns the first product of a build in a local directory, relative to it.
    pub fn product(self, spec: &SourceSpec) -> Option<PathBuf> {
        let root = self.local(spec)?;
        let files = walkdir::WalkDir::new(&root).sort_by_file_name().into_iter().flatten();
        let product = files.map(walkdir::DirEntry::into_path).find(|path| is_product(path))?;
        product.strip_prefix(&root).ok().map(Path::to_owned)
    }

    /// Returns the path of a local source, if it exists.
    fn local(self, spec: &SourceSpec) -> Option<PathBuf> {
        let SourceOrigin::Path { path, .. } = &spec.from else { return None };
        Some(self.0.root.join(path)).filter(|path| path.exists())
    }
}

/// Whether kbuild makes files of this name.
fn is_product(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    [".o", ".ko", ".mod", ".mod.c"].iter().any(|ending| name.ends_with(ending))
        || name.starts_with('.') && name.ends_with(".cmd")
        || ["Module.symvers", "modules.order"].contains(&&*name)
}

/// Returns the warning about a source's suspects, if there are any.
fn warning(spec: &SourceSpec, suspects: &[String], advice: &str) -> Option<String> {
    if suspects.is_empty() {
        return None;
    }
    Some(format!(
        "warning: source {} has files that look like credentials: {} ({advice})",
        spec.name,
        some_of(suspects, MAX_NAMED)
    ))
}

/// Returns the first path of version-control data in a tree, relative to the tree.
pub(super) fn version_control_in(tree: &Path) -> Result<Option<PathBuf>> {
    for entry in walkdir::WalkDir::new(tree).min_depth(1).sort_by_file_name() {
        let entry = entry?;
        if is_version_control(entry.file_name()) {
            return Ok(Some(entry.path().strip_prefix(tree).unwrap_or(entry.path()).to_owned()));
        }
    }
    Ok(None)
}

/// Returns descriptions of a tree's files that look like credentials, and of its version-control data.
pub(super) fn of_tree(root: &Path, stop: &AtomicBool) -> Result<Vec<String>> {
    let mut descriptions = Vec::new();
    let mut walk = walkdir::WalkDir::new(root).min_depth(1).sort_by_file_name().into_iter();
    while let Some(entry) = walk.next() {
        let entry = entry?;
        files::check_not_canceled(stop)?;
        let relative = entry.path().strip_prefix(root).unwrap_or(entry.path());
        let kind = entry.file_type();
        if SourceEntry::of(relative, &[]) == SourceEntry::VersionControl {
            descriptions.push(format!("{} (version-control data)", relative.display()));
            if kind.is_dir() {
                walk.skip_current_dir();
            }
        } else if kind.is_file() {
            descriptions.extend(credentials_in(relative, entry.path())?);
        }
    }
    Ok(descriptions)
}

/// Describes a file that looks like credentials: its path in the source, and its probable content.
pub(super) fn credentials_in(relative: &Path, path: &Path) -> Result<Option<String>> {
    let mut content = Vec::new();
    let file = File::open(path)?;
    if file.metadata()?.len() <= SourceEntry::MAX_INSPECTED_SIZE {
        file.take(SourceEntry::MAX_INSPECTED_SIZE).read_to_end(&mut content)?;
    }
    Ok(match SourceEntry::of(relative, &content) {
        SourceEntry::Credentials(what) => Some(format!("{} ({what})", relative.display())),
        SourceEntry::VersionControl | SourceEntry::Source => None,
    })
}
