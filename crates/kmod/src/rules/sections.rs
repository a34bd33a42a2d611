//! Pure: the module has each section that describes it once. Linux refuses others since 6.4 (commit f3b93547b91a,
//! "module: add sanity check for ELF module section"); before, it takes the first, which need not be the right one.

use super::Subject;
use crate::{Finding, Rule, Verdict};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let refuses = subject.kernel.since(6, 4);
    for section in &subject.module.repeated {
        findings.push(Finding {
            rule: Rule::Elf,
            verdict: if refuses { Verdict::Refused } else { Verdict::Unknown },
            subject: (*section).to_owned(),
            message: format!("the module has more than one section {section}"),
            found: None,
            wanted: Some("one".to_owned()),
            remedy: "link it with the kernel's own makefiles, which merge such sections".to_owned(),
        });
    }
}
