//! The programs of a header set: kbuild runs them for every module, on the machine that builds.

use std::{fs::File, io::Read, path::Path};

use super::ImportError;
use crate::{
    headers::{FetchError, io_error, tree},
    kernel::Architecture,
    kmod::KernelConfig,
};

/// `EM_X86_64` and `EM_AARCH64` of the ELF specification.
const MACHINES: [(u16, Architecture); 2] = [(62, Architecture::Amd64), (183, Architecture::Arm64)];

/// Refuses a set whose programs are missing or for another architecture than the kernel's, on which modules are built.
pub(super) fn check(
    root: &Path,
    build: &Path,
    config: &KernelConfig,
    arch: Architecture,
) -> Result<(), FetchError> {
    let set = |names: &[&str]| names.iter().any(|name| config.is_set(name));
    let wanted = [
        ("scripts/basic/fixdep", true),
        ("scripts/mod/modpost", true),
        ("scripts/genksyms/genksyms", set(&["MODVERSIONS"]) && !set(&["GENDWARFKSYMS"])),
        ("scripts/gendwarfksyms/gendwarfksyms", set(&["GENDWARFKSYMS"])),
        ("scripts/recordmcount", set(&["FTRACE_MCOUNT_USE_RECORDMCOUNT"])),
        ("tools/objtool/objtool", set(&["OBJTOOL", "STACK_VALIDATION"])),
    ];
    for (tool, _) in wanted.into_iter().filter(|(_, wanted)| *wanted) {
        let place = tree::resolve(root, &build.join(tool))?.filter(|place| root.join(place).is_file());
        let Some(place) = place else { return Err(ImportError::NoTool { tool }.into()) };
        if let Some(found) = other_than(&root.join(place), arch)? {
            return Err(ImportError::ToolKind { tool, found, wanted: arch }.into());
        }
    }
    // Since 5.10 the linker script of modules is made by modules_prepare.
    let made = tree::resolve(root, &build.join("scripts/module.lds.S"))?.is_some();
    if made && tree::resolve(root, &build.join("scripts/module.lds"))?.is_none() {
        return Err(ImportError::NoTool { tool: "scripts/module.lds" }.into());
    }
    Ok(())
}

/// What a file is, unless it is a program for this architecture.
fn other_than(path: &Path, arch: Architecture) -> Result<Option<String>, FetchError> {
    let mut head = Vec::with_capacity(20);
    let file = File::open(path).map_err(io_error("open", path))?;
    file.take(20).read_to_end(&mut head).map_err(io_error("read", path))?;
    // Class 2 is 64 bits, data 1 little-endian.
    let machine = match head.as_slice() {
        [0x7f, b'E', b'L', b'F', 2, 1, .., low, high] if head.len() == 20 => {
            u16::from_le_bytes([*low, *high])
        }
        [0x7f, b'E', b'L', b'F', ..] => {
            return Ok(Some("a program for a 32-bit or big-endian machine".to_owned()));
        }
        _ => return Ok(Some("no ELF program".to_owned())),
    };
    Ok(match MACHINES.iter().find(|(number, _)| *number == machine) {
        Some((_, found)) if *found == arch => None,
        Some((_, found)) => Some(format!("a program for {found}")),
        None => Some(format!("a program for another machine (ELF number {machine})")),
    })
}
