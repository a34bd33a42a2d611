//! Lists the entries of a header set, and for each file the path to copy its content from.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use farrier_core::kernel::{Architecture, KernelRelease};
use farrier_local::archive::links::{self, stays_below};
use fs_err as fs;

use super::{LIMITS, selection, stage::Tree, survey::Survey};
use crate::{FetchError, Result, files::check_not_canceled, header_set::layout::part_inside};

/// Maximum number of packages of one header set. Debian's have three.
const MAX_PACKAGES: usize = 100;

/// One entry of a header set.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    Directory,
    File { from: PathBuf, is_ours: bool, is_executable: bool, size: u64 },
    Link { target: PathBuf },
}

/// The entries of a header set, by path relative to `/`.
pub(super) type Entries = BTreeMap<PathBuf, Entry>;

/// Lists the entries of a header set. Links can only lead into the set.
pub(super) fn gather(
    survey: &Survey,
    release: &KernelRelease,
    arch: Architecture,
    stop: &AtomicBool,
) -> Result<Entries> {
    let mut gatherer = Gatherer { entries: Entries::new(), bytes: 0, entry_count: 0, stop };
    let build = merged_path(&survey.build.path);
    let modules = PathBuf::from(format!("usr/lib/modules/{release}"));
    if !survey.is_whole && build.starts_with("usr") {
        gatherer.add_packages(survey)?;
        gatherer.link(&modules.join("build"), &build);
        if let Some(source) = &survey.source {
            gatherer.link(&modules.join("source"), &merged_path(&source.path));
        }
    } else {
        let build = PathBuf::from(format!("usr/src/linux-headers-{release}"));
        gatherer.add_joined_trees(survey, &build, arch)?;
        gatherer.link(&modules.join("build"), &build);
    }
    Ok(gatherer.entries)
}

/// Moves a path in `lib` to `usr/lib`: in the root file systems below a header set, `lib` is a link to `usr/lib`.
fn merged_path(path: &Path) -> PathBuf {
    if path.starts_with("lib") { Path::new("usr").join(path) } else { path.to_owned() }
}

struct Gatherer<'a> {
    entries: Entries,
    bytes: u64,
    entry_count: u64,
    stop: &'a AtomicBool,
}

/// A symbolic link in a tree, with paths relative to the tree's root.
struct LinkInTree {
    path: PathBuf,
    /// Resolved target, if it exists.
    resolved: Option<PathBuf>,
    /// Target as stored in the link.
    target: PathBuf,
}

