//! The built-in definitions, embedded in the binary.

use include_dir::{Dir, include_dir};

use super::File;

pub(super) static IMAGES: &Dir<'_> = &include_dir!("$CARGO_MANIFEST_DIR/../../../images");
pub(super) static KERNELS: &Dir<'_> = &include_dir!("$CARGO_MANIFEST_DIR/../../../kernels");
pub(super) static PATCHES: &Dir<'_> = &include_dir!("$CARGO_MANIFEST_DIR/../../../patches");
pub(super) static TEMPLATES: &Dir<'_> = &include_dir!("$CARGO_MANIFEST_DIR/../../../templates");

/// Returns the embedded files in file-name order, named as in the repository.
pub(super) fn files(dir: &Dir<'_>, name: &str) -> Vec<File> {
    let mut files: Vec<File> = dir
        .files()
        .filter_map(|file| {
            let text = file.contents_utf8()?;
            Some(File { name: format!("{name}/{}", file.path().display()), text: text.to_owned() })
        })
        .collect();
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files
}
