//! Packs a definitions directory as a layer, without secrets.

use std::{
    io::{self, BufWriter, Read},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use farrier_core::image::{SourceEntry, is_version_control};
use fs_err::{self as fs, File};
use oci::{EntryKind, Layer, LayerWriter};
use walkdir::WalkDir;

use super::StoreError;

/// A packed definitions directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PackedDefinitions {
    /// The layer, in the requested file.
    pub layer: Layer,
    /// Omitted secrets, relative to the directory.
    pub omitted_paths: Vec<PathBuf>,
}

/// Packs a definitions directory into `to`; the same files give the same bytes. Omits files that look like credentials,
/// version-control data, and names that begin with a dot. Also omits `secrets`, the files that site.yaml uses as secrets. Blocks.
pub fn pack_definitions(dir: &Path, secrets: &[PathBuf], to: &Path) -> Result<PackedDefinitions, StoreError> {
    let mut writer = LayerWriter::new(BufWriter::new(File::create(to)?), 0);
    let mut omitted_paths = Vec::new();
    let is_visible =
        |name: &std::ffi::OsStr| !name.as_encoded_bytes().starts_with(b".") && !is_version_control(name);
    let mut entries = Vec::new();
    let walk = WalkDir::new(dir).min_depth(1).into_iter();
    for entry in walk.filter_entry(|entry| entry.depth() == 0 || is_visible(entry.file_name())) {
        let entry = entry.map_err(io::Error::from)?;
        entries.push(entry.path().strip_prefix(dir).unwrap_or(entry.path()).to_owned());
    }
    entries.sort();
    for path in entries {
        let full = dir.join(&path);
        let metadata = fs::symlink_metadata(&full)?;
        let is_listed = secrets.iter().any(|secret| dir.join(secret) == full);
        if is_listed || (metadata.is_file() && is_secret(&path, &full, metadata.len())?) {
            omitted_paths.push(path);
        } else if metadata.is_dir() {
            writer.entry(&path, 0o755, EntryKind::Directory)?;
        } else if metadata.is_symlink() {
            let target = fs::read_link(&full)?;
            let kind = EntryKind::Symlink(&target);
            writer.entry(&path, 0o777, kind)?;
        } else if metadata.is_file() {
            let mut content = File::open(&full)?;
            let mode = if metadata.permissions().mode() & 0o111 == 0 { 0o644 } else { 0o755 };
            let kind = EntryKind::File { size: metadata.len(), content: &mut content };
            writer.entry(&path, mode, kind)?;
        }
    }
    let (layer, _) = writer.finish()?;
    Ok(PackedDefinitions { layer, omitted_paths })
}

/// Whether a file of the directory looks like credentials.
fn is_secret(path: &Path, path_on_disk: &Path, size: u64) -> io::Result<bool> {
    let mut content = Vec::new();
    if size <= SourceEntry::MAX_INSPECTED_SIZE {
        File::open(path_on_disk)?.take(SourceEntry::MAX_INSPECTED_SIZE).read_to_end(&mut content)?;
    }
    Ok(matches!(SourceEntry::of(path, &content), SourceEntry::Credentials(_)))
}

#[cfg(test)]
mod tests {
    use farrier_local::archive;

    use super::*;

    #[test]
    fn secrets_stay_where_they_are() {
        let dir = tempfile::tempdir().unwrap();
        let definitions = dir.path().join("definitions");
        for (file, text) in [
            ("site.yaml", "kind: Site\n"),
            ("images/x.yaml", "kind: DriverImage\n"),
            ("keys/mok.pem", "-----BEGIN ENCRYPTED PRIVATE KEY-----\nMII\n"),
            ("keys/both.pem", "-----BEGIN CERTIFICATE-----\nx\n-----BEGIN RSA PRIVATE KEY-----\n"),
            ("keys/mok.crt", "-----BEGIN CERTIFICATE-----\nMII\n"),
            ("docker.json", r#"{"auths": {"r.example": {"auth": "c21pdGg6YW52aWw="}}}"#),
            ("password", "anvil\n"),
            ("keys/kubeconfig", "kind: Config\nusers:\n- user: {token: x}\n"),
            (".git/config", "x"),
            ("sources/x/CVS/Root", "x"),
        ] {
            let path = definitions.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let to = dir.path().join("layer");
        let packed = pack_definitions(&definitions, &["password".into()], &to).unwrap();
        let left: Vec<_> = packed.omitted_paths.iter().map(|path| path.to_str().unwrap()).collect();
        assert_eq!(left, ["docker.json", "keys/both.pem", "keys/kubeconfig", "keys/mok.pem", "password"]);
        let back = dir.path().join("back");
        fs::create_dir(&back).unwrap();
        archive::unpack_file(&to, &back, &archive::Options::default()).unwrap();
        let files = WalkDir::new(&back).sort_by_file_name().into_iter().map(Result::unwrap);
        let files = files.filter(|entry| entry.file_type().is_file());
        let files: Vec<_> =
            files.map(|entry| entry.path().strip_prefix(&back).unwrap().display().to_string()).collect();
        assert_eq!(files, ["images/x.yaml", "keys/mok.crt", "site.yaml"]);
        let again = pack_definitions(&definitions, &["password".into()], &to).unwrap();
        assert_eq!(again, packed);
    }
}
