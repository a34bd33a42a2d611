//! Pure: the module must not conflict with the kernel itself.

use super::Subject;
use crate::{Finding, Rule, Verdict};

/// Checks that the module exports no symbol that the kernel itself exports (`verify_exported_symbols` in
/// `kernel/module/main.c`). A symbol that one of the kernel's own modules exports conflicts only once that module is
/// loaded.
pub(super) fn export(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let Some(kernel) = &subject.kernel.symbols else { return };
    let names = subject.module.exports.iter().map(|export| &export.name);
    let doubled = names.filter(|name| kernel.get(name).is_some_and(|symbol| symbol.module == "vmlinux"));
    findings.extend(doubled.map(|name| {
        let message = format!("exports symbol {name}, which the kernel itself exports");
        let remedy = "use a driver version for this kernel";
        Finding::new(Rule::DuplicateExport, Verdict::Refused, name, message, remedy)
    }));
}

/// Checks that no built-in module has the module's name.
///
/// `mod_sysfs_init` in `kernel/module/sysfs.c` refuses a name that `/sys/module` already has (`EINVAL`, "module is
/// already loaded"). A built-in module is there if it has parameters, a version or a driver. `modprobe` loads nothing
/// for a name in `modules.builtin`.
pub(super) fn built_in(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (kernel, name) = (subject.kernel, &subject.module.name);
    if kernel.beyond_headers.in_tree.as_ref().is_some_and(|known| known.value.builtin.contains(name)) {
        let message = format!(
            "{} has {name} built in: modprobe loads no other, and the kernel refuses it if \
             /sys/module/{name} exists",
            kernel.release
        );
        let remedy = "leave the module out for this kernel, or boot the kernel to see";
        findings.push(Finding::new(Rule::BuiltIn, Verdict::Unknown, name, message, remedy));
    }
}
