//! Checks the programs of a header set: kbuild runs them for every module, on the build machine.

use std::path::{Path, PathBuf};

use farrier_core::kernel::Architecture;
use farrier_local::archive::links::resolve;
use fs_err as fs;
use kmod::KernelConfig;

use crate::{FetchError, Result, files::describe_unless_native};

/// Refuses a header set whose programs are missing or built for an architecture other than the kernel's. Modules are built on the
/// kernel's architecture.
pub(super) fn check(root: &Path, build: &Path, config: &KernelConfig, arch: Architecture) -> Result<()> {
    let is_set = |names: &[&str]| names.iter().any(|name| config.is_set(name));
    let tools = [
        ("scripts/basic/fixdep", true),
        ("scripts/mod/modpost", true),
        ("scripts/genksyms/genksyms", is_set(&["MODVERSIONS"]) && !is_set(&["GENDWARFKSYMS"])),
        ("scripts/gendwarfksyms/gendwarfksyms", is_set(&["GENDWARFKSYMS"])),
        ("scripts/recordmcount", is_set(&["FTRACE_MCOUNT_USE_RECORDMCOUNT"])),
        ("tools/objtool/objtool", is_set(&["OBJTOOL", "STACK_VALIDATION"])),
    ];
    for (tool, _) in tools.into_iter().filter(|(_, is_needed)| *is_needed) {
        let path = resolve(root, &build.join(tool))?.filter(|path| root.join(path).is_file());
        let Some(path) = path else { return Err(missing(root, &build.join(tool), tool)) };
        if let Some(found) = describe_unless_native(&root.join(path), arch)? {
            return Err(FetchError::unusable(
                format!("cannot run {tool} of the header set on {arch}: it is {found}"),
                format!(
                    "build it on a machine of this architecture: `make modules_prepare` (or `make \
                     scripts`) on {arch}, then import again"
                ),
            ));
        }
    }
    // Since 5.10, modules_prepare generates the linker script of modules.
    let is_generated = resolve(root, &build.join("scripts/module.lds.S"))?.is_some();
    if is_generated && resolve(root, &build.join("scripts/module.lds"))?.is_none() {
        return Err(missing(root, &build.join("scripts/module.lds"), "scripts/module.lds"));
    }
    Ok(())
}

fn missing(root: &Path, path: &Path, tool: &str) -> FetchError {
    if let Some((link, target)) = broken_link(root, path) {
        let (link, target) = (link.display(), target.display());
        return FetchError::unusable(
            format!("cannot find {tool} in the header set: /{link} points to {target}, which does not exist"),
            "install the package that contains it (Debian: linux-kbuild-*), or name it as a further \
             source; a Job that collects headers sees only the directories of the node that it mounts \
             (Helm: headers.collect.hostPaths)",
        );
    }
    FetchError::unusable(
        format!("cannot find {tool} in the header set: kbuild runs it for every module"),
        "run `make modules_prepare` in the build tree, with the kernel's own .config, and import again",
    )
}

/// Returns the first dangling link on the path to a file, and its target.
fn broken_link(root: &Path, file: &Path) -> Option<(PathBuf, PathBuf)> {
    let mut parents: Vec<&Path> = file.ancestors().filter(|path| !path.as_os_str().is_empty()).collect();
    parents.reverse();
    parents.into_iter().find_map(|path| {
        let target = fs::read_link(root.join(path)).ok()?;
        matches!(resolve(root, path), Ok(None)).then(|| (path.to_owned(), target))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_to_a_directory_that_was_not_taken_along_is_named() {
        let root = tempfile::tempdir().unwrap();
        let build = Path::new("usr/src/linux-headers-6.1.0-47-amd64");
        fs::create_dir_all(root.path().join(build)).unwrap();
        let target = "../../lib/linux-kbuild-6.1/scripts";
        fs_err::os::unix::fs::symlink(target, root.path().join(build).join("scripts")).unwrap();
        let said =
            || missing(root.path(), &build.join("scripts/basic/fixdep"), "scripts/basic/fixdep").to_string();
        insta::assert_snapshot!(said(), @"cannot find scripts/basic/fixdep in the header set: /usr/src/linux-headers-6.1.0-47-amd64/scripts points to ../../lib/linux-kbuild-6.1/scripts, which does not exist");
        fs::create_dir_all(root.path().join("usr/lib/linux-kbuild-6.1/scripts")).unwrap();
        insta::assert_snapshot!(said(), @"cannot find scripts/basic/fixdep in the header set: kbuild runs it for every module");
    }
}
