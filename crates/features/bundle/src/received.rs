//! Opens a bundle in each form in which it reaches a site: a file, parts, a pipe, a plain tar, an unpacked layout.

use std::{
    collections::BTreeMap,
    io::{self, Read},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_core::{image::Digest, provenance::PublicKey};
use farrier_local::files::open_regular;
use farrier_store::registry::{Bounded, DiskLimit};
use fs_err::File;

use super::{
    Bundle, BundleError, Result,
    entry::blob_name,
    index::{BundleIndex, INDEX_NAME, MAX_INDEX},
    read::{Section, check_version, find_index},
    volume::{Volume, parts_of},
    write::Writer,
};

/// Maximum number of entries of a tar that are read, as many as a bundle may have frames.
const MAX_ENTRIES: usize = 1 << 20;
/// Number of bytes of standard input that are stored before the signature is verified: enough for all entries up to the index.
const MAX_HEAD: u64 = 3 * MAX_INDEX;

impl Bundle {
    /// Opens a bundle as a site received it: `-` for standard input; a file or its parts in any order; a tar that is not
    /// compressed; a directory with parts or with an unpacked layout. Standard input is copied into a temporary directory: its start,
    /// and the rest once the index is verified. A tar or layout is repacked into a file there, and every digest verified.
    ///
    /// If there are keys, one of them must have signed the bundle. Also returns the fingerprint of that key.
    pub fn receive(
        paths: &[PathBuf],
        keys: &[PublicKey],
        signature: Option<&Path>,
    ) -> Result<(Self, Option<Digest>)> {
        let scratch = tempfile::tempdir()?;
        let (name, mut files) = parts_of(paths)?;
        if files == [Path::new("-")] {
            let file = scratch.path().join("received");
            let verify = |index: &BundleIndex| index.verify_signer(&name, keys, signature).map(drop);
            store_stream(io::stdin(), &name, &file, MAX_HEAD, verify)?;
            files = vec![file];
        }
        let layout = match &files[..] {
            [file] => Layout::find(file)?,
            _ => None,
        };
        if let Some(layout) = layout {
            let index = layout.index(&name)?;
            // Before the blobs are copied: a stranger's layout may fill the disk.
            index.verify_signer(&name, keys, signature)?;
            DiskLimit::for_download(scratch.path(), Some(index.bytes().0), u64::MAX)?;
            let file = scratch.path().join("bundle");
            layout.repack(&name, &index, &file)?;
            files = vec![file];
        }
        let bundle = Self::open_parts(&name, &files)?;
        let signer = bundle.index().verify_signer(&name, keys, signature)?;
        Ok((bundle, signer))
    }
}

/// Copies the bundle `name`, or a tar, from a stream into a file. `verify` decides about the index in the first `max_head` bytes, which
/// then limits the rest.
pub(super) fn store_stream(
    from: impl Read,
    name: &Path,
    to: &Path,
    max_head: u64,
    verify: impl FnOnce(&BundleIndex) -> Result<()>,
) -> Result<()> {
    let refused = |reason: String| BundleError::NotABundle(name.to_owned(), reason);
    let mut file = File::create(to)?;
    let limit = DiskLimit::for_download(to.parent().unwrap_or(to), None, u64::MAX)?;
    let mut from = Bounded { inner: from, limit };
    io::copy(&mut from.by_ref().take(max_head), &mut file)?;
    let index = first_index(name, to).map_err(|error| match error {
        BundleError::Io(error) if error.kind() == io::ErrorKind::NotFound => {
            refused(format!("{error} in its first {max_head} bytes: write it to a file, and name the file"))
        }
        error => error,
    })?;
    verify(&index)?;
    let (bytes, blobs) = (index.bytes().0, index.carried().count() as u64);
    // Tar and zstd add less than a 256th to a blob's content, and less than 4 KiB for its entry.
    let max_rest = bytes + bytes / 256 + (blobs << 12) + (1 << 20);
    io::copy(&mut from.by_ref().take(max_rest), &mut file)?;
    match io::copy(&mut from.take(1), &mut io::sink())? {
        0 => Ok(()),
        _ => {
            Err(refused(format!("it is longer than the {} bytes that its index allows", max_head + max_rest)))
        }
    }
}

/// Reads and checks the index of a bundle or tar whose end may be missing.
fn first_index(name: &Path, file: &Path) -> Result<BundleIndex> {
    if let Some(layout) = Layout::find(file)? {
        return layout.index(name);
    }
    let volume = Arc::new(Volume::open(&[file.to_owned()])?);
    let (bytes, _) = find_index(name, &volume, volume.length)?;
    parse_index(name, &bytes)
}

fn parse_index(name: &Path, bytes: &[u8]) -> Result<BundleIndex> {
    check_version(name, bytes)?;
    let index: BundleIndex = serde_json::from_slice(bytes)
        .map_err(|error| BundleError::NotABundle(name.to_owned(), format!("{INDEX_NAME}: {error}")))?;
    match index.find_problem() {
        Some(reason) => Err(BundleError::inconsistent(name, &reason)),
        None => Ok(index),
    }
}

/// The files of a bundle, unpacked or in a tar.
enum Layout {
    Directory(PathBuf),
    /// The tar, and the position of each file in it.
    Tar(Arc<Volume>, BTreeMap<Vec<u8>, Range<u64>>),
}

impl Layout {
    /// Recognizes a layout; `None` for other files.
    fn find(path: &Path) -> Result<Option<Self>> {
        if path.join("oci-layout").is_file() {
            return Ok(Some(Self::Directory(path.to_owned())));
        }
        let tar = Volume::open(&[path.to_owned()])?;
        let mut magic = [0; 5];
        if tar.read_exact_at(&mut magic, 257).is_err() || magic != *b"ustar" {
            return Ok(None);
        }
        let files = files_in_tar(path)
            .map_err(|error| BundleError::NotABundle(path.to_owned(), error.to_string()))?;
        Ok(Some(Self::Tar(Arc::new(tar), files)))
    }

    /// Opens a file of the layout.
    fn open(&self, name: &str) -> io::Result<Box<dyn Read>> {
        match self {
            Self::Directory(directory) => Ok(Box::new(open_regular(&directory.join(name))?)),
            Self::Tar(tar, files) => {
                let missing = || io::Error::new(io::ErrorKind::NotFound, format!("the tar has no {name}"));
                let Range { start, end } = files.get(name.as_bytes()).ok_or_else(missing)?;
                Ok(Box::new(Section::new(Arc::clone(tar), *start, *end)))
            }
        }
    }

    /// Reads and checks the index of the bundle `name`.
    fn index(&self, name: &Path) -> Result<BundleIndex> {
        let mut bytes = Vec::new();
        self.open(INDEX_NAME)?.take(MAX_INDEX).read_to_end(&mut bytes)?;
        parse_index(name, &bytes)
    }

    /// Packs the layout into a bundle with the same bytes as the original bundle.
    fn repack(&self, name: &Path, index: &BundleIndex, to: &Path) -> Result<()> {
        let mut writer = Writer::open(to, None, index, &())?;
        for blob in index.carried() {
            let entry = blob_name(&blob.digest);
            writer.blob(blob, self.open(&entry)?).map_err(|error| match error {
                BundleError::Registry(_) => {
                    let reason = format!("{entry} has other content than its name says");
                    BundleError::NotABundle(name.to_owned(), reason)
                }
                error => error,
            })?;
        }
        writer.finish()?;
        Ok(())
    }
}

/// Finds the regular files in a tar, and skips their content.
fn files_in_tar(path: &Path) -> io::Result<BTreeMap<Vec<u8>, Range<u64>>> {
    let mut archive = tar::Archive::new(File::open(path)?);
    let mut files = BTreeMap::new();
    // Raw mode, because the crate reads long names into memory without a limit.
    for entry in archive.entries_with_seek()?.raw(true).take(MAX_ENTRIES) {
        let entry = entry?;
        if entry.header().entry_type().is_file() {
            let (start, name) = (entry.raw_file_position(), entry.header().path_bytes());
            // `tar -C layout .` puts `./` before each name.
            let name = name.strip_prefix(b"./").unwrap_or(&name);
            files.insert(name.to_owned(), start..start + entry.size());
        }
    }
    Ok(files)
}
