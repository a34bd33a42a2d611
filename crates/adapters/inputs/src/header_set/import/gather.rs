//! Lists the files of a header set, with the origin of each.

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
    let mut gatherer = Gatherer { entries: Entries::new(), bytes: 0, seen: 0, stop };
    let build = merged_place(&survey.build.path);
    let modules = PathBuf::from(format!("usr/lib/modules/{release}"));
    if !survey.is_whole && build.starts_with("usr") {
        gatherer.packaged(survey)?;
        gatherer.link(&modules.join("build"), &build);
        if let Some(source) = &survey.source {
            gatherer.link(&modules.join("source"), &merged_place(&source.path));
        }
    } else {
        let build = PathBuf::from(format!("usr/src/linux-headers-{release}"));
        gatherer.joined(survey, &build, arch)?;
        gatherer.link(&modules.join("build"), &build);
    }
    Ok(gatherer.entries)
}

/// Moves a path in `lib` to `usr/lib`: in the root file systems below a header set, `lib` is a link to `usr/lib`.
fn merged_place(path: &Path) -> PathBuf {
    if path.starts_with("lib") { Path::new("usr").join(path) } else { path.to_owned() }
}

struct Gatherer<'a> {
    entries: Entries,
    bytes: u64,
    seen: u64,
    stop: &'a AtomicBool,
}

/// A symbolic link in a tree, with paths relative to the tree's root.
struct Found {
    link: PathBuf,
    /// Resolved target, if it exists.
    meant: Option<PathBuf>,
    /// Target as written in the link.
    says: PathBuf,
}

