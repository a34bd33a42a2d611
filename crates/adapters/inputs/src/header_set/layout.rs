//! Brings an unpacked header set into the canonical form that builds rely on.
//!
//! A header set is placed over a toolchain's root file system, in which `/lib` is a symbolic link to `usr/lib`. A header set with
//! its own `lib` directory would replace that link, and the C library with it. So all files are moved below `usr`.

use std::{
    ffi::OsStr,
    io,
    path::{Component, Path, PathBuf},
};

use farrier_core::kernel::KernelRelease;
use fs_err::{self as fs, os::unix::fs::symlink};

use crate::{
    FetchError, Result,
    files::{exists, is_directory, listing, names_in},
};

/// Top-level directories that are links into `usr` on a merged system.
const MERGED: [&str; 6] = ["bin", "lib", "lib32", "lib64", "libx32", "sbin"];

/// Layout of a tree that the user provides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TreeLayout {
    /// A tree rooted at `/`.
    Rooted,
    /// A kernel's build tree.
    Build,
}

/// Moves the files unpacked in `raw` to `tree` in canonical form. `what` names the source in errors.
pub(super) fn arrange(raw: &Path, tree: &Path, release: &KernelRelease, what: &str) -> Result<()> {
    let (top, form) = detect_layout(raw, what)?;
    match form {
        TreeLayout::Rooted => {
            fs::rename(&top, tree)?;
            merge_usr(tree)?;
            link_build(tree, release)
        }
        TreeLayout::Build => {
            fs::create_dir(tree)?;
            let build = make_dirs(tree, "usr/src")?.join(format!("linux-headers-{release}"));
            fs::rename(&top, &build)?;
            relink(&build)?;
            link_build(tree, release)
        }
    }
}

/// Detects the layout of a tree, and where it starts: at `raw` or in one directory below it.
pub(super) fn detect_layout(raw: &Path, what: &str) -> Result<(PathBuf, TreeLayout)> {
    let has = |dir: &Path, paths: &[&str]| paths.iter().all(|path| is_directory(&dir.join(path)));
    let form = |dir: &Path| {
        let roots: [&[&str]; 3] =
            [&["usr", "usr/src"], &["lib", "lib/modules"], &["usr", "usr/lib", "usr/lib/modules"]];
        if roots.iter().any(|paths| has(dir, paths)) {
            Some(TreeLayout::Rooted)
        } else {
            (exists(&dir.join("Makefile")) && has(dir, &["include"])).then_some(TreeLayout::Build)
        }
    };
    if let Some(form) = form(raw) {
        return Ok((raw.to_owned(), form));
    }
    let names = names_in(raw)?;
    let subdirectories = names.iter().map(|name| raw.join(name)).filter(|path| is_directory(path));
    let candidates: Vec<_> = subdirectories.filter_map(|path| form(&path).map(|form| (path, form))).collect();
    match <[_; 1]>::try_from(candidates) {
        Ok([only]) => Ok(only),
        Err(_) => Err(FetchError::Layout(format!(
            "one kernel build tree (Makefile and include/) or one root (usr/src/ or lib/modules/) in {what}: {}",
            listing(&names)
        ))),
    }
}

/// Moves the content of `lib` and similar directories to `usr/lib` and so on.
pub(super) fn merge_usr(tree: &Path) -> Result<()> {
    for name in MERGED {
        let path = tree.join(name);
        match fs::symlink_metadata(&path) {
            Ok(metadata) if metadata.is_dir() => {
                make_dirs(tree, "usr")?;
                merge(tree, Path::new(name))?;
            }
            // On a merged system, this is the link into `usr`. The root file system below the header set also has the link.
            Ok(metadata) if metadata.is_symlink() => fs::remove_file(&path)?,
            _ => {}
        }
    }
    Ok(())
}

fn merge(tree: &Path, dir: &Path) -> Result<()> {
    let (from, to) = (tree.join(dir), tree.join("usr").join(dir));
    if !exists(&to) {
        fs::create_dir(&to)?;
        fs::set_permissions(&to, fs::metadata(&from)?.permissions())?;
    } else if !is_directory(&to) {
        return Err(not_a_directory(&to));
    }
    for name in names_in(&from)? {
        let (old, new) = (from.join(&name), to.join(&name));
        let metadata = fs::symlink_metadata(&old)?;
        if metadata.is_dir() {
            merge(tree, &dir.join(&name))?;
        } else if metadata.is_symlink() {
            let target = fs::read_link(&old)?;
            fs::remove_file(&old)?;
            symlink(moved_target(dir, &target), &new)?;
        } else {
            fs::rename(&old, &new)?;
        }
    }
    Ok(fs::remove_dir(&from)?)
}

