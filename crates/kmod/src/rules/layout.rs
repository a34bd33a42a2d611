//! The kernel must be able to load and link the sections of the module (`layout_and_allocate`, `percpu_modalloc` and
//! `apply_relocations` in `kernel/module/main.c`).

use super::Subject;
use crate::{
    Architecture, BadRelocation, Finding, KernelFacts, RelocationProblem, Rule, StringTableError, Verdict,
};

const COMPILE_WITH_KBUILD: &str =
    "compile it with the kernel's own makefiles, which set the code model and link with module.lds";

/// Number of bytes at the end of the per-CPU reserve that arm64 kernels may lose to alignment.
const MAX_ALIGNMENT_LOSS: u64 = 64;
/// Sections that arm64 requires, and whose flags and contents the kernel sets (`module_frob_arch_sections`).
pub(crate) const ARM64_SECTIONS: [&str; 4] =
    [".plt", ".init.plt", ".text.ftrace_trampoline", ".init.text.ftrace_trampoline"];

/// Checks that an arm64 module has the sections for jumps beyond 128 MiB (`module_frob_arch_sections` in
/// `arch/arm64/kernel/module-plts.c`, which is always compiled since Linux 6.5).
pub(super) fn plts(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let requires_plts =
        kernel.since(6, 5) || kernel.is_rhel_9_since(427) || kernel.config.is_set("ARM64_MODULE_PLTS");
    let (module, arm64) = (subject.module, Architecture::Arm64);
    if (kernel.arch, module.arch) != (arm64, arm64) || !requires_plts {
        return;
    }
    let missing = |section: &str, message: &str| {
        Finding::new(Rule::Elf, Verdict::Refused, section, message, COMPILE_WITH_KBUILD)
    };
    if module.layout.targets_beyond_file > Verdict::Loads {
        let message = "a relocation section belongs to a section beyond the file, and the loader reads on";
        let remedy = "rebuild it: the file is damaged";
        findings.push(Finding::new(Rule::Elf, module.layout.targets_beyond_file, "sh_info", message, remedy));
    }
    let [plt, init_plt, trampoline, init_trampoline] = ARM64_SECTIONS;
    let has = |section| module.layout.arm64_sections.contains(&section);
    if !has(plt) || !has(init_plt) {
        let kernel_message = "module PLT section(s) missing";
        let finding = missing(plt, &format!("{kernel_message}: arm64 modules need .plt and .init.plt"));
        findings.push(finding.with_kernel_message("ENOEXEC", kernel_message));
    }
    // `module_init_ftrace_plt`. Linux 6.18 and its backports also require the second section.
    if kernel.config.is_set("DYNAMIC_FTRACE") && kernel.since(5, 10) {
        let init_section = kernel.has_checks_of_6_18().then_some(init_trampoline);
        for section in [trampoline].into_iter().chain(init_section).filter(|section| !has(section)) {
            findings.push(missing(
                section,
                "the section for trampolines of the function tracer (ftrace) is missing",
            ));
        }
    }
}

/// Checks that no section is writable and executable (`module_enforce_rwx_sections` in `kernel/module/strict_rwx.c`, Linux
/// 5.8).
pub(super) fn writable_executable(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    if !kernel.config.is_set("STRICT_MODULE_RWX") || !kernel.since(5, 8) {
        return;
    }
    for section in &subject.module.layout.writable_executable {
        // The kernel itself sets the flags of these sections.
        if kernel.arch == Architecture::Arm64 && ARM64_SECTIONS.contains(&section.as_str()) {
            continue;
        }
        let message = format!("section {section} has invalid WRITE|EXEC flags");
        let remedy = "put code and data into different sections";
        let finding = Finding::new(Rule::Elf, Verdict::Refused, section, &message, remedy);
        findings.push(finding.with_kernel_message("ENOEXEC", &message));
    }
}