impl Gatherer<'_> {
    /// Lists trees in the locations of packages, and keeps these paths, because the Makefiles of the trees refer to each other by
    /// them.
    fn packaged(&mut self, survey: &Survey) -> Result<()> {
        let mut waiting: VecDeque<PathBuf> =
            std::iter::once(&survey.build).chain(&survey.source).map(|tree| tree.path.clone()).collect();
        let (mut taken, mut links) = (BTreeSet::new(), Vec::new());
        while let Some(path) = waiting.pop_front() {
            if taken.iter().any(|taken: &PathBuf| path.starts_with(taken)) {
                continue;
            }
            let tree = Tree { path: path.clone(), ..survey.build.clone() };
            let found = self.walk(&tree, false, &|path| !selection::is_product(path), &merged_place)?;
            taken.insert(path);
            for found in found {
                if let Some(meant) = &found.meant
                    && !taken.iter().chain(&waiting).any(|taken| meant.starts_with(taken))
                {
                    let package = package_of(meant).ok_or_else(|| escapes(&found))?;
                    waiting.push_back(package);
                }
                links.push(found);
            }
        }
        for found in links {
            let target = match &found.meant {
                Some(meant) => links::relative(&merged_place(parent(&found.link)), &merged_place(meant)),
                // Distributions link to packages that need not be installed.
                None if stays_below(Path::new(""), &found.link, &found.says) => found.says.clone(),
                None => return Err(escapes(&found)),
            };
            self.put(merged_place(&found.link), Entry::Link { target });
        }
        Ok(())
    }

    /// Joins source tree and build directory into one tree that contains no reference to the original locations.
    fn joined(&mut self, survey: &Survey, dest: &Path, arch: Architecture) -> Result<()> {
        let Survey { build, source, is_whole } = survey;
        let mut links = Vec::new();
        let trees: Vec<&Tree> = source.iter().chain(std::iter::once(build)).collect();
        for tree in &trees {
            let is_stub = source.is_some() && *tree == build;
            let wanted = |path: &Path| {
                let is_own = is_stub && (path == Path::new("Makefile") || path == Path::new("source"));
                !is_own && !selection::is_product(path) && (!is_whole || selection::is_needed(path, arch))
            };
            let found = self.walk(tree, *is_whole, &wanted, &|place| moved(tree, dest, place))?;
            links.extend(found.into_iter().map(|found| (*tree, found)));
        }
        for (tree, found) in links {
            let place = moved(tree, dest, &found.link);
            // A link of one tree may lead into the other.
            let meant = found.meant.as_ref().and_then(|meant| {
                let home =
                    trees.iter().find(|home| home.root == tree.root && meant.starts_with(&home.path))?;
                Some(moved(home, dest, meant))
            });
            let part = || part_inside(&found.says, |part| self.has(&dest.join(part)));
            let meant = meant.or_else(|| Some(dest.join(part()?)));
            let target = match meant {
                Some(meant) if self.has(&meant) => links::relative(parent(&place), &meant),
                // The link leads to a part of the kernel that no module needs.
                Some(_) => continue,
                None if found.meant.is_none() && stays_below(&tree.path, &found.link, &found.says) => {
                    continue;
                }
                None => return Err(escapes(&found)),
            };
            self.put(place, Entry::Link { target });
        }
        Ok(())
    }

    fn has(&self, place: &Path) -> bool {
        self.entries.contains_key(place)
    }

    /// Lists a tree's files and returns its links.
    fn walk(
        &mut self,
        tree: &Tree,
        is_whole: bool,
        wanted: &dyn Fn(&Path) -> bool,
        place: &dyn Fn(&Path) -> PathBuf,
    ) -> Result<Vec<Found>> {
        let top = tree.place();
        let mut found = Vec::new();
        let walk = walkdir::WalkDir::new(&top).min_depth(1).into_iter();
        // Most of a whole kernel tree is not needed by modules.
        let entered = |entry: &walkdir::DirEntry| {
            !entry.file_type().is_dir()
                || !is_whole
                || entry.depth() > 1
                || entry.file_name().to_str().is_some_and(selection::is_entered)
        };
        for entry in walk.filter_entry(entered) {
            let entry = entry?;
            check_not_canceled(self.stop)?;
            let relative = entry.path().strip_prefix(&top).unwrap_or(entry.path());
            self.count(&top, entry.depth())?;
            let kind = entry.file_type();
            if kind.is_dir() || !wanted(relative) {
                continue;
            }
            let link = tree.path.join(relative);
            if kind.is_symlink() {
                let says = fs::read_link(entry.path())?;
                found.push(Found { meant: links::resolve(&tree.root, &link)?, link, says });
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
                self.put(place(&link), file);
            } else {
                return Err(FetchError::unusable(
                    format!("use {}: it is neither a file, a directory nor a link", entry.path().display()),
                    "remove it: a header set holds only files, directories and links",
                ));
            }
        }
        Ok(found)
    }

    fn count(&mut self, top: &Path, depth: usize) -> Result<()> {
        self.seen += 1;
        if self.seen > LIMITS.entries {
            return Err(too_large(top, &format!("{} files and directories", LIMITS.entries)));
        }
        if depth > LIMITS.depth {
            return Err(too_large(top, &format!("{} nested directories", LIMITS.depth)));
        }
        Ok(())
    }

    /// Adds a relative link from one path of the set to another.
    fn link(&mut self, link: &Path, meant: &Path) {
        // Some distributions have the build directory itself at this path.
        if !self.has(link) && link != meant {
            self.put(link.to_owned(), Entry::Link { target: links::relative(parent(link), meant) });
        }
    }

    /// Adds an entry and its parent directories.
    fn put(&mut self, place: PathBuf, entry: Entry) {
        for directory in place.ancestors().skip(1).filter(|path| !path.as_os_str().is_empty()) {
            if self.entries.get(directory) == Some(&Entry::Directory) {
                break;
            }
            self.entries.insert(directory.to_owned(), Entry::Directory);
        }
        self.entries.insert(place, entry);
    }
}

fn moved(tree: &Tree, dest: &Path, place: &Path) -> PathBuf {
    dest.join(place.strip_prefix(&tree.path).unwrap_or(place))
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(Path::new(""))
}

/// Returns the directory that a header package owns: `usr/src/linux-headers-6.1.0-47-common`, `usr/lib/linux-kbuild-6.1`,
/// `usr/src/kernels/<release>`. Links to other locations are not followed.
fn package_of(meant: &Path) -> Option<PathBuf> {
    let parts: Vec<&str> = meant.iter().map(|part| part.to_str()).collect::<Option<_>>()?;
    let depth = match parts[..] {
        ["usr", "src", "kernels", _, ..] => 4,
        ["usr", "src", _, ..] => 3,
        ["usr", "lib", name, ..] if name.starts_with("linux-") => 3,
        ["lib", name, ..] if name.starts_with("linux-") => 2,
        _ => return None,
    };
    Some(parts.iter().take(depth).collect())
}

fn escapes(found: &Found) -> FetchError {
    let (link, target) = (found.link.display(), found.says.display());
    FetchError::unusable(
        format!("use link {link}: it leads to {target}, which is not part of the header set"),
        "name its target as a further source, or remove the link; the header set was not stored",
    )
}

fn too_large(top: &Path, limit: &str) -> FetchError {
    FetchError::unusable(
        format!("use {}: a header set has at most {limit}", top.display()),
        "name a kernel's build tree or header package, not a directory above it",
    )
}
