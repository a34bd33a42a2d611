//! Unpacks a published payload and moves it to another kernel's module directory, so that the payload can be reused.

use std::{
    io::{self, Read},
    path::{Path, PathBuf},
};

use farrier_core::kernel::KernelRelease;
use farrier_local::archive::{Options, unpack_file};
use fs_err::{self as fs, File};
use oci::{Hashing, LayerReader};
use regex::bytes::Regex;
use walkdir::WalkDir;

use super::{
    error::{PayloadError, Result},
    exposed::deepest_directory,
    layer::{digest, walk},
    modules::is_module_file,
};

/// Parent directories of a payload's module directory, which is named after the kernel.
const MODULES: [&str; 2] = ["lib/modules", "usr/lib/modules"];
/// Size of the chunks in which a file is searched, in bytes.
const CHUNK: usize = 1 << 20;

/// Unpacks a payload layer into an empty directory. Fails if packing the tree again would not give the same layer. Blocks.
pub fn unpack_layer(layer: &Path, tree: &Path) -> Result<()> {
    unpack_file(layer, tree, &Options::default())?;
    let mut tar = Hashing::new(LayerReader::new(File::open(layer)?)?);
    io::copy(&mut tar, &mut io::sink())?;
    let (_, diff_id, _) = tar.into_parts();
    if digest(&walk(tree)?)? == diff_id { Ok(()) } else { Err(PayloadError::Lossy) }
}

/// Renames the module directory. Refuses a payload that names its kernel outside of its modules: after the renaming, such a
/// payload would still refer to the old kernel. Blocks.
pub fn move_to_kernel(tree: &Path, from: &KernelRelease, to: &KernelRelease) -> Result<()> {
    let directories: Vec<PathBuf> = MODULES
        .iter()
        .map(|parent| Path::new(parent).join(from.as_str()))
        // A symbolic link in the path could lead out of the tree.
        .filter(|path| deepest_directory(tree, path) == *path)
        .collect();
    if directories.is_empty() {
        return Err(PayloadError::NoModules(from.clone()));
    }
    if let Some(path) = first_mention(tree, &directories, from)? {
        return Err(PayloadError::NamesKernel(path, from.clone()));
    }
    for directory in directories {
        let new_path = directory.with_file_name(to.as_str());
        if fs::symlink_metadata(tree.join(&new_path)).is_ok() {
            return Err(PayloadError::Occupied(new_path));
        }
        fs::rename(tree.join(&directory), tree.join(&new_path))?;
    }
    Ok(())
}

/// Returns the first entry, relative to the tree, whose name, link target or content contains the kernel's release. The module
/// directories themselves and the modules' content do not count.
fn first_mention(tree: &Path, directories: &[PathBuf], kernel: &KernelRelease) -> Result<Option<PathBuf>> {
    // An escaped literal is a valid regular expression. If compiling it still fails, assume a match.
    let Ok(pattern) = Regex::new(&regex::escape(kernel.as_str())) else { return Ok(Some(PathBuf::new())) };
    let contains_release = |path: &Path| pattern.is_match(path.as_os_str().as_encoded_bytes());
    for entry in WalkDir::new(tree).min_depth(1).follow_links(false).sort_by_file_name() {
        let entry = entry?;
        let path = entry.path().strip_prefix(tree).unwrap_or(entry.path());
        let inner =
            directories.iter().find_map(|directory| path.strip_prefix(directory).ok()).unwrap_or(path);
        // Skip the content of modules: every module names its kernel, and the check decides whether it loads.
        let is_module = is_module_file(&entry.file_name().to_string_lossy());
        let mentions_kernel = contains_release(inner)
            || (entry.path_is_symlink() && contains_release(&fs::read_link(entry.path())?))
            || (entry.file_type().is_file()
                && !is_module
                && contains(entry.path(), &pattern, kernel.as_str().len())?);
        if mentions_kernel {
            return Ok(Some(path.to_owned()));
        }
    }
    Ok(None)
}

