//! Unpacks the definitions of a bundle at the site.

use std::{
    io,
    path::{Path, PathBuf},
};

use farrier_core::image::is_version_control;
use farrier_local::{
    archive::{Limits, links::stays_below, unpack_tar},
    files::if_there,
};
use farrier_store::registry::BlobSource as _;
use fs_err as fs;
use oci::{Hashing, LayerReader};
use tempfile::TempDir;
use walkdir::WalkDir;

use super::{
    BundleError, ContentKind, Result, Verified, collect::blobs_of, entry::blob_name, review::review,
};

/// Generous limits for definitions, which consist of text files, patches and small sources.
const LIMITS: Limits = Limits { entries: 50_000, bytes: 4 << 30, depth: 64 };

/// Fails if [`write_definitions`] would refuse the bundle's definitions. Changes no file.
pub fn check_definitions(verified: &Verified, to: &Path, overwrite: bool, accept: bool) -> Result<()> {
    let Some(unpacked) = unpack(verified, to)? else { return Ok(()) };
    files_to_write(unpacked.path(), to, overwrite, accept).map(drop)
}

/// Writes the bundle's definitions into a directory. Returns the number of files written, or `None` if the bundle has
/// no definitions.
///
/// # Errors
///
/// - Files in the directory differ, and `overwrite` is `false`. They are kept.
/// - The definitions add commands or templates, and `accept` is `false`.
pub fn write_definitions(
    verified: &Verified,
    to: &Path,
    overwrite: bool,
    accept: bool,
) -> Result<Option<usize>> {
    let Some(unpacked) = unpack(verified, to)? else { return Ok(None) };
    install(unpacked.path(), to, overwrite, accept).map(Some)
}

/// Unpacks the bundle's newest definitions into a temporary directory in `to`; `None` if the bundle has none.
fn unpack(verified: &Verified, to: &Path) -> Result<Option<TempDir>> {
    let index = verified.bundle.index();
    // The newest export comes last.
    let newest = index.contents.iter().rfind(|listed| listed.content.kind == ContentKind::Definitions);
    let Some(manifest) = newest.and_then(|listed| verified.manifests.get(&listed.content.digest)) else {
        return Ok(None);
    };
    fs::create_dir_all(to)?;
    let unpacked = tempfile::Builder::new().prefix(".farrier-").tempdir_in(to)?;
    // Skip the empty configuration.
    for layer in blobs_of(&manifest.parsed).skip(1) {
        let blob = index.blobs.iter().find(|blob| blob.digest == layer.digest);
        let (Some(blob), Some(frame)) = (blob, verified.frames.get(&layer.digest)) else {
            // Older farriers left definitions out of deltas.
            let path = verified.bundle.path().to_owned();
            let message = "leaves out the definitions, which its base has".to_owned();
            let hint = "import it without --definitions-to: its base has the same definitions";
            return Err(BundleError::Unusable { path, message, hint });
        };
        let mut content = Hashing::new(verified.bundle.source(*frame, blob).open()?);
        unpack_tar(LayerReader::new(&mut content)?, unpacked.path(), &LIMITS)?;
        io::copy(&mut content, &mut io::sink())?;
        // The file is read again, and may have changed since its verification.
        if content.into_parts().1 != blob.digest {
            let reason = "it changed after its verification";
            return Err(verified.bundle.damaged(*frame, &blob_name(&blob.digest), reason));
        }
    }
    Ok(Some(unpacked))
}

/// Returns the files to write: new ones, and with `overwrite` also those that differ. Fails as [`write_definitions`] does.
fn files_to_write(from: &Path, to: &Path, overwrite: bool, accept: bool) -> Result<Vec<PathBuf>> {
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in WalkDir::new(from).sort_by_file_name() {
        let entry = entry.map_err(io::Error::from)?;
        if !entry.file_type().is_dir()
            && let Ok(path) = entry.path().strip_prefix(from)
        {
            files.push(path.to_owned());
        }
    }
    let mut differ = Vec::new();
    let mut new = Vec::new();
    for file in files {
        check_path(from, to, &file)?;
        match is_same(&from.join(&file), &to.join(&file))? {
            Some(true) => {}
            Some(false) if !overwrite => differ.push(file.display().to_string()),
            Some(false) | None => new.push(file),
        }
    }
    if !differ.is_empty() {
        return Err(BundleError::Differs(to.to_owned(), differ));
    }
    let diff = if accept { String::new() } else { review(from, to, &new)? };
    if !diff.is_empty() {
        return Err(BundleError::NotAccepted(to.to_owned(), diff));
    }
    Ok(new)
}

