//! Pure: no part of the kernel image has the module's name.
//!
//! `mod_sysfs_init` in `kernel/module/sysfs.c` refuses a name that `/sys/module` has already (`EINVAL`, "module is
//! already loaded"), and a built-in one is there when it has parameters, a version or a driver. `modprobe` loads
//! nothing for a name in `modules.builtin`.

use super::Subject;
use crate::{Finding, Rule, Verdict};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let Some(in_tree) = &subject.kernel.beyond_headers.in_tree else { return };
    let name = &subject.module.name;
    if in_tree.value.builtin.contains(name) {
        findings.push(Finding {
            rule: Rule::BuiltIn,
            verdict: Verdict::Unknown,
            subject: name.clone(),
            message: format!(
                "{} has {name} built in: modprobe loads no other, and the kernel refuses it where /sys/module/{name} \
                 exists",
                subject.kernel.release
            ),
            found: None,
            wanted: None,
            remedy: "leave the module out for this kernel, or boot it to see".to_owned(),
        });
    }
}