/// Whether the file contains the pattern, which matches texts of `length` bytes.
fn contains(path: &Path, pattern: &Regex, length: usize) -> Result<bool> {
    let mut file = File::open(path)?;
    let mut buffer = Vec::with_capacity(CHUNK + length);
    loop {
        // Keep the end of the previous chunk, to find a match that spans two chunks.
        buffer.drain(..buffer.len().saturating_sub(length - 1));
        let overlap = buffer.len();
        file.by_ref().take(CHUNK as u64).read_to_end(&mut buffer)?;
        if buffer.len() == overlap {
            return Ok(false);
        }
        if pattern.is_match(&buffer) {
            return Ok(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        fs,
        os::unix::fs::{PermissionsExt as _, symlink},
    };

    use super::*;
    use crate::write_payload_layer;

    fn release(text: &str) -> KernelRelease {
        text.parse().unwrap()
    }

    const A: &str = "6.1.0-55-amd64";
    const B: &str = "6.1.0-56-amd64";

    /// Makes a payload for kernel A.
    fn payload() -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        let extra = tree.path().join(format!("lib/modules/{A}/extra"));
        fs::create_dir_all(&extra).unwrap();
        fs::write(extra.join("hello.ko"), format!("vermagic={A} SMP")).unwrap();
        fs::write(tree.path().join(format!("lib/modules/{A}/modules.dep")), "extra/hello.ko:\n").unwrap();
        fs::create_dir_all(tree.path().join("usr/bin")).unwrap();
        fs::write(tree.path().join("usr/bin/tool"), "a tool").unwrap();
        tree
    }

    fn moved(tree: &Path) -> Result<(), PayloadError> {
        move_to_kernel(tree, &release(A), &release(B))
    }

    #[test]
    fn a_layer_comes_back_as_it_was_and_moves_to_another_kernel() {
        let (payload, work) = (payload(), tempfile::tempdir().unwrap());
        let (layer, tree) = (work.path().join("layer"), work.path().join("tree"));
        let written = write_payload_layer(payload.path(), false, &layer).unwrap();
        fs::create_dir(&tree).unwrap();
        unpack_layer(&layer, &tree).unwrap();
        let again = write_payload_layer(&tree, false, &work.path().join("again")).unwrap();
        assert_eq!(again, written);

        moved(&tree).unwrap();
        let module = tree.join(format!("lib/modules/{B}/extra/hello.ko"));
        assert_eq!(fs::read_to_string(module).unwrap(), format!("vermagic={A} SMP"), "byte for byte");
        assert!(!tree.join("lib/modules").join(A).exists());
        assert!(tree.join(format!("lib/modules/{B}/modules.dep")).is_file());
    }

    /// On a usr-merged base the layer has `usr/lib`, and the payload moves there.
    #[test]
    fn a_layer_of_a_merged_base_moves_too() {
        let (payload, work) = (payload(), tempfile::tempdir().unwrap());
        let (layer, tree) = (work.path().join("layer"), work.path().join("tree"));
        write_payload_layer(payload.path(), true, &layer).unwrap();
        fs::create_dir(&tree).unwrap();
        unpack_layer(&layer, &tree).unwrap();
        moved(&tree).unwrap();
        assert!(tree.join(format!("usr/lib/modules/{B}/extra/hello.ko")).is_file());
        assert!(!tree.join("lib").exists());
    }

    #[test]
    fn what_is_lost_in_unpacking_is_noticed() {
        let (payload, work) = (payload(), tempfile::tempdir().unwrap());
        let tmp = payload.path().join("tmp");
        fs::create_dir(&tmp).unwrap();
        fs::set_permissions(&tmp, fs::Permissions::from_mode(0o1777)).unwrap();
        let (layer, tree) = (work.path().join("layer"), work.path().join("tree"));
        write_payload_layer(payload.path(), false, &layer).unwrap();
        fs::create_dir(&tree).unwrap();
        assert!(matches!(unpack_layer(&layer, &tree), Err(PayloadError::Lossy)));
        fs::write(&layer, "no layer").unwrap();
        assert!(unpack_layer(&layer, &tree).is_err());
    }

    #[test]
    fn a_payload_that_names_its_kernel_elsewhere_stays() {
        type Change = fn(&Path);
        let changes: [(Change, &str); 5] = [
            (|tree| fs::write(tree.join("usr/bin/tool"), format!("KVER={A}\n")).unwrap(), "usr/bin/tool"),
            (|tree| fs::create_dir_all(tree.join(format!("usr/src/x-{A}"))).unwrap(), "usr/src/x-"),
            (
                |tree| symlink(format!("/usr/src/{A}"), tree.join(format!("lib/modules/{A}/build"))).unwrap(),
                "build",
            ),
            (
                |tree| {
                    let text = format!("{}{A}", "x".repeat(CHUNK - 3));
                    fs::write(tree.join("usr/bin/tool"), text).unwrap();
                },
                "usr/bin/tool",
            ),
            (|tree| fs::write(tree.join(format!("lib/modules/{A}/modules.dep")), A).unwrap(), "modules.dep"),
        ];
        for (change, what) in changes {
            let tree = payload();
            change(tree.path());
            let error = moved(tree.path()).unwrap_err();
            let PayloadError::NamesKernel(path, _) = &error else { panic!("{error}") };
            assert!(path.display().to_string().contains(what), "{error}");
            assert!(tree.path().join("lib/modules").join(A).is_dir(), "the module directory was moved");
        }
    }

    #[test]
    fn places_that_do_not_fit() {
        let tree = payload();
        let error = move_to_kernel(tree.path(), &release("6.1.0-54-amd64"), &release(B)).unwrap_err();
        assert_eq!(error.to_string(), "it has no directory lib/modules/6.1.0-54-amd64");
        fs::create_dir(tree.path().join("lib/modules").join(B)).unwrap();
        assert!(matches!(moved(tree.path()), Err(PayloadError::Occupied(_))));

        // A link in place of `lib` could lead anywhere.
        let (tree, elsewhere) = (tempfile::tempdir().unwrap(), payload());
        symlink(elsewhere.path().join("lib"), tree.path().join("lib")).unwrap();
        assert!(matches!(moved(tree.path()), Err(PayloadError::NoModules(_))));
    }
}