impl Gatherer<'_> {
    /// Lists trees in the locations of packages, and keeps these paths, because the Makefiles of the trees refer to each other by
    /// them.
    fn add_packages(&mut self, survey: &Survey) -> Result<()> {
        let mut pending: VecDeque<PathBuf> =
            std::iter::once(&survey.build).chain(&survey.source).map(|tree| tree.path.clone()).collect();
        let (mut listed, mut links) = (BTreeSet::new(), Vec::new());
        while let Some(path) = pending.pop_front() {
            if listed.iter().any(|other: &PathBuf| path.starts_with(other)) {
                continue;
            }
            let tree = Tree { path: path.clone(), ..survey.build.clone() };
            let tree_links = self.walk(&tree, false, &|path| !selection::is_excluded(path), &merged_path)?;
            listed.insert(path);
            for link in tree_links {
                if let Some(resolved) = &link.resolved
                    && !listed.iter().chain(&pending).any(|directory| resolved.starts_with(directory))
                {
                    let package = package_of(resolved).ok_or_else(|| escapes(&link))?;
                    // Each link is compared with each package.
                    if listed.len() + pending.len() >= MAX_PACKAGES {
                        return Err(too_large(&tree.full_path(), &format!("{MAX_PACKAGES} packages")));
                    }
                    pending.push_back(package);
                }
                links.push(link);
            }
        }
        for link in links {
            let target = match &link.resolved {
                Some(resolved) => links::relative(&merged_path(parent(&link.path)), &merged_path(resolved)),
                // Distributions link to packages that need not be installed.
                None if stays_below(Path::new(""), &link.path, &link.target) => link.target.clone(),
                None => return Err(escapes(&link)),
            };
            self.put(merged_path(&link.path), Entry::Link { target });
        }
        Ok(())
    }

    /// Joins source tree and build directory into one tree that contains no reference to the original locations.
    fn add_joined_trees(&mut self, survey: &Survey, dest: &Path, arch: Architecture) -> Result<()> {
        let Survey { build, source, is_whole } = survey;
        let mut links = Vec::new();
        let trees: Vec<&Tree> = source.iter().chain(std::iter::once(build)).collect();
        for tree in &trees {
            // A separate build directory has a Makefile and a link that only point to the source tree.
            let is_separate_build = source.is_some() && *tree == build;
            let is_selected = |path: &Path| {
                let leads_to_source =
                    is_separate_build && (path == Path::new("Makefile") || path == Path::new("source"));
                let is_needed = !is_whole || selection::is_needed(path, arch);
                is_needed && !leads_to_source && !selection::is_excluded(path)
            };
            let tree_links = self.walk(tree, *is_whole, &is_selected, &|path| moved(tree, dest, path))?;
            links.extend(tree_links.into_iter().map(|link| (*tree, link)));
        }
        for (tree, link) in links {
            let path = moved(tree, dest, &link.path);
            // A link of one tree may lead into the other.
            let resolved = link.resolved.as_ref().and_then(|resolved| {
                let target_tree = trees
                    .iter()
                    .find(|other| other.root == tree.root && resolved.starts_with(&other.path))?;
                Some(moved(target_tree, dest, resolved))
            });
            let part = || part_inside(&link.target, |part| self.has(&dest.join(part)));
            let resolved = resolved.or_else(|| Some(dest.join(part()?)));
            let target = match resolved {
                Some(resolved) if self.has(&resolved) => links::relative(parent(&path), &resolved),
                // The link points to a part of the kernel that no module needs.
                Some(_) => continue,
                None if link.resolved.is_none() && stays_below(&tree.path, &link.path, &link.target) => {
                    continue;
                }
                None => return Err(escapes(&link)),
            };
            self.put(path, Entry::Link { target });
        }
        Ok(())
    }

    fn has(&self, path: &Path) -> bool {
        self.entries.contains_key(path)
    }

    /// Adds the selected files of a tree at the paths that `new_path` returns, and returns the selected links.
    fn walk(
        &mut self,
        tree: &Tree,
        is_whole: bool,
        is_selected: &dyn Fn(&Path) -> bool,
        new_path: &dyn Fn(&Path) -> PathBuf,
    ) -> Result<Vec<LinkInTree>> {
        let top = tree.full_path();
        let mut links = Vec::new();
        let walk = walkdir::WalkDir::new(&top).min_depth(1).into_iter();
        // Most of a whole kernel tree is not needed by modules.
        let is_entered = |entry: &walkdir::DirEntry| {
            !entry.file_type().is_dir()
                || !is_whole
                || entry.depth() > 1
                || entry.file_name().to_str().is_some_and(selection::is_entered)
        };
        for entry in walk.filter_entry(is_entered) {
            let entry = entry?;
            check_not_canceled(self.stop)?;
            let relative = entry.path().strip_prefix(&top).unwrap_or(entry.path());
            self.count(&top, entry.depth())?;
            let kind = entry.file_type();
            if kind.is_dir() || !is_selected(relative) {
                continue;
            }
            let path = tree.path.join(relative);
            if kind.is_symlink() {
                let target = fs::read_link(entry.path())?;
                links.push(LinkInTree { resolved: links::resolve(&tree.root, &path)?, path, target });
            } else if kind.is_file() {
                let metadata = entry.metadata()?;
                self.bytes = self.bytes.saturating_add(metadata.len());
                if self.bytes > LIMITS.bytes {
                    return Err(too_large(&top, &format!("{} bytes", LIMITS.bytes)));
                }
                let file = Entry::File {
                    from: entry.path().to_owned(),
                    is_ours: tree.is_ours,
                    is_executable: metadata.permissions().mode() & 0o111 != 0,
                    size: metadata.len(),
                };
                self.put(new_path(&path), file);
            } else {
                return Err(FetchError::unusable(
                    format!(
                        "cannot use {}: it is neither a file, a directory nor a link",
                        entry.path().display()
                    ),
                    "remove it: a header set has only files, directories and links",
                ));
            }
        }
        Ok(links)
    }

    fn count(&mut self, top: &Path, depth: usize) -> Result<()> {
        self.entry_count += 1;
        if self.entry_count > LIMITS.entries {
            return Err(too_large(top, &format!("{} files and directories", LIMITS.entries)));
        }
        if depth > LIMITS.depth {
            return Err(too_large(top, &format!("{} nested directories", LIMITS.depth)));
        }
        Ok(())
    }

    /// Adds a relative link from one path of the set to another.
    fn link(&mut self, link: &Path, target: &Path) {
        // Some distributions have the build directory itself at this path.
        if !self.has(link) && link != target {
            self.put(link.to_owned(), Entry::Link { target: links::relative(parent(link), target) });
        }
    }

    /// Adds an entry and its parent directories.
    fn put(&mut self, path: PathBuf, entry: Entry) {
        for directory in path.ancestors().skip(1).filter(|path| !path.as_os_str().is_empty()) {
            if self.entries.get(directory) == Some(&Entry::Directory) {
                break;
            }
            self.entries.insert(directory.to_owned(), Entry::Directory);
        }
        self.entries.insert(path, entry);
    }
}

