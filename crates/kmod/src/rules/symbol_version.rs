//! The symbol versions that the module was built with must match the exporters' (`check_version` in `kernel/module/version.c`).

use std::collections::BTreeMap;

use super::Subject;
use crate::{
    ExtendedVersions, Finding, Rule, Verdict,
    btf::Fit,
    module::format_crc,
    resolve::{Import, Provider},
    text::names,
};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (kernel, module) = (subject.kernel, subject.module);
    if let Some(ExtendedVersions::Broken(problem)) = module.extended_for(kernel) {
        let message = format!("the table of extended symbol versions {problem}");
        let remedy =
            "build it again with the kernel's own makefiles, and strip nothing but debug information";
        let rule = Rule::SymbolVersion;
        findings.push(Finding::new(rule, Verdict::Refused, "__version_ext_crcs", message, remedy));
    }
    if !kernel.config.is_set("MODVERSIONS") {
        findings.extend(kernel_without_versions(subject));
        return;
    }
    if exports_lack_versions(subject) {
        let (message, remedy) =
            ("no versions for exported symbols", "build it with CONFIG_MODVERSIONS".to_owned());
        findings.push(subject.force_load(Rule::SymbolVersion, "__kcrctab", message, remedy));
    }
    let Some(versions) = module.versions_for(kernel) else {
        let message = "the module carries no symbol versions";
        let remedy = format!("{}, and do not strip __versions", rebuild_with_symvers(subject));
        findings.push(subject.force_load(Rule::SymbolVersion, "__versions", message, remedy));
        return;
    };
    findings.extend(module_layout(subject, versions));
    findings.extend(versions_unknown(subject));
    findings.extend(headers_of_another_build(subject));
    compare_imports(subject, versions, findings);
}

/// Compares the version of each import with the exporter's.
fn compare_imports(subject: &Subject<'_>, versions: &BTreeMap<String, u32>, findings: &mut Vec<Finding>) {
    let mut unversioned = Vec::new();
    for import in subject.imports {
        let Some(mut export) = import.provider.export() else { continue };
        let name = import.symbol.name.as_str();
        let is_of_kernel = matches!(import.provider, Provider::Kernel(_));
        if let Some(in_tree) = in_tree_versions(subject).filter(|_| is_of_kernel) {
            export.crc = in_tree.get(name).copied().or(export.crc);
        }
        match (versions.get(name).copied(), export.crc) {
            (Some(found), Some(wanted)) if found == wanted && !is_oversized(subject, name) => {}
            // Neither side has a version, for example for an assembly function without a prototype: the kernel compares nothing.
            (None, None) => unversioned.push(name),
            // The exporter was built without a version for this symbol. Only Debian's kernels refuse a module that lacks such a
            // symbol of the kernel.
            (None, Some(0)) if !is_of_kernel || !is_debian(subject) => unversioned.push(name),
            (module_crc, exporter_crc) => {
                findings.push(version_finding(subject, import, module_crc, exporter_crc));
            }
        }
    }
    findings.extend(exporters_without_versions(unversioned));
}

/// Finding about an import whose version in the module is not the exporter's.
fn version_finding(
    subject: &Subject<'_>,
    import: &Import<'_>,
    module_crc: Option<u32>,
    exporter_crc: Option<u32>,
) -> Finding {
    let (name, exporter) = (import.symbol.name.as_str(), import.provider.describe());
    let finding = |verdict, message: String| {
        let remedy = remedy(subject, &import.provider, module_crc);
        Finding::new(Rule::SymbolVersion, verdict, name, message, remedy)
    };
    match (module_crc, exporter_crc) {
        _ if is_oversized(subject, name) => {
            let message = format!("{}: the module's has more than 32 bits", disagreement(name));
            finding(Verdict::Refused, message).with_kernel_message("EINVAL", disagreement(name))
        }
        (Some(found), Some(wanted)) => {
            let message = format!("{}, exported by {exporter}", disagreement(name));
            let finding =
                finding(Verdict::Refused, message).with_kernel_message("EINVAL", disagreement(name));
            finding.found(format_crc(found)).wanted(format_crc(wanted))
        }
        (Some(found), None) => {
            let message = format!("the version of symbol {name} cannot be read from {exporter}");
            finding(Verdict::Unknown, message).found(format_crc(found))
        }
        (None, wanted) => {
            let (verdict, consequence) = missing_version(subject, reads_extended_versions(subject));
            let message = format!("no symbol version for {name}, exported by {exporter}: {consequence}");
            Finding { wanted: wanted.map(format_crc), ..finding(verdict, message) }
        }
    }
}

