//! Each symbol that the module needs must be exported (`simplify_symbols` in `kernel/module/main.c`).

use super::Subject;
use crate::{Finding, Rule, Verdict, resolve::Provider};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let release = &subject.kernel.release;
    let mut unknown = 0_usize;
    let weak_pc_relative = &subject.module.layout.weak_pc_relative;
    for import in subject
        .imports
        .iter()
        .filter(|import| !import.symbol.weak || weak_pc_relative.contains(&import.symbol.name))
    {
        let name = &import.symbol.name;
        let (message, remedy) = match &import.provider {
            Provider::Payload { .. } | Provider::Needed { .. } | Provider::Kernel(_) | Provider::NameOnly => {
                continue;
            }
            Provider::Unknown => {
                unknown += 1;
                continue;
            }
            Provider::Stripped(exporter) => {
                let exporter = &exporter.name;
                let message = format!(
                    "nothing is known to export symbol {name}, and the names of the exports of {exporter} were stripped"
                );
                let remedy = format!("strip {exporter} with --strip-debug, which keeps the names");
                findings.push(Finding::new(Rule::UndefinedSymbol, Verdict::Unknown, name, message, remedy));
                continue;
            }
            Provider::Missing => (
                format!("unknown symbol {name}: neither {release} nor a needed image exports it"),
                "name the driver image that exports it in `needs`, or use a driver version for this kernel"
                    .to_owned(),
            ),
            Provider::Replaced { module, image } => {
                let owner = image.unwrap_or("this payload");
                (
                    format!(
                        "unknown symbol {name}: the kernel's {module} exports it, but the {module} of \
                         {owner} replaces it and does not"
                    ),
                    format!("rebuild it against the exposed headers of {owner}"),
                )
            }
        };
        // A missing weak symbol has address 0, which is out of range of the module's PC-relative relocations.
        findings.push(if import.symbol.weak {
            let finding = Finding::new(Rule::Relocation, Verdict::Refused, name, message, remedy);
            finding.with_kernel_message("ENOEXEC", "overflow in relocation type 275")
        } else {
            let finding = Finding::new(Rule::UndefinedSymbol, Verdict::Refused, name, message, remedy);
            finding.with_kernel_message("ENOENT", format!("Unknown symbol {name} (err -2)"))
        });
    }
    if unknown > 0 {
        let message = format!(
            "the header set has no Module.symvers to find the exporters of needed symbols ({unknown})"
        );
        let remedy = format!("provide the Module.symvers of {release}'s own build with its header set");
        let rule = Rule::UndefinedSymbol;
        findings.push(Finding::new(rule, Verdict::Unknown, "Module.symvers", message, remedy));
    }
}
