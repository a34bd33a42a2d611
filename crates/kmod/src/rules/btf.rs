//! The module's type information (BTF) must extend the kernel's BTF (`btf_module_notify` in `kernel/bpf/btf.c`, Linux
//! 5.11). The kernel refuses a module with a mismatch, unless `CONFIG_MODULE_ALLOW_BTF_MISMATCH` (Linux 5.18) is set.

use super::Subject;
use crate::{Finding, Rule, Verdict, btf::Fit};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let (kernel, module) = (subject.kernel, subject.module);
    let Some(btf) = module.btf.as_ref().filter(|_| kernel.config.is_set("DEBUG_INFO_BTF_MODULES")) else {
        return;
    };
    let allowed = kernel.config.is_set("MODULE_ALLOW_BTF_MISMATCH");
    let finding = |verdict, message: &str, remedy: String| {
        let consequence =
            if allowed { ": the kernel loads the module without its type information" } else { "" };
        let verdict = if allowed { Verdict::Loads } else { verdict };
        Finding::new(Rule::Btf, verdict, ".BTF", format!("{message}{consequence}"), remedy)
    };
    let release = &kernel.release;
    let rebuild = "rebuild the module, or remove the section with objcopy --remove-section .BTF";
    if let Err(error) = btf {
        findings.push(finding(Verdict::Refused, &error.to_string(), rebuild.to_owned()));
        return;
    }
    let relocated = subject.relocates_btf();
    findings.push(match subject.btf_fit() {
        Some(Fit::Matches) => return,
        Some(Fit::Rejected(problem)) => {
            finding(Verdict::Refused, &format!("the type information {problem}"), rebuild.to_owned())
        }
        Some(Fit::OtherBase) => finding(
            Verdict::Unknown,
            "the type information was built for another kernel image",
            format!("{rebuild}, or boot {release}"),
        ),
        // If the kernel tolerates a mismatch, report only a definite mismatch.
        None if allowed => return,
        None if relocated => finding(
            Verdict::Unknown,
            "the type information includes its base, and only the kernel can tell whether its types match",
            format!("boot {release}, or {rebuild}"),
        ),
        None => finding(
            Verdict::Unknown,
            "no source has the kernel's own type information, which the module's type information continues",
            format!("provide the kernel image of {release}, or boot the kernel"),
        ),
    });
}
