//! Pure: the loader's rules, one file each. A rule looks at one module and adds what it finds.

mod btf;
mod built_in;
mod duplicate_export;
mod licence;
mod machine;
mod module_size;
mod namespace;
mod sections;
mod signature;
mod symbol_version;
mod undefined_symbol;
mod vermagic;

use super::{Finding, KernelFacts, Module, resolve::Import};

/// What a rule looks at.
pub(super) struct Subject<'a> {
    /// The kernel.
    pub kernel: &'a KernelFacts,
    /// The module.
    pub module: &'a Module,
    /// What it needs, and who provides that.
    pub imports: &'a [Import<'a>],
    /// A module of the payload from which it inherits the taint of a proprietary licence, if it does.
    pub tainted_by: Option<&'a str>,
}

/// A rule.
type Rule = fn(&Subject<'_>, &mut Vec<Finding>);

/// All rules, in the order in which the loader meets them.
const RULES: [Rule; 12] = [
    signature::check,
    machine::check,
    sections::check,
    module_size::check,
    vermagic::check,
    undefined_symbol::check,
    symbol_version::check,
    licence::check,
    namespace::check,
    duplicate_export::check,
    built_in::check,
    btf::check,
];

/// What all rules find.
pub(super) fn apply(subject: &Subject<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for rule in RULES {
        rule(subject, &mut findings);
    }
    findings
}

/// What the kernel does with a module whose vermagic or symbol versions are missing: with
/// `CONFIG_MODULE_FORCE_LOAD` it loads it unchecked and taints itself, else it refuses (`try_to_force_load`).
fn forced(kernel: &KernelFacts) -> super::Verdict {
    if kernel.config.is_set("MODULE_FORCE_LOAD") { super::Verdict::Unknown } else { super::Verdict::Refused }
}
