//! Pure: the symbol versions that the module was built with are the exporters' (`check_version` in
//! `kernel/module/version.c`).

use std::collections::BTreeMap;

use super::{Subject, forced};
use crate::{Finding, Rule, Verdict, module::crc_text, resolve::Provider};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    if !kernel.config.is_set("MODVERSIONS") {
        return;
    }
    let Some(versions) = &subject.module.versions else {
        findings.push(Finding {
            rule: Rule::SymbolVersion,
            verdict: forced(kernel),
            subject: "__versions".to_owned(),
            message: "the module carries no symbol versions, so the kernel loads it by force or not at all"
                .to_owned(),
            found: None,
            wanted: None,
            remedy: format!(
                "rebuild it with the Module.symvers of {} in the build tree, and do not strip __versions",
                kernel.release
            ),
        });
        return;
    };
    findings.extend(module_layout(subject, versions));
    findings.extend(named(subject));
    for import in subject.imports {
        let Some(export) = import.provider.export() else { continue };
        let name = import.symbol.name.as_str();
        let exporter = import.provider.describe();
        let finding = |verdict, message, found, wanted| Finding {
            rule: Rule::SymbolVersion,
            verdict,
            subject: name.to_owned(),
            message,
            found,
            wanted,
            remedy: remedy(subject, &import.provider),
        };
        match (versions.get(name).copied(), export.crc) {
            (Some(found), Some(wanted)) if found == wanted => {}
            (Some(found), Some(wanted)) => findings.push(finding(
                Verdict::Refused,
                format!("disagrees about version of symbol {name}, exported by {exporter}"),
                Some(crc_text(found)),
                Some(crc_text(wanted)),
            )),
            // An export without a version, such as one from assembly without a prototype.
            (None, Some(0) | None) => {}
            (None, Some(wanted)) => findings.push(finding(
                Verdict::Loads,
                format!(
                    "no symbol version for {name}, exported by {exporter}: the kernel warns and loads it"
                ),
                None,
                Some(crc_text(wanted)),
            )),
            (Some(found), None) => findings.push(finding(
                Verdict::Unknown,
                format!("the version of symbol {name} cannot be read from {exporter}"),
                Some(crc_text(found)),
                None,
            )),
        }
    }
}

/// Symbols of which `System.map` tells no more than that the kernel exports them.
fn named(subject: &Subject<'_>) -> Option<Finding> {
    let imports = subject.imports.iter().filter(|import| matches!(import.provider, Provider::Named));
    let mut symbols = imports.map(|import| &import.symbol.name);
    let (first, more) = (symbols.next()?, symbols.count());
    Some(Finding {
        rule: Rule::SymbolVersion,
        verdict: Verdict::Unknown,
        subject: "Module.symvers".to_owned(),
        message: format!(
            "the kernel exports symbol {first} and {more} more that the module needs, and no source tells their \
             versions"
        ),
        found: None,
        wanted: None,
        remedy: format!("bring the Module.symvers of {}, or boot it", subject.kernel.release),
    })
}

/// `struct module` and what surrounds it have a version of their own, in every module
/// (`check_modstruct_version`).
fn module_layout(subject: &Subject<'_>, versions: &BTreeMap<String, u32>) -> Option<Finding> {
    let name = "module_layout";
    let wanted = subject.kernel.symbols.as_ref()?.get(name)?;
    let found = *versions.get(name)?;
    (found != wanted.crc).then(|| Finding {
        rule: Rule::SymbolVersion,
        verdict: Verdict::Refused,
        subject: name.to_owned(),
        message: format!("disagrees about version of symbol {name}, the kernel's structure of modules"),
        found: Some(crc_text(found)),
        wanted: Some(crc_text(wanted.crc)),
        remedy: format!("rebuild it against the header set of {}", subject.kernel.release),
    })
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
        Provider::Kernel(_)
        | Provider::Named
        | Provider::Replaced { .. }
        | Provider::Nobody
        | Provider::Untold => {
            format!("rebuild it against the header set of {release}")
        }
    }
}