/// Checks that the per-CPU variables fit into the memory that the kernel reserves for all modules (`PERCPU_MODULE_RESERVE` in
/// `include/linux/percpu.h`).
pub(super) fn per_cpu(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let size = subject.module.layout.per_cpu_size;
    // Without SMP the kernel treats the section as any other.
    if !kernel.config.is_set("SMP") {
        return;
    }
    let reserve = per_cpu_reserve(kernel);
    let finding = |verdict, message: String| {
        let remedy = "allocate the variables with alloc_percpu when the module starts";
        let finding = Finding::new(Rule::PerCpu, verdict, ".data..percpu", message, remedy);
        finding.found(format!("{size} bytes"))
    };
    if size > 0 && subject.module.layout.misaligned.iter().any(|name| name == ".data..percpu") {
        findings.push(finding(Verdict::Refused, "illegal size or align for percpu allocation".to_owned()));
    }
    if size > reserve {
        let message = format!(
            "Could not allocate {size} bytes percpu data: the kernel reserves {reserve} for all modules"
        );
        let kernel_message = format!("Could not allocate {size} bytes percpu data");
        findings.push(finding(Verdict::Refused, message).with_kernel_message("ENOMEM", kernel_message));
    } else if size > reserve - MAX_ALIGNMENT_LOSS && kernel.arch == Architecture::Arm64 {
        let message =
            format!("takes all of the {reserve} bytes of per-CPU data, whose start may not be aligned");
        findings.push(finding(Verdict::Unknown, message));
    } else if size > reserve / 2 {
        let message = format!("takes most of the {reserve} bytes of per-CPU data that all modules share");
        findings.push(finding(Verdict::Loads, message));
    }
}

/// Returns the size in bytes of the reserve from which all modules take their per-CPU variables: the most that one module can have.
/// With MEM_ALLOC_PROFILING, one module could have 32 KiB from Linux 6.10 to 6.15, or 64 KiB with pages of that size.
fn per_cpu_reserve(kernel: &KernelFacts) -> u64 {
    let has_larger_reserve =
        kernel.config.is_set("MEM_ALLOC_PROFILING") && kernel.since(6, 10) && !kernel.since(6, 16);
    match has_larger_reserve {
        true if kernel.config.is_set("ARM64_64K_PAGES") => 64 << 10,
        true => 32 << 10,
        false => 8 << 10,
    }
}

/// Checks that the kernel can apply all relocations.
pub(super) fn relocations(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (module, kernel) = (subject.module, subject.kernel);
    // `object::machine` reports a module for another architecture.
    let Some(bad) = module.layout.bad_relocation.as_ref().filter(|_| module.arch == kernel.arch) else {
        return;
    };
    // Before Linux 6.16 the loader skips the relocations of this section. The relocations after the first bad one are unknown.
    let is_skipped = bad.section == ".data..percpu" && !kernel.since(6, 16);
    let (kernel_message, message) = if is_skipped {
        (None, format!("per-CPU variables have a relocation of type {} that the loader skips", bad.kind))
    } else {
        relocation_messages(kernel.arch, bad)
    };
    let location = format!("{}+{:#x}", bad.section, bad.offset);
    let faults = !is_skipped && bad.problem == RelocationProblem::DistantSymbol;
    let verdict = if faults || kernel_message.is_some() { Verdict::Refused } else { Verdict::Unknown };
    let finding = Finding::new(Rule::Relocation, verdict, location, message, COMPILE_WITH_KBUILD);
    findings.push(match kernel_message {
        Some(text) => finding.with_kernel_message("ENOEXEC", text),
        None => finding,
    });
}

