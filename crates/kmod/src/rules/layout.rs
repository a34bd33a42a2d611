//! The sections of the module must be such that the kernel can load and link them (`layout_and_allocate`, `percpu_modalloc` and
//! `apply_relocations` in `kernel/module/main.c`).

use super::Subject;
use crate::{Architecture, BadRelocation, Finding, NamesError, RelocationProblem, Rule, Verdict};

const COMPILE_WITH_KBUILD: &str =
    "compile it with the kernel's own makefiles, which set the code model and link with module.lds";

/// Largest alignment of per-CPU data on arm64 whose loss is certain not to matter, in bytes.
const ALIGNED: u64 = 64;
/// Sections that modules of arm64 need, and whose flags and contents the kernel sets (`module_frob_arch_sections`).
pub(crate) const ARM64_SECTIONS: [&str; 4] =
    [".plt", ".init.plt", ".text.ftrace_trampoline", ".init.text.ftrace_trampoline"];

/// Checks that an arm64 module has the sections for jumps over more than 128 MiB (`module_frob_arch_sections` in
/// `arch/arm64/kernel/module-plts.c`). The file is always compiled since Linux 6.5.
pub(super) fn plts(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let is_compiled =
        kernel.since(6, 5) || kernel.is_rhel_9_since(427) || kernel.config.is_set("ARM64_MODULE_PLTS");
    let (module, arm64) = (subject.module, Architecture::Arm64);
    if (kernel.arch, module.arch) != (arm64, arm64) || !is_compiled {
        return;
    }
    let layout = &module.layout;
    let mut missing = |section: &str, message: &str, kernel_message: &str| {
        let finding = Finding::new(Rule::Elf, Verdict::Refused, section, message, COMPILE_WITH_KBUILD);
        findings.push(if kernel_message.is_empty() {
            finding
        } else {
            finding.kernel("ENOEXEC", kernel_message)
        });
    };
    let [plt, init_plt, trampoline, init_trampoline] = ARM64_SECTIONS;
    let has = |section| layout.arm64_sections.contains(&section);
    if !has(plt) || !has(init_plt) {
        let kernel_message = "module PLT section(s) missing";
        missing(plt, &format!("{kernel_message}: arm64 modules need .plt and .init.plt"), kernel_message);
    }
    // `module_init_ftrace_plt`. The second section is required since 2025.
    if kernel.config.is_set("DYNAMIC_FTRACE") && kernel.since(5, 10) {
        let of_init = kernel.is_recent().then_some(init_trampoline);
        for section in [trampoline].into_iter().chain(of_init).filter(|section| !has(section)) {
            missing(section, "a section for calls of the function tracer is missing", "");
        }
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
            Finding::new(Rule::Elf, Verdict::Refused, section, &message, remedy).kernel("ENOEXEC", &message)
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
    // Kernels that profile allocations had a larger reserve from Linux 6.10 to 6.15, from which one module could take 32 KiB, or
    // 64 KiB with pages of that size.
    let is_larger =
        kernel.config.is_set("MEM_ALLOC_PROFILING") && kernel.since(6, 10) && !kernel.since(6, 16);
    let reserve: u64 = match is_larger {
        true if kernel.config.is_set("ARM64_64K_PAGES") => 64 << 10,
        true => 32 << 10,
        false => 8 << 10,
    };
    let finding = |verdict, message: String| {
        let remedy = "allocate the variables with alloc_percpu when the module starts";
        let finding = Finding::new(Rule::PerCpu, verdict, ".data..percpu", message, remedy);
        finding.found(format!("{size} bytes"))
    };
    if size > 0 && subject.module.layout.badly_aligned.iter().any(|name| name == ".data..percpu") {
        findings.push(finding(Verdict::Refused, "illegal size or align for percpu allocation".to_owned()));
    }
    if size > reserve {
        let message = format!(
            "Could not allocate {size} bytes percpu data: the kernel reserves {reserve} for all modules"
        );
        let kernel_message = format!("Could not allocate {size} bytes percpu data");
        findings.push(finding(Verdict::Refused, message).kernel("ENOMEM", kernel_message));
    } else if size > reserve - ALIGNED && kernel.arch == Architecture::Arm64 {
        let message =
            format!("takes all of the {reserve} bytes of per-CPU data, whose begin may not be aligned");
        findings.push(finding(Verdict::Unknown, message));
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
    // Before Linux 6.16 the loader skips the relocations of this section, and none was read after the first bad one.
    let is_skipped = bad.section == ".data..percpu" && !kernel.since(6, 16);
    let (kernel_message, message) = if is_skipped {
        (None, format!("per-CPU variables have a relocation of type {} that the loader skips", bad.kind))
    } else {
        relocation_messages(kernel.arch, bad)
    };
    let place = format!("{}+{:#x}", bad.section, bad.offset);
    let verdict = if kernel_message.is_some() { Verdict::Refused } else { Verdict::Unknown };
    let finding = Finding::new(Rule::Relocation, verdict, place, message, COMPILE_WITH_KBUILD);
    findings.push(match kernel_message {
        Some(text) => finding.kernel("ENOEXEC", text),
        None => finding,
    });
}

/// Returns the kernel's message about a relocation, if the kernel refuses it, and the finding's message.
fn relocation_messages(arch: Architecture, bad: &BadRelocation) -> (Option<String>, String) {
    let kind = bad.kind;
    match bad.problem {
        RelocationProblem::NotLoaded => {
            (None, format!("a relocation of type {kind} refers to a section that the loader drops"))
        }
        RelocationProblem::NotOfSection => (
            None,
            "the relocations of this section are missing, incomplete, or of another section".to_owned(),
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
            (None, format!("a relocation of type {kind} changes bytes that another has changed before"))
        }
        RelocationProblem::OutsideSection => (
            None,
            format!(
                "a relocation of type {kind} lies outside of its section, and the loader does not check that"
            ),
        ),
    }
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

/// Checks the names of the symbols (`elf_validity_cache_strtab`, Linux 6.14 at the latest). Earlier kernels read beyond the table.
pub(super) fn symbol_names(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let is_checked = subject.kernel.since(6, 14);
    let (message, verdict) = match subject.module.layout.names.symbols {
        None => return,
        Some(NamesError::NoBegin) if !is_checked => return,
        Some(NamesError::NoBegin) => ("symbol string table missing leading NUL", Verdict::Refused),
        Some(NamesError::NoEnd) if is_checked => {
            ("symbol string table isn't NUL terminated", Verdict::Refused)
        }
        Some(NamesError::Outside) if is_checked => {
            ("symbol name out of bounds in string table", Verdict::Refused)
        }
        Some(NamesError::NoEnd | NamesError::Outside) => (
            "the name of a symbol lies outside of the names, and the loader does not check that",
            Verdict::Unknown,
        ),
    };
    let remedy = "rebuild it, and strip nothing but debug information";
    findings.push(Finding::new(Rule::Elf, verdict, ".strtab", message, remedy));
}

/// Checks that the names of all sections lie in the table of section names, and that both tables of names are such tables. Linux
/// since 6.14 and stable updates of 6.12 look at sections that are not loaded, too.
pub(super) fn section_names(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (kernel, layout) = (subject.kernel, &subject.module.layout);
    let verdict = |is_checked, may_be_checked| match (is_checked, may_be_checked) {
        (true, _) => Some(Verdict::Refused),
        (false, true) => Some(Verdict::Unknown),
        (false, false) => None,
    };
    let remedy = "rebuild it, and strip nothing but debug information";
    let names = layout
        .names
        .section_is_outside
        .then(|| verdict(kernel.since(6, 14) || kernel.is_recent(), kernel.since(6, 12)));
    if let Some(verdict) = names.flatten() {
        let message = "Invalid ELF section name in module: it lies outside of the names";
        findings.push(Finding::new(Rule::Elf, verdict, ".shstrtab", message, remedy));
    }
    let kinds = layout.names.is_of_other_type.then(|| verdict(kernel.is_recent(), kernel.since(6, 12)));
    if let Some(verdict) = kinds.flatten() {
        let message = "a table of names is not of type SHT_STRTAB";
        findings.push(Finding::new(Rule::Elf, verdict, ".strtab", message, remedy));
    }
}

/// Checks the alignments of the sections, which the loader takes as they are.
pub(super) fn alignment(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    findings.extend(subject.module.layout.badly_aligned.iter().map(|section| {
        let message =
            format!("section {section} has an impossible alignment, and the loader does not check that");
        Finding::new(Rule::Elf, Verdict::Unknown, section, message, "rebuild it: the file is damaged")
    }));
}

/// Checks the module's `struct module`, which the kernel takes as its own.
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
    // With a random layout, other bytes are the name.
    if layout.this_module.has_values && !kernel.config.is_set("RANDSTRUCT") {
        let message =
            "struct module holds more than the module's name, and the kernel takes that for its own";
        findings.push(finding(Verdict::Unknown, message));
    }
}

/// Checks that no section lies over the section headers, which the loader changes before it copies the sections.
pub(super) fn over_headers(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    findings.extend(subject.module.layout.over_headers.iter().map(|section| {
        let message = format!("section {section} lies over the section headers, which the loader changes");
        Finding::new(Rule::Elf, Verdict::Unknown, section, message, "rebuild it: the file is damaged")
    }));
}

/// Checks that the exports have flags (`check_export_symbol_sections`, Linux 7.2).
pub(super) fn export_flags(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let tables = &subject.module.layout.exports;
    if subject.kernel.since(7, 2) && tables.plain.0 > 0 && !tables.has_flags {
        let (message, remedy) = (
            "no flags for exported symbols",
            "rebuild it with the makefiles and scripts of this kernel's headers",
        );
        let finding = Finding::new(Rule::Elf, Verdict::Refused, "__kflagstab", message, remedy);
        findings.push(finding.kernel("ENOEXEC", message));
    }
}
