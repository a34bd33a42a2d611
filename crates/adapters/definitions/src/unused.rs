//! Warnings about files of a definitions directory that define nothing.

use std::{fs, path::Path};

use farrier_yaml as yaml;

use super::{has_extension, names_in, read_text};

/// Describes the files of a valid definitions directory that define nothing, although they look as if they should:
/// definitions that farrier does not read, and files without a definition. Someone may have disabled a definition in this
/// way, so these are no mistakes.
pub fn unused_files(root: &Path) -> Vec<String> {
    let mut warnings = Vec::new();
    for directory in ["images", "kernels", "announced"] {
        for path in paths_in(root, directory) {
            if has_extension(&path, &["yaml", "yml"]) {
                warnings.extend(is_empty(root, &path).then(|| format!("{path}: has no definition")));
            } else {
                warn_of_unread(root, &path, &mut warnings);
            }
        }
    }
    warnings
}

fn paths_in(root: &Path, directory: &str) -> Vec<String> {
    let names = names_in(&root.join(directory)).unwrap_or_default();
    names.iter().map(|name| format!("{directory}/{name}")).collect()
}

fn is_empty(root: &Path, path: &str) -> bool {
    let Ok(Some(text)) = read_text(root, path) else { return false };
    yaml::documents(&text).is_ok_and(|documents| documents.is_empty())
}

/// Adds a warning for each definition at or below the path.
fn warn_of_unread(root: &Path, path: &str, warnings: &mut Vec<String>) {
    let Ok(metadata) = fs::symlink_metadata(root.join(path)) else { return };
    if metadata.is_dir() {
        for inner in paths_in(root, path) {
            warn_of_unread(root, &inner, warnings);
        }
    } else if has_extension(path, &["yaml", "yml", "json"])
        && let Ok(Some(text)) = read_text(root, path)
        && text.contains("apiVersion")
        && text.contains("farrier.dev/")
    {
        warnings.push(format!(
            "{path}: is not read: definitions are the files *.yaml and *.yml directly in images/, kernels/ and announced/"
        ));
    }
}
