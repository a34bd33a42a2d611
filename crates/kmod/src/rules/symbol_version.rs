//! Pure: the symbol versions that the module was built with must match the exporters' (`check_version` in
//! `kernel/module/version.c`).

use std::collections::BTreeMap;

use super::Subject;
use crate::{ExtendedVersions, Finding, Rule, Verdict, module::crc_text, resolve::Provider};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (kernel, module) = (subject.kernel, subject.module);
    let extended = module.extended_versions.as_ref().filter(|_| kernel.since(6, 14));
    if let Some(ExtendedVersions::Broken(what)) = extended {
        let message = format!("the table of extended symbol versions {what}");
        let remedy =
            "build it again with the kernel's own makefiles, and strip nothing but debug information";
        findings.push(Finding::new(
            Rule::SymbolVersion,
            Verdict::Refused,
            "__version_ext_crcs",
            message,
            remedy,
        ));
    }
    if !kernel.config.is_set("MODVERSIONS") {
        return;
    }
    if exports_lack_versions(subject) {
        let (message, remedy) = ("no versions for exported symbols", "build it with CONFIG_MODVERSIONS");
        let verdict = subject.force_load_verdict();
        findings.push(Finding::new(Rule::SymbolVersion, verdict, "__kcrctab", message, remedy));
    }
    let Some(versions) = module.versions_for(kernel) else {
        findings.push(Finding::new(
            Rule::SymbolVersion,
            subject.force_load_verdict(),
            "__versions",
            "the module carries no symbol versions, so the kernel loads it only by force, or not at all",
            format!(
                "rebuild it with the Module.symvers of {} in the build tree, and do not strip __versions",
                kernel.release
            ),
        ));
        return;
    };
    findings.extend(module_layout(subject, versions));
    let is_extended = reads_extended_versions(subject);
    findings.extend(named(subject));
    findings.extend(foreign_headers(subject));
    for import in subject.imports {
        let Some(mut export) = import.provider.export() else { continue };
        if let (Provider::Kernel(_), Some(own)) = (&import.provider, own_versions(subject)) {
            export.crc = own.get(&import.symbol.name).copied().or(export.crc);
        }
        let name = import.symbol.name.as_str();
        let exporter = import.provider.describe();
        let finding = |verdict, message: String| {
            let remedy = remedy(subject, &import.provider);
            Finding::new(Rule::SymbolVersion, verdict, name, message, remedy)
        };
        findings.push(match (versions.get(name).copied(), export.crc) {
            (Some(found), Some(wanted)) if found == wanted => continue,
            (Some(found), Some(wanted)) => {
                let message = format!("disagrees about version of symbol {name}, exported by {exporter}");
                finding(Verdict::Refused, message).found(crc_text(found)).wanted(crc_text(wanted))
            }
            // An export without a version, for example from assembly without a prototype.
            (None, Some(0) | None) => continue,
            (None, Some(wanted)) => {
                let (verdict, consequence) = missing(is_extended);
                let message = format!("no symbol version for {name}, exported by {exporter}: {consequence}");
                finding(verdict, message).wanted(crc_text(wanted))
            }
            (Some(found), None) => {
                let message = format!("the version of symbol {name} cannot be read from {exporter}");
                finding(Verdict::Unknown, message).found(crc_text(found))
            }
        });
    }
}

/// Whether the kernel reads the module's extended table.
fn reads_extended_versions(subject: &Subject<'_>) -> bool {
    subject.kernel.since(6, 14) && subject.module.extended_versions.is_some()
}

/// Whether a table of exports has no versions (`check_export_symbol_sections`). Kernels with flags of exports have one table.
fn exports_lack_versions(subject: &Subject<'_>) -> bool {
    let tables = &subject.module.layout.exports;
    let lacks = |(size, has_versions): (u64, bool)| size > 0 && !has_versions;
    lacks(tables.plain) || lacks(tables.gpl) && !subject.kernel.since(7, 2)
}