fn not_a_directory(path: &Path) -> FetchError {
    io::Error::new(
        io::ErrorKind::NotADirectory,
        format!("cannot use {}: it is not a directory", path.display()),
    )
    .into()
}

/// Returns the new target of a link in `dir` (relative to the root) that moves to `usr/<dir>`.
fn moved_target(dir: &Path, target: &Path) -> PathBuf {
    if target.is_absolute() {
        return target.to_owned();
    }
    let mut parts: Vec<&OsStr> = dir.iter().collect();
    for component in target.components() {
        match component {
            Component::ParentDir => {
                parts.pop();
            }
            Component::Normal(part) => parts.push(part),
            _ => {}
        }
    }
    // A target below the same top-level directory moves along with the link.
    if parts.first().copied() == dir.iter().next() {
        return target.to_owned();
    }
    let up = std::iter::repeat_n(OsStr::new(".."), dir.iter().count() + 1);
    let usr =
        parts.first().is_some_and(|top| MERGED.iter().any(|name| top == name)).then_some(OsStr::new("usr"));
    up.chain(usr).chain(parts).collect()
}

/// Creates `usr/lib/modules/<release>/build` if it is missing and a build tree exists.
pub(super) fn link_build(tree: &Path, release: &KernelRelease) -> Result<()> {
    let modules = make_dirs(tree, &format!("usr/lib/modules/{release}"))?;
    let build = modules.join("build");
    if !exists(&build)
        && let Some(directory) =
            usual_directories(release).iter().find(|directory| tree.join("usr/src").join(directory).is_dir())
    {
        symlink(Path::new("../../../src").join(directory), &build)?;
    }
    // If there is no build tree, reading the header set reports what is missing.
    Ok(())
}

/// Returns the locations below `usr/src` where distributions put a kernel's headers: Debian and Ubuntu, RHEL and Fedora, plain
/// `make install`, SUSE on x86 and on Arm.
pub(super) fn usual_directories(release: &KernelRelease) -> [String; 5] {
    let (version, flavor) = release.as_str().rsplit_once('-').unwrap_or((release.as_str(), ""));
    [
        format!("linux-headers-{release}"),
        format!("kernels/{release}"),
        format!("linux-{release}"),
        format!("linux-{version}-obj/x86_64/{flavor}"),
        format!("linux-{version}-obj/aarch64/{flavor}"),
    ]
}

/// Creates directories below `tree`; none of them may be a link out of the tree.
fn make_dirs(tree: &Path, path: &str) -> Result<PathBuf> {
    let mut full = tree.to_owned();
    for part in Path::new(path) {
        full.push(part);
        match fs::symlink_metadata(&full) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Err(not_a_directory(&full)),
            Err(_) => fs::create_dir(&full)?,
        }
    }
    Ok(full)
}

/// Replaces absolute links to the original location of the build tree by relative links within it.
fn relink(build: &Path) -> Result<()> {
    for entry in walkdir::WalkDir::new(build).min_depth(1) {
        let entry = entry?;
        let path = entry.path();
        if !entry.path_is_symlink() {
            continue;
        }
        if let Some(inside) = part_inside(&fs::read_link(path)?, |part| exists(&build.join(part))) {
            let up = std::iter::repeat_n(OsStr::new(".."), entry.depth() - 1);
            fs::remove_file(path)?;
            symlink(up.chain(inside.iter()).collect::<PathBuf>(), path)?;
        }
    }
    Ok(())
}

