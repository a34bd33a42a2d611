//! Pure: the symbol versions that the module was built with must match the exporters' (`check_version` in
//! `kernel/module/version.c`).

use std::collections::BTreeMap;

use super::Subject;
use crate::{Finding, Rule, Verdict, module::crc_text, resolve::Provider};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    if !kernel.config.is_set("MODVERSIONS") {
        return;
    }
    let Some(versions) = &subject.module.versions else {
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
    findings.extend(named(subject));
    for import in subject.imports {
        let Some(export) = import.provider.export() else { continue };
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
                let consequence = "the kernel warns and loads it";
                let message = format!("no symbol version for {name}, exported by {exporter}: {consequence}");
                finding(Verdict::Loads, message).wanted(crc_text(wanted))
            }
            (Some(found), None) => {
                let message = format!("the version of symbol {name} cannot be read from {exporter}");
                finding(Verdict::Unknown, message).found(crc_text(found))
            }
        });
    }
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
    let wanted = subject.kernel.symbols.as_ref()?.get(name)?;
    let found = *versions.get(name)?;
    let message = format!("disagrees about version of symbol {name}, the kernel's structure of modules");
    let remedy = format!("rebuild it against the header set of {}", subject.kernel.release);
    let finding = Finding::new(Rule::SymbolVersion, Verdict::Refused, name, message, remedy);
    (found != wanted.crc).then(|| finding.found(crc_text(found)).wanted(crc_text(wanted.crc)))
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
