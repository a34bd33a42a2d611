//! Only modules under a compatible license may use `EXPORT_SYMBOL_GPL` symbols (`resolve_symbol` and
//! `inherit_taint` in `kernel/module/main.c`).

use super::Subject;
use crate::{Finding, Rule, Verdict, resolve::Provider, taint::InheritedTaint};

pub(super) fn check(subject: &Subject<'_>, findings: &mut Vec<Finding>) {
    let module = subject.module;
    let license = module.field("license").unwrap_or("unspecified");
    let (verdict, reason) = match (module.is_gpl_compatible(), subject.taint) {
        (false, _) => (Verdict::Refused, "but the module's license is not compatible".to_owned()),
        (true, Some(InheritedTaint { source, known: true, weak })) => {
            let reason = format!("but the module also uses symbols of {source}, which is proprietary");
            // The outcome depends on the order of the symbols: the kind that the kernel resolves first excludes the other kind.
            if *weak {
                (Verdict::Unknown, format!("{reason}, if it finds them"))
            } else {
                (Verdict::Refused, reason)
            }
        }
        (true, Some(InheritedTaint { source, known: false, .. })) => (
            Verdict::Unknown,
            format!("and no source has the license of {source}, whose symbols it also uses"),
        ),
        (true, None) => return,
    };
    let name_only =
        subject.imports.iter().filter(|import| matches!(import.provider, Provider::NameOnly)).count();
    if name_only > 0 {
        let message = format!(
            "no source shows which of the symbols that the module needs are for GPL modules only ({name_only})"
        );
        findings.push(subject.symvers_needed(Rule::License, message));
    }
    for import in subject.imports {
        if !import.provider.export().is_some_and(|export| export.gpl_only) {
            continue;
        }
        // If the kernel resolves a weak GPL-only symbol first, it rejects the symbols of the proprietary module.
        let verdict = match subject.taint {
            _ if !import.symbol.weak => verdict,
            Some(taint) if module.is_gpl_compatible() && !taint.weak => Verdict::Unknown,
            _ => continue,
        };
        let name = &import.symbol.name;
        let exporter = import.provider.describe();
        let message = format!("symbol {name}, exported by {exporter}, is for GPL modules only, {reason}");
        findings.push(if verdict == Verdict::Unknown {
            let remedy =
                "provide the needed image's modules beside its symbol table, which does not list licenses";
            Finding::new(Rule::License, verdict, name, message, remedy)
        } else {
            let remedy = "use the vendor's open modules, or a driver version that does not use this symbol";
            let finding = Finding::new(Rule::License, verdict, name, message, remedy);
            let kernel_message = format!("Unknown symbol {name} (err -2)");
            finding
                .found(license)
                .wanted("a GPL-compatible license")
                .with_kernel_message("ENOENT", kernel_message)
        });
    }
}
