//! Opens a bundle in each form in which it reaches a site: a file, parts, a pipe, a plain tar, an unpacked layout.

use std::{
    io::{self, Cursor, Read},
    path::{Path, PathBuf},
};

use farrier_local::{
    archive::{Limits, UnpackError, unpack_tar},
    files::open_regular,
};
use fs_err::{self as fs, File};
use oci::error_chain;

use super::{
    Bundle, BundleError, Result,
    entry::{TAR_BLOCK, blob_name},
    index::{BundleIndex, INDEX_NAME, MAX_INDEX},
    read::check_version,
    volume::parts_of,
    write::Writer,
};

/// Limits for a layout, which is at most as large as a bundle may be.
const LIMITS: Limits = Limits { entries: 1 << 20, bytes: 1 << 45, depth: 8 };

impl Bundle {
    /// Opens a bundle as a site received it: `-` for standard input; a file or its parts in any order; a tar that is not
    /// compressed; a directory with parts or with an unpacked layout. A tar or layout is repacked into a file in
    /// a temporary directory, and every digest verified; standard input is copied there.
    pub fn receive(paths: &[PathBuf]) -> Result<Self> {
        let scratch = tempfile::tempdir()?;
        let (name, files) = parts_of(paths)?;
        let [file] = &files[..] else { return Self::open_parts(&name, &files) };
        if file.join("oci-layout").is_file() {
            return repack(file, scratch.path(), file);
        }
        let is_pipe = file == Path::new("-");
        let mut from: Box<dyn Read> =
            if is_pipe { Box::new(io::stdin()) } else { Box::new(File::open(file)?) };
        let mut start = Vec::new();
        from.by_ref().take(TAR_BLOCK as u64).read_to_end(&mut start)?;
        let is_tar = start.get(257..262) == Some(b"ustar");
        let mut from = Cursor::new(start).chain(from);
        if is_tar {
            let layout = scratch.path().join("layout");
            fs::create_dir(&layout)?;
            let refuse = |error: UnpackError| BundleError::NotABundle(name.clone(), error_chain(&error));
            unpack_tar(from, &layout, &LIMITS).map_err(refuse)?;
            return repack(&layout, scratch.path(), &name);
        }
        if !is_pipe {
            return Self::open_parts(&name, &files);
        }
        let file = scratch.path().join("bundle");
        io::copy(&mut from, &mut File::create(&file)?)?;
        Self::open_parts(&name, &[file])
    }
}

/// Packs an unpacked layout into a bundle with the same bytes as the original bundle.
fn repack(layout: &Path, scratch: &Path, name: &Path) -> Result<Bundle> {
    let not_a_bundle = |reason: String| BundleError::NotABundle(name.to_owned(), reason);
    let mut bytes = Vec::new();
    open_regular(&layout.join(INDEX_NAME))?.take(MAX_INDEX).read_to_end(&mut bytes)?;
    check_version(name, &bytes)?;
    let index: BundleIndex =
        serde_json::from_slice(&bytes).map_err(|error| not_a_bundle(format!("{INDEX_NAME}: {error}")))?;
    if let Some(reason) = index.find_problem() {
        return Err(BundleError::inconsistent(name, &reason));
    }
    let file = scratch.join("bundle");
    let mut writer = Writer::open(&file, None, &index, &())?;
    for blob in index.carried() {
        let entry = blob_name(&blob.digest);
        let content = open_regular(&layout.join(&entry))?;
        writer.blob(blob, content).map_err(|error| match error {
            BundleError::Registry(_) => not_a_bundle(format!("{entry} has other content than its name says")),
            error => error,
        })?;
    }
    writer.finish()?;
    Bundle::open_parts(name, &[file])
}
