//! Checks all modules that belong to a kernel. The kernel loads each of them, so every other verdict is a fault of the check.

use std::path::Path;

use kmod::Verdict;

use crate::{
    Result, check_module, fail,
    kernel::{Kernel, read_module_file},
};

/// Checks the kernel's own modules, each alone, and prints those that the check does not expect to load. Returns whether there
/// are none.
pub fn all_load(root: &Path) -> Result<bool> {
    let kernel = Kernel::read(root)?;
    let release = &kernel.facts.release;
    let files = kernel.module_files()?;
    if files.is_empty() {
        return Err(fail("the kernel has no modules"));
    }
    let (mut refused, mut unknown) = (0, 0);
    for file in &files {
        let report = check_module(&kernel.facts, &read_module_file(file)?);
        match report.verdict {
            Verdict::Loads => continue,
            Verdict::Refused => refused += 1,
            Verdict::Unknown => unknown += 1,
        }
        println!("{release}: {}: {}", file.display(), report.summary());
    }
    println!("{release}: {} modules, {refused} refused, {unknown} unknown", files.len());
    Ok(refused + unknown == 0)
}