/// Returns the longest suffix of an absolute target that exists in a tree, as tested by `contains`. At least two directories precede
/// the suffix: the tree's original location (`/home/me`, never `/usr`).
pub(super) fn part_inside(target: &Path, contains: impl Fn(&Path) -> bool) -> Option<PathBuf> {
    let parts: Vec<_> = target.strip_prefix("/").ok()?.components().collect();
    if parts.iter().any(|part| !matches!(part, Component::Normal(_))) {
        return None;
    }
    let suffixes = (2..parts.len()).filter_map(|start| parts.get(start..));
    suffixes.map(|suffix| suffix.iter().collect::<PathBuf>()).find(|part| contains(part))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new(files: &[&str], links: &[(&str, &str)]) -> Self {
            let dir = tempfile::tempdir().unwrap();
            let raw = dir.path().join("raw");
            fs::create_dir(&raw).unwrap();
            for file in files {
                fs::create_dir_all(raw.join(file).parent().unwrap()).unwrap();
                fs::write(raw.join(file), file).unwrap();
            }
            for (link, target) in links {
                fs::create_dir_all(raw.join(link).parent().unwrap()).unwrap();
                symlink(target, raw.join(link)).unwrap();
            }
            Self(dir)
        }

        fn arrange(&self) -> Result<(), FetchError> {
            let release = "6.1.0-acme+".parse().unwrap();
            arrange(&self.0.path().join("raw"), &self.0.path().join("tree"), &release, "test.tar")
        }

        fn link(&self, path: &str) -> String {
            fs::read_link(self.0.path().join("tree").join(path)).unwrap().to_str().unwrap().to_owned()
        }

        fn has(&self, path: &str) -> bool {
            fs::symlink_metadata(self.0.path().join("tree").join(path)).is_ok()
        }
    }

    const R: &str = "6.1.0-acme+";

    #[test]
    fn a_rooted_tree_moves_below_usr() {
        let tree = Tree::new(
            &["usr/src/h/Makefile", "lib/modules/6.1.0-acme+/kernel/x.ko", "usr/lib/kbuild/tool"],
            &[
                ("lib/modules/6.1.0-acme+/build", "/usr/src/h"),
                ("lib/modules/6.1.0-acme+/source", "../../../usr/src/h"),
                ("lib/modules/6.1.0-acme+/alias", "../other"),
            ],
        );
        tree.arrange().unwrap();
        assert!(!tree.has("lib"));
        assert!(tree.has("usr/lib/kbuild/tool"));
        assert!(tree.has("usr/lib/modules/6.1.0-acme+/kernel/x.ko"));
        assert_eq!(tree.link("usr/lib/modules/6.1.0-acme+/build"), "/usr/src/h");
        assert_eq!(tree.link("usr/lib/modules/6.1.0-acme+/source"), "../../../../usr/src/h");
        assert_eq!(tree.link("usr/lib/modules/6.1.0-acme+/alias"), "../other");
    }

    #[test]
    fn a_merged_tree_loses_its_link_and_gains_the_build_link() {
        let tree = Tree::new(&["usr/src/kernels/6.1.0-acme+/Makefile"], &[("lib", "usr/lib")]);
        tree.arrange().unwrap();
        assert!(!tree.has("lib"));
        assert_eq!(tree.link("usr/lib/modules/6.1.0-acme+/build"), format!("../../../src/kernels/{R}"));
    }

    #[test]
    fn a_build_tree_at_the_top_or_below() {
        for prefix in ["", "linux-6.1/"] {
            let file = |name: &str| format!("{prefix}{name}");
            let (makefile, header) = (file("Makefile"), file("include/generated/utsrelease.h"));
            let links = [
                (file("include/linked"), "/home/me/linux-6.1/include/generated"),
                (file("scripts/deep/up"), "/home/me/linux-6.1/Makefile"),
                (file("include/system"), "/usr/include/generated"),
                (file("include/gone"), "/home/me/elsewhere"),
            ];
            let links: Vec<(&str, &str)> = links.iter().map(|(a, b)| (a.as_str(), *b)).collect();
            let tree = Tree::new(&[&makefile, &header], &links);
            tree.arrange().unwrap();
            let build = format!("usr/src/linux-headers-{R}");
            assert_eq!(
                tree.link(&format!("usr/lib/modules/{R}/build")),
                format!("../../../src/linux-headers-{R}")
            );
            assert_eq!(tree.link(&format!("{build}/include/linked")), "../include/generated");
            assert_eq!(tree.link(&format!("{build}/scripts/deep/up")), "../../Makefile");
            assert_eq!(tree.link(&format!("{build}/include/system")), "/usr/include/generated");
            assert_eq!(tree.link(&format!("{build}/include/gone")), "/home/me/elsewhere");
        }
    }

    #[test]
    fn what_is_neither_is_listed() {
        let tree = Tree::new(&["README", "docs/x"], &[]);
        insta::assert_snapshot!(tree.arrange().unwrap_err(), @"cannot find one kernel build tree (Makefile and include/) or one root (usr/src/ or lib/modules/) in test.tar: README, docs");
    }

    #[test]
    fn nothing_leaves_through_a_link() {
        let outside = tempfile::tempdir().unwrap();
        let target = outside.path().to_str().unwrap();
        for link in ["usr", "usr/lib"] {
            let tree = Tree::new(&["lib/modules/x"], &[(link, target)]);
            assert!(tree.arrange().is_err(), "{link}");
        }
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    }
}
