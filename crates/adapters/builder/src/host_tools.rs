//! Checks that the toolchain can run the header set's host tools. kbuild runs these programs for every module. In a
//! self-built kernel they need the C library of the machine that built them. The check fails before anything is
//! compiled.

use std::path::{Path, PathBuf};

use farrier_core::kernel::Architecture;
use farrier_inputs::{HeaderSet, find_build};
use farrier_local::{archive::links::resolve, blocking::blocking};
use fs_err as fs;

use super::cell_build::CellBuild;
use crate::services::{BuildError, ProblemKind, Result};

/// Host tools in every build tree. The other host tools of a tree were built on the same machine.
const TOOLS: [&str; 3] = ["scripts/basic/fixdep", "scripts/mod/modpost", "tools/objtool/objtool"];

/// Size limit in bytes for a program to inspect; a C library has about two million.
const MAX_BYTES: u64 = 64 << 20;

/// Rejects header tools that need a newer glibc than the toolchain has. Without glibc information, the build proceeds.
pub(super) async fn check(build: &CellBuild<'_>, headers: &HeaderSet, toolchain: &Path) -> Result<()> {
    let (arch, root, toolchain) = (build.cell.target.arch, headers.root.clone(), toolchain.to_owned());
    let Ok(build_dir) = find_build(&root, &build.cell.target.release) else { return Ok(()) };
    let Some((tool, needs, has)) = blocking(move || newer_tool(&root, &build_dir, &toolchain, arch)).await?
    else {
        return Ok(());
    };
    let message = format!(
        "{tool} of the header set needs glibc 2.{needs}, but the toolchain of family {} has 2.{has}",
        build.family.metadata.name
    );
    let hint = "build the tree's tools on a system that is as old as the toolchain (`make modules_prepare` there), and import the \
                headers again; or copy the family into your definitions' kernels/, with a newer suite or an image as its toolchain";
    Err(BuildError::problem(ProblemKind::Compile, message, Some(hint.to_owned())))
}

/// Returns the first tool that needs a newer glibc, with the required and the available version (`x` of `2.x`).
fn newer_tool(
    headers: &Path,
    build_dir: &Path,
    toolchain: &Path,
    arch: Architecture,
) -> std::io::Result<Option<(&'static str, u32, u32)>> {
    let debian = format!("{}-linux-gnu", arch.gnu_name());
    let library_dirs =
        [format!("usr/lib/{debian}"), format!("lib/{debian}"), "usr/lib64".to_owned(), "lib64".to_owned()];
    let mut has = None;
    for dir in library_dirs {
        has = has.max(newest_glibc(toolchain, &PathBuf::from(dir).join("libc.so.6"))?);
    }
    let Some(has) = has else { return Ok(None) };
    for tool in TOOLS {
        if let Some(needs) = newest_glibc(headers, &build_dir.join(tool))?.filter(|needs| *needs > has) {
            return Ok(Some((tool, needs, has)));
        }
    }
    Ok(None)
}

/// Returns the newest glibc symbol version that a program requires or a library provides. The version names are in the
/// file, each followed by a zero byte. A release without new symbols has no name, and nothing requires it.
fn newest_glibc(root: &Path, file: &Path) -> std::io::Result<Option<u32>> {
    let Some(path) = resolve(root, file)?.map(|path| root.join(path)).filter(|path| path.is_file()) else {
        return Ok(None);
    };
    if fs::metadata(&path)?.len() > MAX_BYTES {
        return Ok(None);
    }
    let bytes = fs::read(path)?;
    let names = bytes.split(|byte| *byte == 0).filter_map(|text| text.strip_prefix(b"GLIBC_2."));
    let minor = |name: &[u8]| std::str::from_utf8(name).ok()?.split('.').next()?.parse().ok();
    Ok(names.filter_map(minor).max())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tools_of_a_newer_system_are_found() {
        let dir = tempfile::tempdir().unwrap();
        let (headers, toolchain) = (dir.path().join("headers"), dir.path().join("toolchain"));
        let build_dir = Path::new("usr/src/linux");
        let write = |place: PathBuf, names: &str| {
            fs::create_dir_all(place.parent().unwrap()).unwrap();
            fs::write(place, format!("\x7fELF\0{names}\0")).unwrap();
        };
        let found = || newer_tool(&headers, build_dir, &toolchain, Architecture::Amd64).unwrap();
        write(headers.join(build_dir).join(TOOLS[0]), "GLIBC_2.2.5\0GLIBC_2.34");
        write(headers.join(build_dir).join(TOOLS[1]), "GLIBC_2.38\0GLIBC_PRIVATE\0glibc GLIBC_2.99");
        assert_eq!(found(), None, "a toolchain without glibc");
        write(toolchain.join("usr/lib/x86_64-linux-gnu/libc.so.6"), "GLIBC_2.2.5\0GLIBC_2.36\0GLIBC_2.4");
        assert_eq!(found(), Some((TOOLS[1], 38, 36)));
        write(toolchain.join("usr/lib/x86_64-linux-gnu/libc.so.6"), "GLIBC_2.38");
        assert_eq!(found(), None);
    }
}
