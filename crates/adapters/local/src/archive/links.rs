//! Symbolic links inside a tree: builds and resolves link targets without leaving the tree.

use std::{
    ffi::OsString,
    io,
    path::{Component, Path, PathBuf},
};

use fs_err as fs;

/// Maximum number of symbolic links followed for one path (`MAXSYMLINKS` in the kernel's `include/linux/namei.h`).
pub(super) const MAX_LINKS: usize = 40;

/// Returns the relative target for a link in `directory` that points to `destination`. Both paths are relative to the same root
/// and contain no `.`, `..` or links.
pub fn relative(directory: &Path, destination: &Path) -> PathBuf {
    let common = directory.iter().zip(destination).take_while(|(a, b)| a == b).count();
    let up = directory.iter().skip(common).map(|_| Path::new(".."));
    let target: PathBuf = up.chain(destination.iter().skip(common).map(Path::new)).collect();
    if target.as_os_str().is_empty() { PathBuf::from(".") } else { target }
}

/// Whether a link's target stays below `top` at each component. `top` and `link` are relative to the same root. The check is
/// lexical: other links are not followed.
pub fn stays_below(top: &Path, link: &Path, target: &Path) -> bool {
    let mut path = link.parent().unwrap_or(Path::new("")).to_owned();
    target.is_relative() && target.components().all(|part| step(&mut path, part) && path.starts_with(top))
}

/// Returns the path that a link in `directory` points to, relative to the same root. Other links are not followed. Returns `None`
/// if the target is above the root.
pub fn target_of(directory: &Path, target: &Path) -> Option<PathBuf> {
    let mut path = if target.is_absolute() { PathBuf::new() } else { directory.to_owned() };
    target.components().all(|part| step(&mut path, part)).then_some(path)
}

/// Extends the path by one component of a target. Returns `false` if the result is above the root.
fn step(path: &mut PathBuf, part: Component<'_>) -> bool {
    match part {
        Component::Normal(name) => path.push(name),
        Component::ParentDir => return path.pop(),
        Component::CurDir | Component::RootDir => {}
        Component::Prefix(_) => return false,
    }
    true
}

/// Resolves a path inside `root` as if `root` were `/`. The result is relative to `root` and contains no links. Returns `None`
/// when a component does not exist.
pub fn resolve(root: &Path, path: &Path) -> io::Result<Option<PathBuf>> {
    let mut pending: Vec<OsString> = components(path);
    let mut resolved = PathBuf::new();
    let mut followed = 0;
    while let Some(name) = pending.pop() {
        if name == ".." {
            resolved.pop();
            continue;
        }
        resolved.push(&name);
        let path = root.join(&resolved);
        let metadata = match fs::symlink_metadata(&path) {
            Ok(metadata) => metadata,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                // Trees in the cache have no `lib`. Treat it as a link to `usr/lib`, as on machines with a merged /usr.
                if resolved == Path::new("lib") {
                    pending.extend(["lib".into(), "usr".into()]);
                    resolved.clear();
                    continue;
                }
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if metadata.is_symlink() {
            followed += 1;
            if followed > MAX_LINKS {
                return Err(io::Error::other(format!(
                    "cannot follow link {}: too many symbolic links",
                    path.display()
                )));
            }
            let target = fs::read_link(&path)?;
            if target.is_absolute() {
                resolved.clear();
            } else {
                resolved.pop();
            }
            pending.extend(components(&target));
        }
    }
    Ok(Some(resolved))
}

/// Returns the path's components in reverse order, including `..`.
pub(super) fn components(path: &Path) -> Vec<OsString> {
    path.components()
        .rev()
        .filter_map(|component| match component {
            Component::Normal(name) => Some(name.to_owned()),
            Component::ParentDir => Some("..".into()),
            Component::CurDir | Component::RootDir | Component::Prefix(_) => None,
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relative_targets() {
        for (directory, place, wanted) in [
            ("", "a/b", "a/b"),
            ("a", "a/b", "b"),
            ("a/b", "a/c/d", "../c/d"),
            ("a/b", "c", "../../c"),
            ("a/b", "a/b", "."),
            ("a/b", "a", ".."),
            ("", "", "."),
        ] {
            let target = relative(Path::new(directory), Path::new(place));
            assert_eq!(target, Path::new(wanted), "{directory} {place}");
        }
    }

    #[test]
    fn a_target_that_passes_outside_does_not_stay_below() {
        let stays =
            |top: &str, target: &str| stays_below(Path::new(top), Path::new("a/b/link"), Path::new(target));
        assert!(stays("", "../../c") && stays("a", "../c") && stays("a/b", "./c/.."));
        assert!(!stays("", "../../../c") && !stays("", "/a") && !stays("a", "../../a/c"));
    }
}
