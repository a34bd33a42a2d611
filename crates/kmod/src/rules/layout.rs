//! Pure: the sections of the module must be such that the kernel can load and link them (`layout_and_allocate`,
//! `percpu_modalloc` and `apply_relocations` in `kernel/module/main.c`).

use super::Subject;
use crate::{Architecture, Finding, RelocationProblem, Rule, Verdict};

const COMPILE_WITH_KBUILD: &str =
    "compile it with the kernel's own makefiles, which set the code model and link with module.lds";

/// Sections of arm64 whose flags and contents the kernel sets (`module_frob_arch_sections`).
const ARM64_SECTIONS: [&str; 4] =
    [".plt", ".init.plt", ".text.ftrace_trampoline", ".init.text.ftrace_trampoline"];

/// Checks that an arm64 module has the sections for jumps over more than 128 MiB (`module_frob_arch_sections` in
/// `arch/arm64/kernel/module-plts.c`). The file is always compiled since Linux 6.5.
pub(super) fn plts(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let requires = kernel.since(6, 5) || kernel.config.is_set("ARM64_MODULE_PLTS");
    let (module, arm64) = (subject.module, Architecture::Arm64);
    if (kernel.arch, module.arch) == (arm64, arm64) && requires && !module.layout.has_plts {
        let message = "module PLT section(s) missing: arm64 modules need .plt and .init.plt";
        findings.push(Finding::new(Rule::Elf, Verdict::Refused, ".plt", message, COMPILE_WITH_KBUILD));
    }
}

/// Checks that no section is writable and executable (`module_enforce_rwx_sections` in `kernel/module/strict_rwx.c`, Linux
/// 5.8).
pub(super) fn writable_code(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    if !kernel.config.is_set("STRICT_MODULE_RWX") || !kernel.since(5, 8) {
        return;
    }
    // The kernel sets the flags of these itself.
    let is_own =
        |section: &&String| kernel.arch == Architecture::Arm64 && ARM64_SECTIONS.contains(&section.as_str());
    findings.extend(subject.module.layout.writable_code.iter().filter(|section| !is_own(section)).map(
        |section| {
            let message = format!("section {section} has invalid WRITE|EXEC flags");
            let remedy = "put code and data into different sections";
            Finding::new(Rule::Elf, Verdict::Refused, section, message, remedy)
        },
    ));
}

/// Checks that the per-CPU variables fit into the memory that the kernel reserves for those of all modules
/// (`PERCPU_MODULE_RESERVE` in `include/linux/percpu.h`).
pub(super) fn per_cpu(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let size = subject.module.layout.per_cpu_size;
    // Without SMP the kernel treats the section as any other.
    if !kernel.config.is_set("SMP") {
        return;
    }
    // Kernels that profile allocations had a larger reserve from Linux 6.10 on, from which one module could take 32 KiB.
    let is_larger = kernel.config.is_set("MEM_ALLOC_PROFILING") && kernel.since(6, 10) && !kernel.since(7, 2);
    let reserve: u64 = if is_larger { 32 << 10 } else { 8 << 10 };
    let finding = |verdict, message: String| {
        let remedy = "allocate the variables with alloc_percpu when the module starts";
        let finding = Finding::new(Rule::PerCpu, verdict, ".data..percpu", message, remedy);
        finding.found(format!("{size} bytes"))
    };
    if size > reserve {
        let message = format!(
            "Could not allocate {size} bytes percpu data: the kernel reserves {reserve} for all modules"
        );
        findings.push(finding(Verdict::Refused, message));
    } else if size > reserve / 2 {
        let message = format!("takes most of the {reserve} bytes of per-CPU data that all modules share");
        findings.push(finding(Verdict::Loads, message));
    }
}

/// Checks that the kernel can apply all relocations.
pub(super) fn relocations(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (module, kernel) = (subject.module, subject.kernel);
    // `object::machine` reports another processor.
    let Some(bad) = module.layout.bad_relocation.as_ref().filter(|_| module.arch == kernel.arch) else {
        return;
    };
    let kind = bad.kind;
    let (verdict, message) = match bad.problem {
        RelocationProblem::Unsupported => {
            (Verdict::Refused, format!("the loader does not support relocations of type {kind}"))
        }
        RelocationProblem::WithoutAddends => {
            (Verdict::Refused, "the loader does not support relocations without addends (SHT_REL)".to_owned())
        }
        RelocationProblem::TargetNotZero => (
            Verdict::Refused,
            format!("invalid relocation target, existing value is nonzero for type {kind}"),
        ),
        RelocationProblem::Overflow => (
            Verdict::Refused,
            format!("overflow in relocation type {kind}: likely not compiled with -mcmodel=kernel"),
        ),
        RelocationProblem::OutsideSection => (
            Verdict::Unknown,
            format!(
                "a relocation of type {kind} lies outside of its section, and the loader does not check that"
            ),
        ),
    };
    let place = format!("{}+{:#x}", bad.section, bad.offset);
    findings.push(Finding::new(Rule::Relocation, verdict, place, message, COMPILE_WITH_KBUILD));
}

/// Checks that no two loaded sections have one name (`add_sect_attrs` in `kernel/module/sysfs.c`, which makes a file of each
/// name). Linux 6.12 refuses the module, and earlier versions warn.
pub(super) fn repeated(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let is_refused = kernel.since(6, 12) && kernel.config.is_set("KALLSYMS") && kernel.config.is_set("SYSFS");
    // `object::sections` reports these.
    let others = subject
        .module
        .layout
        .repeated
        .iter()
        .filter(|name| !subject.module.repeated.contains(&name.as_str()));
    findings.extend(others.filter(|_| is_refused).map(|section| {
        let message = format!(
            "the module has more than one section {section}: the kernel cannot make a file of each (EEXIST)"
        );
        Finding::new(Rule::Elf, Verdict::Refused, section, message, COMPILE_WITH_KBUILD)
    }));
}

/// Checks that the exports have flags (`check_export_symbol_sections`, Linux 7.2).
pub(super) fn export_flags(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let tables = &subject.module.layout.exports;
    if subject.kernel.since(7, 2) && tables.plain.0 > 0 && !tables.has_flags {
        let (message, remedy) =
            ("no flags for exported symbols", "rebuild it against the header set of this kernel");
        findings.push(Finding::new(Rule::Elf, Verdict::Refused, "__kflagstab", message, remedy));
    }
}