/// Returns two messages about a relocation: the kernel's, if the kernel refuses the relocation, and that of the finding.
fn relocation_messages(arch: Architecture, bad: &BadRelocation) -> (Option<String>, String) {
    let kind = bad.kind;
    match bad.problem {
        RelocationProblem::NotLoaded => (
            None,
            format!(
                "a relocation of type {kind}, which the kernel follows, refers to a section that the loader drops"
            ),
        ),
        RelocationProblem::NoSymbol => (
            None,
            format!(
                "a relocation of type {kind} refers to a symbol that does not exist, and the loader does not check that"
            ),
        ),
        RelocationProblem::NoStaticCall => {
            (None, "a static call refers to a kernel symbol that is no static call".to_owned())
        }
        RelocationProblem::MayOverflow => {
            (None, format!("the distance may be too long for a relocation of type {kind}"))
        }
        RelocationProblem::DistantSymbol => (
            None,
            format!("a relocation of type {kind} refers to a symbol far beyond the table: the loader faults"),
        ),
        RelocationProblem::Misplaced => (
            None,
            "the relocations of this section are missing, are incomplete, or belong to another section"
                .to_owned(),
        ),
        RelocationProblem::Unsupported => {
            let kernel_message = match arch {
                Architecture::Amd64 => format!("Unknown rela relocation: {kind}"),
                Architecture::Arm64 => format!("unsupported RELA relocation: {kind}"),
            };
            (Some(kernel_message), format!("the loader does not support relocations of type {kind}"))
        }
        RelocationProblem::WithoutAddends => (
            Some("REL relocation unsupported".to_owned()),
            "the loader does not support relocations without addends (SHT_REL)".to_owned(),
        ),
        RelocationProblem::TargetNotZero => (
            Some(format!("Invalid relocation target, existing value is nonzero for type {kind}")),
            format!("invalid relocation target, existing value is nonzero for type {kind}"),
        ),
        RelocationProblem::Overflow => {
            let kernel_message = format!("overflow in relocation type {kind}");
            let message = match arch {
                Architecture::Amd64 => format!("{kernel_message}: likely not compiled with -mcmodel=kernel"),
                Architecture::Arm64 => format!("{kernel_message}: the address is too far away or too long"),
            };
            (Some(kernel_message), message)
        }
        RelocationProblem::Overlap => {
            (None, format!("a relocation of type {kind} changes bytes that the loader has changed before"))
        }
        RelocationProblem::OutsideSection => (
            None,
            format!(
                "a relocation of type {kind} lies outside of its section, and the loader does not check that"
            ),
        ),
    }
}

/// Checks that all loaded sections have different names: `add_sect_attrs` in `kernel/module/sysfs.c` makes a file for each. Linux
/// 6.12 and later refuse a duplicate, and earlier versions warn.
pub(super) fn duplicate_names(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let is_refused = kernel.since(6, 12) && kernel.config.is_set("KALLSYMS") && kernel.config.is_set("SYSFS");
    // `object::sections` reports the other duplicates.
    let duplicates = subject
        .module
        .layout
        .duplicate_names
        .iter()
        .filter(|name| !subject.module.duplicate_sections.contains(&name.as_str()));
    findings.extend(duplicates.filter(|_| is_refused).map(|section| {
        let message = format!(
            "the module has more than one section {section}: the kernel cannot make a sysfs file for each (EEXIST)"
        );
        Finding::new(Rule::Elf, Verdict::Refused, section, message, COMPILE_WITH_KBUILD)
    }));
}

/// Checks the string table of the symbols (`elf_validity_cache_strtab`, since Linux 6.14). Earlier kernels read beyond the table, and
/// fault beyond the file.
pub(super) fn symbol_names(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let names = &subject.module.layout.names;
    let (message, verdict) = match names.symbols {
        None => return,
        Some(error) if subject.kernel.since(6, 14) => {
            let message = match error {
                StringTableError::MissingLeadingNul => "symbol string table missing leading NUL",
                StringTableError::MissingTrailingNul => "symbol string table isn't NUL terminated",
                StringTableError::OutOfBounds => "symbol name out of bounds in string table",
            };
            (message, Verdict::Refused)
        }
        Some(_) if names.unnamed_symbols == Verdict::Loads => return,
        Some(_) => {
            ("the name of a symbol does not end in the file, and the loader reads on", names.unnamed_symbols)
        }
    };
    let remedy = "rebuild it, and strip nothing but debug information";
    findings.push(Finding::new(Rule::Elf, verdict, ".strtab", message, remedy));
}

