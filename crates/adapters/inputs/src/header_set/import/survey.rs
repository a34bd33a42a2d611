//! Finds the build directory among the sources, and the source tree from which it was configured.

use std::path::{Path, PathBuf};

use farrier_core::kernel::KernelRelease;
use farrier_local::archive::links::resolve;
use fs_err as fs;

use super::stage::{Staged, Tree, ambiguous};
use crate::{
    FetchError, Result,
    files::read_start,
    header_set::layout::usual_directories,
    header_tree::{self, TreeError},
};

/// Trees from which a header set is made.
#[derive(Debug)]
pub(super) struct Survey {
    /// The build directory.
    pub build: Tree,
    /// Source tree of a separate build directory (`make O=`).
    pub source: Option<Tree>,
    /// Whether the tree is a whole kernel source rather than a header package's subset.
    pub is_whole: bool,
}

/// Maximum size in bytes of a separate build directory's Makefile, which has a dozen lines.
const MAX_STUB: u64 = 16 << 10;

/// Finds the build directory of a release, and its source tree.
pub(super) fn survey(staged: &Staged, release: &KernelRelease) -> Result<Survey> {
    let build = find_build(staged, release)?;
    let source = find_source(staged, &build)?;
    let top = source.as_ref().unwrap_or(&build);
    // No header package has this file, and every kernel source has it.
    let is_whole = top.full_path().join("init/main.c").is_file();
    Ok(Survey { build, source, is_whole })
}

/// Whether the tree is a configured build directory and not only a source tree.
fn is_configured(tree: &Tree) -> bool {
    ["include/generated/utsrelease.h", "include/config/kernel.release", "include/config/auto.conf"]
        .iter()
        .any(|file| tree.full_path().join(file).is_file())
}

fn find_build(staged: &Staged, release: &KernelRelease) -> Result<Tree> {
    let configured: Vec<&Tree> = staged.trees.iter().filter(|tree| is_configured(tree)).collect();
    let in_root = staged.rooted.as_ref().map(|root| rooted_build(root, release)).transpose()?.flatten();
    let mut found: Vec<Tree> = configured.into_iter().cloned().chain(in_root).collect();
    if found.len() > 1 {
        return Err(ambiguous(&staged.names, "a configured build directory"));
    }
    if let Some(found) = found.pop() {
        return Ok(found);
    }
    // A single tree is returned although it is not configured: the later read reports which file is missing.
    if let ([only], None) = (&staged.trees[..], &staged.rooted) {
        return Ok(only.clone());
    }
    let reason = match staged.rooted.as_ref().and_then(|root| build_link(root, release)) {
        Some((link, target)) => format!("{link} points to {target}, which does not exist"),
        None => format!("there is neither lib/modules/{release}/build nor a configured kernel tree"),
    };
    Err(FetchError::unusable(
        format!("cannot find the build directory of {release} in {}: {reason}", staged.names),
        format!(
            "name the kernel's build directory or an archive of it as a further source; `make tar-pkg` packs modules \
             but no headers. A package or archive of headers has usr/src/ or lib/modules/{release}/build"
        ),
    ))
}

/// Returns the target of `lib/modules/<release>/build`, or else the build directory in a distribution's usual location.
fn rooted_build(rooted: &Tree, release: &KernelRelease) -> Result<Option<Tree>> {
    let root = &rooted.root;
    match header_tree::find_build(root, release) {
        Ok(path) => return Ok(Some(Tree { path, ..rooted.clone() })),
        Err(TreeError::NoBuild(_)) => {}
        Err(error) => return Err(error.into()),
    }
    for directory in usual_directories(release) {
        let directory = Path::new("usr/src").join(directory);
        if let Some(path) = resolve(root, &directory)?.filter(|path| root.join(path).is_dir()) {
            return Ok(Some(Tree { path, ..rooted.clone() }));
        }
    }
    Ok(None)
}

/// Returns the link that `make modules_install` leaves and its target, for messages.
fn build_link(rooted: &Tree, release: &KernelRelease) -> Option<(String, String)> {
    ["lib", "usr/lib"].iter().find_map(|lib| {
        let link = format!("{lib}/modules/{release}/build");
        let target = fs::read_link(rooted.root.join(&link)).ok()?;
        Some((link, target.display().to_string()))
    })
}

/// Finds the source tree of a separate build directory, whose Makefile includes the source tree's.
fn find_source(staged: &Staged, build: &Tree) -> Result<Option<Tree>> {
    let Some(source_path) = included(&build.full_path().join("Makefile"))? else { return Ok(None) };
    let path = if source_path.is_absolute() { source_path.clone() } else { build.path.join(&source_path) };
    let exists =
        |tree: &Tree| tree.full_path().join("Makefile").is_file() && tree.full_path() != build.full_path();
    let candidates = std::iter::once(build).chain(&staged.rooted).collect::<Vec<_>>();
    for base in candidates {
        if let Some(path) = resolve(&base.root, &path)? {
            let found = Tree { path, ..base.clone() };
            if exists(&found) {
                return Ok(Some(found));
            }
        }
    }
    let mut others = staged.trees.iter().filter(|tree| *tree != build && !is_configured(tree));
    if let (Some(only), None) = (others.next(), others.next()) {
        return Ok(Some(only.clone()));
    }
    let (build, source_path) = (build.full_path(), source_path.display());
    let build = build.display();
    Err(FetchError::unusable(
        format!(
            "cannot use the build directory {build}: its source tree {source_path} is not among the sources"
        ),
        format!("add {source_path}, or an archive of it, as another source"),
    ))
}

/// Returns the source tree named by a build directory's Makefile: by `include <tree>/Makefile` (since Linux 4.20, and Debian's),
/// or by `MAKEARGS := -C <tree>` (before).
fn included(makefile: &Path) -> Result<Option<PathBuf>> {
    let text = read_start(makefile, MAX_STUB)?;
    Ok(text.and_then(|text| named_tree(&String::from_utf8_lossy(&text))))
}

fn named_tree(makefile: &str) -> Option<PathBuf> {
    makefile.lines().find_map(|line| {
        let by_include = line.strip_prefix("include ").and_then(|path| path.trim().strip_suffix("/Makefile"));
        let by_option = || line.strip_prefix("MAKEARGS := -C ").map(str::trim);
        // The kernel's own Makefile uses variables to include its parts.
        by_include.or_else(by_option).filter(|path| !path.contains('$')).map(PathBuf::from)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_directorys_makefile_names_its_sources() {
        let tree = |text: &str| named_tree(text).map(|path| path.display().to_string());
        assert_eq!(tree("# generated\ninclude /home/me/linux/Makefile\n").as_deref(), Some("/home/me/linux"));
        assert_eq!(tree("include ../../../linux-6.4.0/Makefile\n").as_deref(), Some("../../../linux-6.4.0"));
        assert_eq!(tree("VERSION = 4\nMAKEARGS := -C /src\nMAKEARGS += O=/obj\n").as_deref(), Some("/src"));
        assert_eq!(tree("include $(srctree)/scripts/Makefile\nVERSION = 6\n"), None);
    }
}
