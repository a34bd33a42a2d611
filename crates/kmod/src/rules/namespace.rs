//! The module must import the namespaces of the symbols that it uses (`verify_namespace_is_imported` in
//! `kernel/module/main.c`).

use std::collections::BTreeSet;

use super::Subject;
use crate::{Finding, Rule, Verdict, text::names};

/// Prefix of a module namespace, which lists the modules that may use its symbols (since Linux 6.16).
const MODULE_NAMESPACE: &str = "module:";

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (kernel, module) = (subject.kernel, subject.module);
    let allowed = kernel.config.is_set("MODULE_ALLOW_MISSING_NAMESPACE_IMPORTS");
    let verdict = if allowed { Verdict::Loads } else { Verdict::Refused };
    // `setup_modinfo`: modules must not import module namespaces.
    let module_namespaces = module.fields("import_ns").filter(|name| name.starts_with(MODULE_NAMESPACE));
    findings.extend(module_namespaces.filter(|_| kernel.since(6, 16)).map(|name| {
        let message = format!("module tries to import module namespace: {name}");
        let remedy = "remove the MODULE_IMPORT_NS: modules in the list need none";
        Finding::new(Rule::Namespace, Verdict::Refused, name, &message, remedy)
            .with_kernel_message("EPERM", &message)
    }));
    let imported: BTreeSet<&str> = module.fields("import_ns").collect();
    let found = if imported.is_empty() { "no imports".to_owned() } else { names(imported.iter().copied()) };
    for import in subject.imports {
        let Some(namespace) = import.provider.export().and_then(|export| export.namespace) else { continue };
        let name = &import.symbol.name;
        let exporter = import.provider.describe();
        let finding = |verdict, message: String, remedy: String| {
            let finding = Finding::new(Rule::Namespace, verdict, name, message, remedy).wanted(namespace);
            let kernel_message =
                format!("module uses symbol ({name}) from namespace {namespace}, but does not import it.");
            if allowed { finding } else { finding.with_kernel_message("EINVAL", kernel_message) }
        };
        if let Some(modules) = namespace.strip_prefix(MODULE_NAMESPACE).filter(|_| kernel.since(6, 16)) {
            if !lists_module(modules, &module.name) {
                findings.push(finding(
                    verdict,
                    format!("symbol {name}, exported by {exporter}, is for other modules only"),
                    "use a driver version that does not use this symbol".to_owned(),
                ));
            }
        } else if !imported.contains(namespace) {
            // The argument is a string since Linux 6.13.
            let macro_call = if kernel.since(6, 13) {
                format!("MODULE_IMPORT_NS(\"{namespace}\")")
            } else {
                format!("MODULE_IMPORT_NS({namespace})")
            };
            findings.push(finding(
                verdict,
                format!(
                    "symbol {name}, exported by {exporter}, is in a namespace that the module does not import"
                ),
                format!("add {macro_call} to its source, or use a driver version that has it"),
            ).found(&found));
        }
    }
}

/// Whether a comma-separated list of module names contains the module. In the list `-` equals `_`, and an entry may end
/// with `*` (`verify_module_namespace`).
fn lists_module(list: &str, module: &str) -> bool {
    list.split(',').map(|entry| entry.replace('-', "_")).any(|entry| match entry.strip_suffix('*') {
        Some(start) => module.starts_with(start),
        None => entry == module,
    })
}