/// Whether the version that the kernel compares has more than 32 bits.
fn is_oversized(subject: &Subject<'_>, name: &str) -> bool {
    !reads_extended_versions(subject) && subject.module.layout.oversized_crcs.contains(name)
}

/// Warns that the kernel compares no versions, unless the module's type information shows that the module was compiled with the
/// kernel image.
fn kernel_without_versions(subject: &Subject<'_>) -> Option<Finding> {
    if subject.btf_fit() == Some(Fit::Matches) {
        return None;
    }
    let message = "CONFIG_MODVERSIONS is off, so the kernel also loads modules that were compiled with different structure layouts";
    let remedy = format!(
        "build it with BTF (the build tree must contain the vmlinux of {}) and provide the kernel image, or test the module \
         on that kernel",
        subject.kernel.release
    );
    let finding = Finding::new(Rule::SymbolVersion, Verdict::Loads, "CONFIG_MODVERSIONS", message, remedy);
    Some(finding.unproven())
}

/// Warns about imports whose exporters have no version.
fn exporters_without_versions(symbols: Vec<&str>) -> Option<Finding> {
    let first = *symbols.first()?;
    let message = format!(
        "the exporters of symbols that the module needs have no versions to compare: {}",
        names(symbols)
    );
    let remedy = "build the exporter with CONFIG_MODVERSIONS, or test the module on this kernel";
    Some(Finding::new(Rule::SymbolVersion, Verdict::Loads, first, message, remedy).unproven())
}

/// Message of the kernel about a version that differs.
fn disagreement(name: &str) -> String {
    format!("disagrees about version of symbol {name}")
}

/// Advice for a module that lacks versions.
fn rebuild_with_symvers(subject: &Subject<'_>) -> String {
    format!("rebuild it with the Module.symvers of {} in the build tree", subject.kernel.release)
}

/// Whether the kernel reads the module's extended table.
fn reads_extended_versions(subject: &Subject<'_>) -> bool {
    subject.module.extended_for(subject.kernel).is_some()
}

/// Whether a table of exports has no versions (`check_export_symbol_sections`). Kernels with export flags ignore the GPL table.
fn exports_lack_versions(subject: &Subject<'_>) -> bool {
    let tables = &subject.module.layout.exports;
    tables.plain.lacks_versions() || tables.gpl.lacks_versions() && !subject.kernel.since(7, 2)
}

/// Verdict for a symbol that the module's table of versions lacks. Upstream `check_version` only warns. In Debian's kernels it
/// refuses the module, unless the table is an extended one. The headers do not tell who built the kernel, and other distributions
/// may have the same patch.
fn missing_version(subject: &Subject<'_>, is_extended: bool) -> (Verdict, &'static str) {
    if is_extended {
        (Verdict::Loads, "the kernel warns and loads it")
    } else if is_debian(subject) {
        (Verdict::Refused, "Debian's kernels refuse it")
    } else {
        (Verdict::Unknown, "Debian's kernels refuse it, others warn and load it")
    }
}

fn is_debian(subject: &Subject<'_>) -> bool {
    let builder = subject.kernel.beyond_headers.builder.as_ref();
    builder.is_some_and(|known| known.value.ends_with("@lists.debian.org"))
}

/// Symbol versions that an in-tree module expects of the kernel.
fn in_tree_versions<'a>(subject: &Subject<'a>) -> Option<&'a BTreeMap<String, u32>> {
    subject.kernel.beyond_headers.symbol_versions.as_ref().map(|known| &known.value)
}

