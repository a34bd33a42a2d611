//! Pure: rules of the kernel's loader, grouped by subject. A rule examines one module and adds its findings.

mod btf;
mod conflict;
mod kernel;
mod layout;
mod licence;
mod namespace;
mod object;
mod signature;
mod symbol_version;
mod undefined_symbol;
mod vermagic;

use std::collections::BTreeMap;

use crate::{Finding, KernelFacts, Module, Rule, Verdict, resolve::Import, taint::InheritedTaint};

/// A module with the context that rules need.
pub(crate) struct Subject<'a> {
    pub kernel: &'a KernelFacts,
    pub module: &'a Module,
    /// Symbols that the module needs, with their providers.
    pub imports: &'a [Import<'a>],
    /// Symbols that modules of the payload export that are loaded before this one, with those modules' names.
    pub earlier: &'a BTreeMap<&'a str, &'a str>,
    /// Taint of a proprietary license that the module inherits, or may inherit.
    pub taint: Option<&'a InheritedTaint>,
}

impl Subject<'_> {
    /// Verdict for a module without vermagic or symbol versions (`try_to_force_load`). With `CONFIG_MODULE_FORCE_LOAD` the
    /// kernel skips the check and taints itself, so whether the module fits is unknown. Otherwise the kernel refuses the
    /// module.
    pub fn force_load_verdict(&self) -> Verdict {
        if self.kernel.config.is_set("MODULE_FORCE_LOAD") { Verdict::Unknown } else { Verdict::Refused }
    }

    /// Finding about symbols that cannot be resolved without `Module.symvers`.
    pub fn symvers_needed(&self, rule: Rule, message: String) -> Finding {
        let remedy = format!("provide the Module.symvers of {}, or boot the kernel", self.kernel.release);
        Finding::new(rule, Verdict::Unknown, "Module.symvers", message, remedy)
    }
}

/// Function that checks one rule.
type Check = fn(&Subject<'_>, &mut Vec<Finding>);

/// All rules, in the loader's order.
const RULES: [Check; 22] = [
    kernel::modules,
    kernel::load_pin,
    signature::check,
    object::machine,
    object::sections,
    object::module_size,
    vermagic::check,
    kernel::livepatch,
    layout::plts,
    layout::writable_code,
    layout::per_cpu,
    layout::export_flags,
    undefined_symbol::check,
    symbol_version::check,
    licence::check,
    namespace::check,
    layout::relocations,
    conflict::export,
    conflict::built_in,
    layout::repeated,
    btf::check,
    kernel::control_flow,
];

/// Applies all rules to a module.
pub(super) fn apply(subject: &Subject<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for rule in RULES {
        rule(subject, &mut findings);
    }
    findings
}