/// Verdict for a symbol that the module's table of versions lacks. `check_version` only warns. In Debian's kernels it refuses
/// the module, unless the table is an extended one. The headers do not tell which of the two a kernel does.
fn missing(is_extended: bool) -> (Verdict, &'static str) {
    if is_extended {
        (Verdict::Loads, "the kernel warns and loads it")
    } else {
        (Verdict::Unknown, "Debian's kernels refuse it, others warn and load it")
    }
}

/// Versions of the kernel's symbols, from an in-tree module.
fn own_versions<'a>(subject: &Subject<'a>) -> Option<&'a BTreeMap<String, u32>> {
    subject.kernel.beyond_headers.symbol_versions.as_ref().map(|known| &known.value)
}

/// Compares the header set's `Module.symvers` with one of the kernel's own modules. If a version differs, the headers are of
/// another build of the kernel, and then no version in them counts.
fn foreign_headers(subject: &Subject<'_>) -> Option<Finding> {
    let known = subject.kernel.beyond_headers.symbol_versions.as_ref()?;
    let table = subject.kernel.symbols.as_ref()?;
    let differs = |(name, own): &(&String, &u32)| {
        table.get(name).is_some_and(|symbol| symbol.crc != 0 && symbol.crc != **own)
    };
    let (name, own) = known.value.iter().find(differs)?;
    let found = table.get(name)?.crc;
    let message = format!(
        "the header set belongs to another build of the kernel: its version of {name} differs from that in {}",
        known.source
    );
    let remedy = format!("provide the headers of exactly this build of {}", subject.kernel.release);
    let finding = Finding::new(Rule::SymbolVersion, Verdict::Unknown, "Module.symvers", message, remedy);
    Some(finding.found(crc_text(found)).wanted(crc_text(*own)))
}

/// Reports symbols that are known to be exported by the kernel, but whose versions are unknown (as with `System.map`).
fn named(subject: &Subject<'_>) -> Option<Finding> {
    let imports = subject.imports.iter().filter(|import| matches!(import.provider, Provider::Named));
    let mut symbols = imports.map(|import| &import.symbol.name);
    let (first, more) = (symbols.next()?, symbols.count());
    let message = format!(
        "the kernel exports symbol {first} and {more} more that the module needs, and no source has their versions"
    );
    Some(subject.symvers_needed(Rule::SymbolVersion, message))
}

/// Checks the version of `module_layout`, which covers `struct module` and related structures in every module
/// (`check_modstruct_version`).
fn module_layout(subject: &Subject<'_>, versions: &BTreeMap<String, u32>) -> Option<Finding> {
    let name = "module_layout";
    let of_headers =
        subject.kernel.symbols.as_ref().and_then(|table| table.get(name)).map(|symbol| symbol.crc);
    let wanted = own_versions(subject).and_then(|own| own.get(name).copied()).or(of_headers)?;
    let Some(found) = versions.get(name).copied() else {
        let is_extended = reads_extended_versions(subject);
        let (verdict, consequence) = missing(is_extended);
        let message =
            format!("no symbol version for {name}, the kernel's structure of modules: {consequence}");
        let remedy =
            format!("rebuild it with the Module.symvers of {} in the build tree", subject.kernel.release);
        let finding = Finding::new(Rule::SymbolVersion, verdict, name, message, remedy);
        return (wanted != 0).then(|| finding.wanted(crc_text(wanted)));
    };
    let message = format!("disagrees about version of symbol {name}, the kernel's structure of modules");
    let remedy = format!("rebuild it against the header set of {}", subject.kernel.release);
    let finding = Finding::new(Rule::SymbolVersion, Verdict::Refused, name, message, remedy);
    (found != wanted).then(|| finding.found(crc_text(found)).wanted(crc_text(wanted)))
}

fn remedy(subject: &Subject<'_>, provider: &Provider<'_>) -> String {
    let release = &subject.kernel.release;
    match provider {
        Provider::Payload { module, .. } => {
            format!("rebuild it and {} together: they come from different builds", module.name)
        }
        Provider::Needed { image, .. } => {
            format!("rebuild it against the exposed headers of {image} for {release}")
        }
        _ => format!("rebuild it against the header set of {release}"),
    }
}
