//! Adapter: the definitions in a bundle, unpacked for whoever runs farrier at the site.

use std::{
    fs,
    io::{self, Read as _},
    path::{Path, PathBuf},
};

use walkdir::WalkDir;

use super::{BundleError, ContentKind, Verified, collect::blobs_of};
use crate::{
    archive::{Limits, unpack_tar},
    oci::LayerReader,
    registry::BlobSource as _,
};

/// Definitions are texts, patches and small sources.
const LIMITS: Limits = Limits { entries: 50_000, bytes: 4 << 30, depth: 64 };

/// Writes the bundle's definitions into a directory; files there that differ are kept, and an error, unless they
/// may be overwritten. Returns how many files were written; `None` where the bundle has no definitions.
pub fn write_definitions(
    verified: &Verified,
    to: &Path,
    overwrite: bool,
) -> Result<Option<usize>, BundleError> {
    let index = verified.bundle.index();
    // The newest export's are the last ones, where there are several.
    let found = index.contents.iter().rfind(|listed| listed.content.kind == ContentKind::Definitions);
    let Some(manifest) = found.and_then(|listed| verified.manifests.get(&listed.content.digest)) else {
        return Ok(None);
    };
    let action = |path: &Path| BundleError::io(format!("write {}", path.display()));
    fs::create_dir_all(to).map_err(action(to))?;
    let unpacked = tempfile::Builder::new().prefix(".farrier-").tempdir_in(to).map_err(action(to))?;
    // The configuration says nothing; the layers are what follows it.
    for layer in blobs_of(&manifest.parsed).skip(1) {
        let blob = index.blobs.iter().find(|blob| blob.digest == layer.digest);
        let (Some(blob), Some(frame)) = (blob, verified.frames.get(&layer.digest)) else {
            return Err(BundleError::Absent(format!("layer {} of the definitions", layer.digest)));
        };
        let reading = || BundleError::io(format!("read {}", layer.digest));
        let from = verified.bundle.source(*frame, blob).open().map_err(reading())?;
        let reader = LayerReader::new(from).map_err(reading())?;
        unpack_tar(reader, unpacked.path(), &LIMITS)?;
    }
    place(unpacked.path(), to, overwrite).map(Some)
}

/// Moves the files to their place; none of them where one would replace another content.
fn place(from: &Path, to: &Path, overwrite: bool) -> Result<usize, BundleError> {
    let action = |path: &Path| BundleError::io(format!("write {}", path.display()));
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in WalkDir::new(from).sort_by_file_name() {
        let entry = entry.map_err(|error| action(from)(error.into()))?;
        if !entry.file_type().is_dir()
            && let Ok(path) = entry.path().strip_prefix(from)
        {
            files.push(path.to_owned());
        }
    }
    let mut differ = Vec::new();
    let mut new = Vec::new();
    for file in files {
        match same(&from.join(&file), &to.join(&file)).map_err(action(&to.join(&file)))? {
            Some(true) => {}
            Some(false) if !overwrite => differ.push(file.display().to_string()),
            Some(false) | None => new.push(file),
        }
    }
    if !differ.is_empty() {
        return Err(BundleError::Differs { dir: to.to_owned(), files: differ });
    }
    for file in &new {
        let place = to.join(file);
        if let Some(parent) = place.parent() {
            fs::create_dir_all(parent).map_err(action(parent))?;
        }
        fs::rename(from.join(file), &place).map_err(action(&place))?;
    }
    Ok(new.len())
}

/// Have both the same kind and content? `None` where there is nothing at the place.
fn same(new: &Path, old: &Path) -> io::Result<Option<bool>> {
    let kind = match fs::symlink_metadata(old) {
        Ok(metadata) => metadata.file_type(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let wanted = fs::symlink_metadata(new)?;
    if wanted.file_type() != kind {
        return Ok(Some(false));
    }
    if kind.is_symlink() {
        return Ok(Some(fs::read_link(new)? == fs::read_link(old)?));
    }
    if fs::metadata(old)?.len() != wanted.len() {
        return Ok(Some(false));
    }
    let read = |path: &Path| -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        fs::File::open(path)?.read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    Ok(Some(read(new)? == read(old)?))
}
