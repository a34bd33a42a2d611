//! Symbolic links inside a tree: builds and resolves link targets without leaving the tree.

use std::{
    ffi::OsString,
    io,
    path::{Component, Path, PathBuf},
};

use fs_err as fs;

/// Maximum number of symbolic links followed for one path (`MAXSYMLINKS` in the kernel's `include/linux/namei.h`).
pub(super) const MAX_LINKS: usize = 40;

/// Returns the target for a link in `directory` that points at `place`. Both paths are relative to the same root and free of `.`,
/// `..` and links.
pub fn relative(directory: &Path, place: &Path) -> PathBuf {
    let common = directory.iter().zip(place).take_while(|(a, b)| a == b).count();
    let up = directory.iter().skip(common).map(|_| Path::new(".."));
    let target: PathBuf = up.chain(place.iter().skip(common).map(Path::new)).collect();
    if target.as_os_str().is_empty() { PathBuf::from(".") } else { target }
}

/// Whether a link at this relative path stays below `top` at each step toward its target. Other links are not followed.
pub fn stays_below(top: &Path, link: &Path, target: &Path) -> bool {
    let mut place = link.parent().unwrap_or(Path::new("")).to_owned();
    target.is_relative() && target.components().all(|part| step(&mut place, part) && place.starts_with(top))
}

/// Returns where a link in this directory leads, relative to the same root, without following other links. Returns `None` when
/// the target is above the root.
pub fn target_of(directory: &Path, target: &Path) -> Option<PathBuf> {
    let mut place = if target.is_absolute() { PathBuf::new() } else { directory.to_owned() };
    target.components().all(|part| step(&mut place, part)).then_some(place)
}

/// Advances by one path component; returns `false` when that leads above the root.
fn step(place: &mut PathBuf, part: Component<'_>) -> bool {
    match part {
        Component::Normal(name) => place.push(name),
        Component::ParentDir => return place.pop(),
        Component::CurDir | Component::RootDir => {}
        Component::Prefix(_) => return false,
    }
    true
}

/// Resolves a path inside `root` as if `root` were `/`. The result is relative to `root` and contains no links. Returns `None`
/// when a component does not exist.
pub fn resolve(root: &Path, path: &Path) -> io::Result<Option<PathBuf>> {
    let mut waiting: Vec<OsString> = components(path);
    let mut found = PathBuf::new();
    let mut links = 0;
    while let Some(name) = waiting.pop() {
        if name == ".." {
            found.pop();
            continue;
        }
        found.push(&name);
        let place = root.join(&found);
        let metadata = match fs::symlink_metadata(&place) {
            Ok(metadata) => metadata,
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                // Trees in the cache have no `lib` directory; a machine with a merged /usr has it as a link to `usr/lib`.
                if found == Path::new("lib") {
                    waiting.extend(["lib".into(), "usr".into()]);
                    found.clear();
                    continue;
                }
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        if metadata.is_symlink() {
            links += 1;
            if links > MAX_LINKS {
                return Err(io::Error::other(format!(
                    "follow link {}: too many symbolic links",
                    place.display()
                )));
            }
            let target = fs::read_link(&place)?;
            if target.is_absolute() {
                found.clear();
            } else {
                found.pop();
            }
            waiting.extend(components(&target));
        }
    }
    Ok(Some(found))
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
    fn a_link_that_leaves_on_the_way_does_not_stay() {
        let stays =
            |top: &str, target: &str| stays_below(Path::new(top), Path::new("a/b/link"), Path::new(target));
        assert!(stays("", "../../c") && stays("a", "../c") && stays("a/b", "./c/.."));
        assert!(!stays("", "../../../c") && !stays("", "/a") && !stays("a", "../../a/c"));
    }
}