/// Compares the header set's `Module.symvers` with an in-tree module. If a version differs, the headers belong to another build of
/// the kernel, and no version in them is reliable.
fn headers_of_another_build(subject: &Subject<'_>) -> Option<Finding> {
    let known = subject.kernel.beyond_headers.symbol_versions.as_ref()?;
    let table = subject.kernel.symbols.as_ref()?;
    let differs = |(name, expected): &(&String, &u32)| {
        table.get(name).is_some_and(|symbol| symbol.crc != 0 && symbol.crc != **expected)
    };
    let (name, expected) = known.value.iter().find(differs)?;
    let found = table.get(name)?.crc;
    let message = format!(
        "the header set belongs to another build of the kernel: its version of {name} differs from that in {}",
        known.source
    );
    let remedy = format!("provide the headers of exactly this build of {}", subject.kernel.release);
    let finding = Finding::new(Rule::SymbolVersion, Verdict::Unknown, "Module.symvers", message, remedy);
    Some(finding.found(format_crc(found)).wanted(format_crc(*expected)))
}

/// Reports symbols that the kernel exports according to a source without versions, such as `System.map`.
fn versions_unknown(subject: &Subject<'_>) -> Option<Finding> {
    let imports = subject.imports.iter().filter(|import| matches!(import.provider, Provider::NameOnly));
    let symbols: Vec<&str> = imports.map(|import| import.symbol.name.as_str()).collect();
    (!symbols.is_empty()).then(|| {
        let message = format!(
            "no source has the versions of symbols of the kernel that the module needs: {}",
            names(symbols)
        );
        subject.symvers_needed(Rule::SymbolVersion, message)
    })
}

/// Checks the version of `module_layout`, which covers `struct module` and related structures in every module
/// (`check_modstruct_version`).
fn module_layout(subject: &Subject<'_>, versions: &BTreeMap<String, u32>) -> Option<Finding> {
    let name = "module_layout";
    let header_crc =
        subject.kernel.symbols.as_ref().and_then(|table| table.get(name)).map(|symbol| symbol.crc);
    let wanted = in_tree_versions(subject).and_then(|in_tree| in_tree.get(name).copied()).or(header_crc)?;
    let Some(found) = versions.get(name).copied() else {
        let is_extended = reads_extended_versions(subject);
        let (verdict, consequence) = missing_version(subject, is_extended);
        let message =
            format!("no symbol version for {name}, the kernel's structure of modules: {consequence}");
        let finding =
            Finding::new(Rule::SymbolVersion, verdict, name, message, rebuild_with_symvers(subject));
        return (wanted != 0).then(|| finding.wanted(format_crc(wanted)));
    };
    if found == wanted && !is_oversized(subject, name) {
        return None;
    }
    let message = format!("disagrees about version of symbol {name}, the kernel's structure of modules");
    let finding =
        Finding::new(Rule::SymbolVersion, Verdict::Refused, name, message, subject.rebuild_remedy());
    let finding = finding.with_kernel_message("ENOEXEC", disagreement(name));
    Some(finding.found(format_crc(found)).wanted(format_crc(wanted)))
}

/// Advice about a symbol, for which the module has this version.
fn remedy(subject: &Subject<'_>, provider: &Provider<'_>, module_crc: Option<u32>) -> String {
    let release = &subject.kernel.release;
    match provider {
        Provider::Payload { module, .. } => {
            format!("rebuild it and {} together: they come from different builds", module.name)
        }
        Provider::Needed { image, .. } => {
            format!("rebuild it against the exposed headers of {image} for {release}")
        }
        _ if module_crc.is_none() => rebuild_with_symvers(subject),
        // The module agrees with the header set, so it is an in-tree module that disagrees with the header set.
        Provider::Kernel(symbol) if module_crc == Some(symbol.crc) => subject.rebuild_remedy(),
        Provider::Kernel(symbol) if symbol.module != "vmlinux" && subject.agrees_with_headers() => format!(
            "it was compiled against another {}: name the driver image that has it in `needs`, or rebuild without the \
             Module.symvers of that driver",
            symbol.module_name()
        ),
        _ => format!("rebuild it against the header set of {release}"),
    }
}