/// Checks that the names of all sections lie in the table of section names, and that both tables of names are string tables.
/// Since Linux 6.14, and in stable updates of 6.12, the kernel also checks the names of sections that are not loaded.
pub(super) fn section_names(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (kernel, layout) = (subject.kernel, &subject.module.layout);
    // Stable updates of Linux 6.12 and later may have a check that the release does not reveal.
    let verdict = |is_checked: bool| {
        if is_checked { Some(Verdict::Refused) } else { kernel.since(6, 12).then_some(Verdict::Unknown) }
    };
    let remedy = "rebuild it, and strip nothing but debug information";
    let outside = layout.names.has_section_name_out_of_bounds;
    let outside = outside.then(|| verdict(kernel.since(6, 14) || kernel.has_checks_of_6_18()));
    if let Some(verdict) = outside.flatten() {
        let message = "Invalid ELF section name in module: the name lies outside of the section names";
        findings.push(Finding::new(Rule::Elf, verdict, ".shstrtab", message, remedy));
    }
    if layout.names.sections_beyond_file > Verdict::Loads {
        let message = "the name of a section lies beyond the file, and the loader reads on";
        findings.push(Finding::new(
            Rule::Elf,
            layout.names.sections_beyond_file,
            ".shstrtab",
            message,
            remedy,
        ));
    }
    let other_type = layout.names.has_wrong_type.then(|| verdict(kernel.has_checks_of_6_18()));
    if let Some(verdict) = other_type.flatten() {
        let message = "a string table is not of type SHT_STRTAB";
        findings.push(Finding::new(Rule::Elf, verdict, ".strtab", message, remedy));
    }
}

/// Checks the alignments and sizes of the sections, which the loader uses without a check (`layout_sections`, `move_module`).
pub(super) fn placement(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    findings.extend(subject.module.layout.oversized.iter().map(|section| {
        let message = format!("section {section} is larger than the kernel's memory for modules (ENOMEM)");
        Finding::new(Rule::Elf, Verdict::Refused, section, message, "rebuild it: the file is damaged")
    }));
    findings.extend(subject.module.layout.misaligned.iter().map(|section| {
        let message =
            format!("section {section} has an impossible alignment, and the loader does not check that");
        Finding::new(Rule::Elf, Verdict::Unknown, section, message, "rebuild it: the file is damaged")
    }));
}

/// Checks the module's `struct module`, which the kernel uses and changes.
pub(super) fn this_module(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (kernel, layout) = (subject.kernel, &subject.module.layout);
    let finding = |verdict, message: &str| {
        Finding::new(Rule::Elf, verdict, ".gnu.linkonce.this_module", message, COMPILE_WITH_KBUILD)
    };
    if !layout.this_module.is_writable && kernel.config.is_set("STRICT_MODULE_RWX") {
        let message =
            "struct module is in a section that is not writable, and the kernel faults when it writes to it";
        findings.push(finding(Verdict::Refused, message));
    }
    // With a random layout, the name has another offset.
    if kernel.config.is_set("RANDSTRUCT") {
        return;
    }
    if layout.this_module.is_unnamed {
        let message = "struct module has no name, and the kernel cannot make its directory in sysfs (EINVAL)";
        findings.push(finding(Verdict::Refused, message));
    }
    if layout.this_module.has_values {
        let message =
            "struct module contains more than the module's name, and the kernel uses these values as its own";
        findings.push(finding(Verdict::Unknown, message));
    }
}

/// Checks that no section overlaps the section headers, which the loader changes before it copies the sections.
pub(super) fn header_overlaps(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    findings.extend(subject.module.layout.header_overlaps.iter().map(|section| {
        let message = format!("section {section} overlaps the section headers, which the loader changes");
        Finding::new(Rule::Elf, Verdict::Unknown, section, message, "rebuild it: the file is damaged")
    }));
}

/// Checks that exports have flags, which Linux 7.2 requires (`check_export_symbol_sections`).
pub(super) fn export_flags(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let tables = &subject.module.layout.exports;
    if subject.kernel.since(7, 2) && tables.plain.size > 0 && !tables.has_flags {
        let (message, remedy) = (
            "no flags for exported symbols",
            "rebuild it with the makefiles and scripts of this kernel's headers",
        );
        let finding = Finding::new(Rule::Elf, Verdict::Refused, "__kflagstab", message, remedy);
        findings.push(finding.with_kernel_message("ENOEXEC", message));
    }
}
