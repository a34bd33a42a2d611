//! Selects the parts of a kernel's build tree that building a module needs.

use std::path::{Component, Path};

use farrier_core::{image::is_version_control, kernel::Architecture};

/// Objects that kernels link into external modules: powerpc's, and arm64's from Linux 4.15 to 5.2.
const LINKED_OBJECTS: [&str; 2] = ["crtsavres.o", "ftrace-mod.o"];
/// Programs in `tools/` that kbuild runs for modules.
const TOOLS: [&str; 2] = ["tools/objtool/objtool", "tools/bpf/resolve_btfids/resolve_btfids"];

/// Whether a path is never part of a header set: objects, kbuild's command records, the kernel itself, version-control data, and
/// signing keys.
pub(super) fn is_excluded(path: &Path) -> bool {
    if path.iter().any(is_version_control) {
        return true;
    }
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    if LINKED_OBJECTS.contains(&name) {
        return false;
    }
    let ends_with_any = |endings: &[&str]| endings.iter().any(|end| name.ends_with(end));
    ends_with_any(&[
        ".o", ".ko", ".ko.xz", ".ko.gz", ".ko.zst", ".a", ".cmd", ".mod", ".dwo", ".pem", ".key", ".priv",
    ]) || matches!(name, "vmlinux" | "vmlinuz" | "bzImage" | "Image")
        || name.starts_with(".tmp_")
}

/// Whether anything in this top-level directory of a whole build tree is needed.
pub(super) fn is_entered(directory: &str) -> bool {
    matches!(directory, "include" | "scripts" | "arch" | "tools")
}

/// Whether a part of a whole build tree is needed; `path` is relative to the tree. The selection follows the kernel's own header
/// packages (`scripts/package/builddeb`): `include/`, `scripts/`, the architecture's headers, Makefiles and linker scripts in
/// `arch/`, and the top-level files that record the kernel's configuration.
pub(super) fn is_needed(path: &Path, arch: Architecture) -> bool {
    let mut parts = path.components().filter_map(|part| match part {
        Component::Normal(part) => part.to_str(),
        _ => None,
    });
    let Some(name) = path.file_name().and_then(|name| name.to_str()) else { return false };
    let is_makefile = name.starts_with("Makefile") || name.starts_with("Kbuild");
    match (parts.next(), parts.next()) {
        (Some("include" | "scripts"), Some(_)) => true,
        (Some("arch"), Some(second)) if second == source_arch(arch) => {
            let below: Vec<&str> = parts.collect();
            let directories = below.get(..below.len().saturating_sub(1)).unwrap_or_default();
            is_makefile
                || name == "Platform"
                || path.extension().is_some_and(|extension| extension == "h" || extension == "lds")
                || LINKED_OBJECTS.contains(&name)
                || directories.iter().any(|part| matches!(*part, "include" | "scripts"))
        }
        (Some("tools"), Some(_)) => TOOLS.iter().any(|tool| path == Path::new(tool)),
        (Some(_), None) => {
            is_makefile
                || matches!(
                    name,
                    ".config" | "Module.symvers" | "System.map" | ".kernelvariables" | "localversion"
                )
        }
        _ => false,
    }
}

/// Returns the architecture's directory name in `arch/`.
fn source_arch(arch: Architecture) -> &'static str {
    match arch {
        Architecture::Amd64 => "x86",
        Architecture::Arm64 => "arm64",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_modules_inputs_are_taken_and_the_kernels_own_objects_are_not() {
        let taken = |path: &str| {
            let path = Path::new(path);
            !is_excluded(path) && is_needed(path, Architecture::Amd64)
        };
        for path in [
            "Makefile",
            ".config",
            "Module.symvers",
            "include/linux/module.h",
            "include/generated/utsrelease.h",
            "include/config/auto.conf",
            "scripts/mod/modpost",
            "scripts/module.lds",
            "arch/x86/Makefile",
            "arch/x86/Makefile_32.cpu",
            "arch/x86/include/generated/asm/errno.h",
            "arch/x86/include/asm/Kbuild",
            "arch/x86/kernel/module.lds",
            "tools/objtool/objtool",
        ] {
            assert!(taken(path), "{path}");
        }
        for path in [
            "vmlinux",
            ".git/config",
            "include/.svn/entries",
            "certs/signing_key.pem",
            "scripts/mod/modpost.o",
            "scripts/mod/.modpost.cmd",
            "arch/arm64/include/asm/page.h",
            "arch/x86/boot/bzImage",
            "arch/x86/kernel/head_64.S",
            "drivers/net/dummy.c",
            "drivers/net/dummy.ko",
            "kernel/module.c",
            "tools/perf/perf.c",
            "Documentation/index.rst",
        ] {
            assert!(!taken(path), "{path}");
        }
        assert!(is_needed(Path::new("arch/arm64/kernel/ftrace-mod.o"), Architecture::Arm64));
    }
}