/// Moves the files into place, or none of them if [`files_to_write`] fails.
fn install(from: &Path, to: &Path, overwrite: bool, accept: bool) -> Result<usize> {
    let new = files_to_write(from, to, overwrite, accept)?;
    for file in &new {
        let path = to.join(file);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        fs::rename(from.join(file), &path)?;
    }
    Ok(new.len())
}

/// Rejects version-control data, links that lead out of the directory, and files whose path goes through a link. Links
/// would evade the review that is shown before the definitions are written.
fn check_path(from: &Path, to: &Path, file: &Path) -> Result<()> {
    // Git runs hooks and filters from its data.
    if file.iter().any(is_version_control) {
        return Err(BundleError::Outside(file.to_owned(), "is version-control data"));
    }
    let is_link = |path: &Path| fs::symlink_metadata(path).is_ok_and(|metadata| metadata.is_symlink());
    let link = from.join(file);
    if is_link(&link) && !stays_below(Path::new(""), file, &fs::read_link(&link)?) {
        return Err(BundleError::Outside(file.to_owned(), "is a link with a target outside the directory"));
    }
    let mut parents = file.ancestors().skip(1).filter(|parent| !parent.as_os_str().is_empty());
    if parents.any(|parent| is_link(&to.join(parent))) {
        return Err(BundleError::Outside(
            file.to_owned(),
            "would be written through a link in the definitions directory",
        ));
    }
    Ok(())
}

/// Whether both have the same type and content; `None` if there is nothing at `old`.
fn is_same(new: &Path, old: &Path) -> io::Result<Option<bool>> {
    let Some(old_metadata) = if_there(fs::symlink_metadata(old))? else { return Ok(None) };
    let kind = old_metadata.file_type();
    let new_metadata = fs::symlink_metadata(new)?;
    if new_metadata.file_type() != kind {
        return Ok(Some(false));
    }
    if kind.is_symlink() {
        return Ok(Some(fs::read_link(new)? == fs::read_link(old)?));
    }
    if fs::metadata(old)?.len() != new_metadata.len() {
        return Ok(Some(false));
    }
    Ok(Some(fs::read(new)? == fs::read(old)?))
}

#[cfg(test)]
mod tests {
    use fs_err::os::unix::fs::symlink;

    use super::*;

    /// Git would run its hooks and filters.
    #[test]
    fn version_control_data_is_not_written() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        fs::create_dir_all(from.path().join("sources/.git/hooks")).unwrap();
        fs::write(from.path().join("sources/.git/hooks/post-checkout"), "#!/bin/sh\n").unwrap();
        fs::write(from.path().join("site.yaml"), "kind: Site\n").unwrap();
        let error = install(from.path(), to.path(), true, true).unwrap_err();
        assert_eq!(
            error.to_string(),
            "definitions: sources/.git/hooks/post-checkout is version-control data"
        );
        assert_eq!(fs::read_dir(to.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_link_is_no_way_around_the_review() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let placed = |accept| install(from.path(), to.path(), false, accept);
        symlink("../outside", from.path().join("x")).unwrap();
        let error = placed(true).unwrap_err();
        assert_eq!(error.to_string(), "definitions: x is a link with a target outside the directory");

        fs::remove_file(from.path().join("x")).unwrap();
        symlink("templates", from.path().join("x")).unwrap();
        assert_eq!(placed(false).unwrap(), 1, "the link leads to nothing that runs");
        fs::create_dir(from.path().join("x")).unwrap();
        fs::create_dir(to.path().join("templates")).unwrap();
        fs::write(from.path().join("x/kbuild.Dockerfile.hbs"), "FROM scratch\n").unwrap();
        let error = placed(true).unwrap_err().to_string();
        assert!(error.contains("x/kbuild.Dockerfile.hbs would be written through a link"), "{error}");
        assert!(fs::read_dir(to.path().join("templates")).unwrap().next().is_none());

        // For a template that is a link, the review shows the target.
        fs::remove_dir_all(from.path().join("x")).unwrap();
        fs::create_dir(from.path().join("templates")).unwrap();
        symlink("../patches/a", from.path().join("templates/a.Dockerfile.hbs")).unwrap();
        let error = placed(false).unwrap_err().to_string();
        assert!(error.contains("+ a link to ../patches/a"), "{error}");
    }
}
