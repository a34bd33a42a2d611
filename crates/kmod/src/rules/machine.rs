//! Pure: the module is for the kernel's processor (`elf_check_arch`).

use super::Subject;
use crate::{Finding, Rule, Verdict};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (module, kernel) = (subject.module.arch, subject.kernel.arch);
    if module != kernel {
        findings.push(Finding {
            rule: Rule::Elf,
            verdict: Verdict::Refused,
            subject: "machine".to_owned(),
            message: "the object is for another processor".to_owned(),
            found: Some(module.gnu_name().to_owned()),
            wanted: Some(kernel.gnu_name().to_owned()),
            remedy: format!("build it for {kernel}"),
        });
    }
}
