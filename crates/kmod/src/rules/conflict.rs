//! The module must not conflict with the kernel itself.

use std::collections::BTreeMap;

use super::Subject;
use crate::{Finding, Rule, Verdict, resolve::Provider};

/// Checks that no exported symbol of the module is already exported by the kernel, by a needed module, or by an earlier module of
/// the payload (`verify_exported_symbols` in `kernel/module/main.c`). Other in-tree modules conflict only while they are loaded.
pub(super) fn export(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    // Display names of the modules that are loaded before this module as its dependencies.
    let needed: BTreeMap<String, String> = subject
        .imports
        .iter()
        .filter_map(|import| match &import.provider {
            Provider::Needed { symbol, .. } | Provider::Kernel(symbol) => {
                Some((symbol.module_name(), import.provider.describe()))
            }
            _ => None,
        })
        .collect();
    for export in &subject.module.exports {
        let name = &export.name;
        let kernel_symbol = subject.kernel.symbols.as_ref().and_then(|table| table.get(name));
        let (owner, remedy) = match (kernel_symbol, subject.exported_earlier.get(name.as_str())) {
            (Some(symbol), _) if symbol.module == "vmlinux" => {
                ("the kernel itself".to_owned(), "use a driver version for this kernel")
            }
            (_, Some(module)) => {
                (format!("{module} of this payload"), "build the modules of one driver version together")
            }
            (Some(symbol), None) => match needed.get(&symbol.module_name()) {
                Some(owner) => (owner.clone(), "use a driver version for this kernel"),
                None => continue,
            },
            (None, None) => continue,
        };
        let message = format!("exports symbol {name}, which {owner} also exports");
        let finding = Finding::new(Rule::DuplicateExport, Verdict::Refused, name, message, remedy);
        findings.push(finding.with_kernel_message("ENOEXEC", format!("exports duplicate symbol {name}")));
    }
}

/// Checks that no built-in module has the module's name.
///
/// `mod_sysfs_init` in `kernel/module/sysfs.c` refuses a name that `/sys/module` already has (`EINVAL`, "module is
/// already loaded"). A built-in module is in `/sys/module` if it has parameters, a version or a driver. `modprobe` loads
/// nothing for a name in `modules.builtin`.
pub(super) fn built_in(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (kernel, name) = (subject.kernel, &subject.module.name);
    if kernel.beyond_headers.in_tree.as_ref().is_some_and(|known| known.value.builtin.contains(name)) {
        let message = format!(
            "{} has {name} built in: modprobe does not load the module, and the kernel refuses the module if \
             /sys/module/{name} exists",
            kernel.release
        );
        let remedy = "omit the module for this kernel, or run a boot check";
        findings.push(Finding::new(Rule::BuiltIn, Verdict::Unknown, name, message, remedy));
    }
}
