//! The programs of a header set: kbuild runs them for every module, on the machine that builds.

use std::{io::Read, path::Path};

use fs_err::File;

use crate::{archive::links::resolve, inputs::FetchError, kernel::Architecture, kmod::KernelConfig};

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
        let place = resolve(root, &build.join(tool))?.filter(|place| root.join(place).is_file());
        let Some(place) = place else { return Err(missing(tool)) };
        if let Some(found) = other_than(&root.join(place), arch)? {
            return Err(FetchError::unusable(
                format!("run {tool} of the header set on {arch}: it is {found}"),
                format!(
                    "make it on a machine of this architecture: `make modules_prepare` (or `make scripts`) on {arch}, then \
                     import again"
                ),
            ));
        }
    }
    // Since 5.10 the linker script of modules is made by modules_prepare.
    let made = resolve(root, &build.join("scripts/module.lds.S"))?.is_some();
    if made && resolve(root, &build.join("scripts/module.lds"))?.is_none() {
        return Err(missing("scripts/module.lds"));
    }
    Ok(())
}

fn missing(tool: &str) -> FetchError {
    FetchError::unusable(
        format!("find {tool} in the header set: kbuild runs it for every module"),
        "run `make modules_prepare` in the build tree, with the kernel's own .config, and import again",
    )
}

/// What a file is, unless it is a program for this architecture.
fn other_than(path: &Path, arch: Architecture) -> Result<Option<String>, FetchError> {
    let mut head = Vec::with_capacity(20);
    File::open(path)?.take(20).read_to_end(&mut head)?;
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
