//! The module's vermagic must match the kernel's (`check_modinfo` in `kernel/module/main.c`).

use super::Subject;
use crate::{Difference, Finding, Rule, Verdict};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let kernel = subject.kernel;
    let expected = kernel.expected_vermagic();
    let finding = |verdict, message: String, remedy: String| Finding {
        found: subject.module.vermagic().map(|text| text.trim_end().to_owned()),
        ..Finding::new(Rule::Vermagic, verdict, "vermagic", message, remedy).wanted(expected.to_string())
    };
    let Some(magic) = subject.module.vermagic() else {
        let message = "the module has no vermagic, which identifies the kernel that it was built for";
        let missing = subject.force_load(Rule::Vermagic, "vermagic", message, subject.rebuild_remedy());
        findings.push(missing.wanted(expected.to_string()));
        return;
    };
    // `same_magic` skips the release only if the kernel has modversions and the module has `__versions`. The extended table does
    // not count.
    let has_versions = subject.module.versions.is_some() && kernel.config.is_set("MODVERSIONS");
    match expected.compare(magic, has_versions) {
        Difference::None => {}
        Difference::Undecidable => findings.push(finding(
            Verdict::Unknown,
            "the vermagic contains the hash of the kernel's structure layout seed, which no source has"
                .to_owned(),
            "provide one of the kernel's own modules, whose vermagic contains the hash".to_owned(),
        )),
        Difference::Words { module, kernel: wanted } => {
            let quote = |words: &[String]| match words {
                [] => "nothing".to_owned(),
                words => format!("`{}`", words.join(" ")),
            };
            let message = if module.is_empty() && wanted.is_empty() {
                "the vermagic has the kernel's words in another order or spacing".to_owned()
            } else {
                format!("the vermagic has {} where the kernel has {}", quote(&module), quote(&wanted))
            };
            let text = format!("version magic '{}' should be '{expected}'", magic.trim_end());
            findings.push(
                finding(Verdict::Refused, message, subject.rebuild_remedy())
                    .with_kernel_message("ENOEXEC", text),
            );
        }
    }
}
