//! Pure: the module's `struct module` is as large as the kernel's (`elf_validity_check` in `kernel/module/main.c`).
//!
//! Linux compares the sizes since 6.4 (commit f3b93547b91a). Before, it takes any, and reads a structure of another
//! layout. Where no source tells the kernel's size, the version of `module_layout` speaks for it: `struct module`
//! is in its signature, so it cannot be the same while the structure differs.

use super::Subject;
use crate::{Finding, Rule, Verdict};

/// The section, which is also what the kernel's own message names.
const SECTION: &str = ".gnu.linkonce.this_module";

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let size = subject.module.this_module_size;
    let bytes = |size: u64| format!("{size} bytes");
    let finding = |verdict, message, wanted, remedy| Finding {
        rule: Rule::ModuleSize,
        verdict,
        subject: SECTION.to_owned(),
        message,
        found: Some(bytes(size)),
        wanted,
        remedy,
    };
    let rebuild = format!("rebuild it against the header set of {}, with its configuration", kernel.release);
    match &kernel.beyond_headers.module_size {
        Some(known) if known.value == size => {}
        Some(known) => {
            let (verdict, consequence) = if kernel.since(6, 4) {
                (Verdict::Refused, "")
            } else {
                (Verdict::Unknown, "; before Linux 6.4 the kernel does not compare, and reads it wrongly")
            };
            let message = format!(
                "struct module has another size than the kernel's, says {}{consequence}",
                known.source
            );
            findings.push(finding(verdict, message, Some(bytes(known.value)), rebuild));
        }
        None if layout_has_a_version(subject) => {}
        None => findings.push(finding(
            Verdict::Unknown,
            "no source tells the size of the kernel's struct module, and no symbol version speaks for it"
                .to_owned(),
            None,
            format!("give the kernel image of {}, or one of its own modules, or boot it", kernel.release),
        )),
    }
}

/// Is the version of `module_layout` compared? Whether it is the same, the rule for versions says.
fn layout_has_a_version(subject: &Subject<'_>) -> bool {
    let name = "module_layout";
    let kernel = subject.kernel;
    kernel.config.is_set("MODVERSIONS")
        && kernel.symbols.as_ref().is_some_and(|table| table.get(name).is_some_and(|symbol| symbol.crc != 0))
        && subject.module.versions.as_ref().is_some_and(|versions| versions.contains_key(name))
}
