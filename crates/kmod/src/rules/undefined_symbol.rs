//! Pure: somebody exports each symbol that the module needs (`simplify_symbols` in `kernel/module/main.c`).

use super::Subject;
use crate::{Finding, Rule, Verdict, resolve::Provider};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let mut untold = 0_usize;
    for import in subject.imports.iter().filter(|import| !import.symbol.weak) {
        let name = &import.symbol.name;
        let (message, remedy) = match &import.provider {
            Provider::Payload { .. } | Provider::Needed { .. } | Provider::Kernel(_) | Provider::Named => {
                continue;
            }
            Provider::Untold => {
                untold += 1;
                continue;
            }
            Provider::Nobody => (
                format!(
                    "unknown symbol {name}: neither {} nor a needed image exports it",
                    subject.kernel.release
                ),
                "name the driver image that exports it in `needs`, or use a driver version for this kernel"
                    .to_owned(),
            ),
            Provider::Replaced { module, image } => {
                let owner = image.map_or("this payload".to_owned(), str::to_owned);
                (
                    format!(
                        "unknown symbol {name}: the kernel's {module} exports it, but the {module} of {owner} \
                         takes its place and does not"
                    ),
                    format!("rebuild it against the exposed headers of {owner}"),
                )
            }
        };
        findings.push(Finding {
            rule: Rule::UndefinedSymbol,
            verdict: Verdict::Refused,
            subject: name.clone(),
            message,
            found: None,
            wanted: None,
            remedy,
        });
    }
    if untold > 0 {
        findings.push(Finding {
            rule: Rule::UndefinedSymbol,
            verdict: Verdict::Unknown,
            subject: "Module.symvers".to_owned(),
            message: format!("the header set has no Module.symvers to look up needed symbols in ({untold})"),
            found: None,
            wanted: None,
            remedy: format!(
                "bring the Module.symvers of {}'s own build with its header set",
                subject.kernel.release
            ),
        });
    }
}
