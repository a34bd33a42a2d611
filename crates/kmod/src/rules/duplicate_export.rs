//! Pure: the module exports nothing that the kernel itself exports (`verify_exported_symbols` in
//! `kernel/module/main.c`). What only a module of the kernel exports is no conflict until that one is loaded.

use super::Subject;
use crate::{Finding, Rule, Verdict};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let Some(kernel) = &subject.kernel.symbols else { return };
    for export in &subject.module.exports {
        if kernel.get(&export.name).is_some_and(|symbol| symbol.module == "vmlinux") {
            findings.push(Finding {
                rule: Rule::DuplicateExport,
                verdict: Verdict::Refused,
                subject: export.name.clone(),
                message: format!("exports symbol {}, which the kernel itself exports", export.name),
                found: None,
                wanted: None,
                remedy: "use a driver version for this kernel".to_owned(),
            });
        }
    }
}
