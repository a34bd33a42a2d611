//! The object must suit the kernel: its processor, its sections, and the size of its `struct module`.

use super::Subject;
use crate::{Finding, Rule, Verdict};

/// Name of the section with `struct module`; the kernel's own message also names the section.
const THIS_MODULE: &str = ".gnu.linkonce.this_module";

/// Checks that the module is for the kernel's processor (`elf_check_arch`).
pub(super) fn machine(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (module, kernel) = (subject.module.arch, subject.kernel.arch);
    if module != kernel {
        let (message, remedy) = ("the object is for another processor", format!("build it for {kernel}"));
        let finding = Finding::new(Rule::Elf, Verdict::Refused, "machine", message, remedy);
        let finding = finding.with_kernel_message("ENOEXEC", "Invalid architecture in ELF header");
        findings.push(finding.found(module.gnu_name()).wanted(kernel.gnu_name()));
    }
}

/// Checks that `.modinfo` and `.gnu.linkonce.this_module` occur only once. Since 6.4 Linux refuses duplicates (commit
/// f3b93547b91a, "module: add sanity check for ELF module section"). Earlier versions use the first loaded section, as the parser
/// does.
pub(super) fn sections(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let verdict = if subject.kernel.checks_section_sanity() { Verdict::Refused } else { Verdict::Loads };
    findings.extend(subject.module.duplicate_sections.iter().map(|section| {
        let message = format!("the module has more than one section {section}");
        let remedy = "link it with the kernel's own makefiles, which merge such sections";
        Finding::new(Rule::Elf, verdict, *section, message, remedy).wanted("one")
    }));
    if subject.module.layout.has_unloaded_info && !subject.kernel.checks_section_sanity() {
        let is_forced = subject.kernel.config.is_set("MODULE_FORCE_LOAD");
        let verdict = if is_forced { Verdict::Unknown } else { Verdict::Refused };
        let message = "section .modinfo is not loaded, and the kernel finds no fields such as vermagic";
        let remedy = "rebuild it: the file is damaged";
        findings.push(Finding::new(Rule::Vermagic, verdict, ".modinfo", message, remedy));
    }
}

/// Checks that the module's `struct module` has the size of the kernel's (`elf_validity_check` in
/// `kernel/module/main.c`).
///
/// Linux compares the sizes since 6.4 (commit f3b93547b91a). Earlier versions accept any size, and misread a structure
/// with another layout. If no source reveals the kernel's size, the version of `module_layout` decides. `struct module`
/// is part of that symbol's signature, so the version differs if the structure differs.
pub(super) fn module_size(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let bytes = |size: u64| format!("{size} bytes");
    let size = subject.module.this_module_size;
    let finding = |verdict, message: String, remedy| {
        Finding::new(Rule::ModuleSize, verdict, THIS_MODULE, message, remedy).found(bytes(size))
    };
    match &kernel.beyond_headers.module_size {
        Some(known) if known.value == size => {}
        // Before Linux 6.4, the kernel uses the begin of a longer section. The version says that the structure is the kernel's.
        Some(known)
            if size > known.value && !kernel.checks_section_sanity() && compares_layout_version(subject) => {}
        Some(known) => {
            let (verdict, consequence) = if kernel.checks_section_sanity() {
                (Verdict::Refused, "")
            } else {
                (
                    Verdict::Unknown,
                    "; before Linux 6.4 the kernel does not compare the sizes, and misreads the structure",
                )
            };
            let source = &known.source;
            let message = format!(
                "struct module differs in size from the kernel's, according to {source}{consequence}"
            );
            let kernel_message = format!(
                "{THIS_MODULE} section size must match the kernel's built struct module size at run time"
            );
            let finding = finding(verdict, message, subject.rebuild_remedy()).wanted(bytes(known.value));
            let is_refused = verdict == Verdict::Refused;
            findings.push(if is_refused {
                finding.with_kernel_message("ENOEXEC", kernel_message)
            } else {
                finding
            });
        }
        None if compares_layout_version(subject) => {}
        None => findings.push(finding(
            Verdict::Unknown,
            "no source has the size of the kernel's struct module, and no symbol version covers it"
                .to_owned(),
            format!(
                "provide the kernel image of {}, or one of that kernel's own modules, or boot the kernel",
                kernel.release
            ),
        )),
    }
}

/// Whether the kernel compares the version of `module_layout`. The rule for symbol versions makes the comparison.
fn compares_layout_version(subject: &Subject<'_>) -> bool {
    let name = "module_layout";
    let kernel = subject.kernel;
    kernel.config.is_set("MODVERSIONS")
        && kernel.symbols.as_ref().is_some_and(|table| table.get(name).is_some_and(|symbol| symbol.crc != 0))
        && subject.module.versions_for(kernel).is_some_and(|versions| versions.contains_key(name))
}