fn moved(tree: &Tree, dest: &Path, path: &Path) -> PathBuf {
    dest.join(path.strip_prefix(&tree.path).unwrap_or(path))
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

/// Returns the directory that a header package owns: `usr/src/linux-headers-6.1.0-47-common`, `usr/lib/linux-kbuild-6.1`,
/// `usr/src/kernels/<release>`. Links to other locations are not followed.
fn package_of(path: &Path) -> Option<PathBuf> {
    let parts: Vec<&str> = path.iter().map(|part| part.to_str()).collect::<Option<_>>()?;
    let depth = match parts[..] {
        ["usr", "src", "kernels", _, ..] => 4,
        ["usr", "src", _, ..] => 3,
        ["usr", "lib", name, ..] if name.starts_with("linux-") => 3,
        ["lib", name, ..] if name.starts_with("linux-") => 2,
        _ => return None,
    };
    Some(parts.iter().take(depth).collect())
}

fn escapes(link: &LinkInTree) -> FetchError {
    let (link, target) = (link.path.display(), link.target.display());
    FetchError::unusable(
        format!("cannot use link {link}: it points to {target}, which is not part of the header set"),
        "add the target as another source, or remove the link; the header set was not stored",
    )
}

fn too_large(top: &Path, limit: &str) -> FetchError {
    FetchError::unusable(
        format!("cannot use {}: a header set has at most {limit}", top.display()),
        "name a kernel's build tree or header package, not a directory above it",
    )
}

#[cfg(test)]
mod tests {
    use fs_err::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_lead_to_a_limited_number_of_packages() {
        let root = tempfile::tempdir().unwrap();
        let path = PathBuf::from("usr/src/linux-headers-1");
        let build = root.path().join(&path);
        fs::create_dir_all(&build).unwrap();
        for number in 0..=MAX_PACKAGES {
            fs::create_dir(root.path().join(format!("usr/src/p{number}"))).unwrap();
            symlink(format!("../p{number}"), build.join(format!("l{number}"))).unwrap();
        }
        let build = Tree { root: root.path().to_owned(), path, is_ours: true };
        let survey = Survey { build, source: None, is_whole: false };
        let (release, stop) = ("6.1.0".parse().unwrap(), AtomicBool::new(false));
        let error = gather(&survey, &release, Architecture::Amd64, &stop).unwrap_err().to_string();
        assert!(error.ends_with(": a header set has at most 100 packages"), "{error}");
    }
}
