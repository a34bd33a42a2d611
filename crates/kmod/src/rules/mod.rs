//! Pure: the loader's rules, one file each. A rule looks at one module and adds what it finds.

mod btf;
mod conflict;
mod licence;
mod namespace;
mod object;
mod signature;
mod symbol_version;
mod undefined_symbol;
mod vermagic;

use crate::{Finding, KernelFacts, Module, Rule, Verdict, resolve::Import, taint::InheritedTaint};

/// A module, and what surrounds it.
pub(crate) struct Subject<'a> {
    pub kernel: &'a KernelFacts,
    pub module: &'a Module,
    /// What it needs, and who provides that.
    pub imports: &'a [Import<'a>],
    /// The taint of a proprietary licence that it inherits, or may.
    pub taint: Option<&'a InheritedTaint>,
}

impl Subject<'_> {
    /// What the kernel does with a module whose vermagic or symbol versions are missing: with
    /// `CONFIG_MODULE_FORCE_LOAD` it loads it unchecked and taints itself, else it refuses (`try_to_force_load`).
    pub fn forced(&self) -> Verdict {
        if self.kernel.config.is_set("MODULE_FORCE_LOAD") { Verdict::Unknown } else { Verdict::Refused }
    }

    /// A finding about symbols of which it is not known enough, as there is no `Module.symvers`.
    pub fn without_symbol_table(&self, rule: Rule, message: String) -> Finding {
        let remedy = format!("bring the Module.symvers of {}, or boot it", self.kernel.release);
        Finding::new(rule, Verdict::Unknown, "Module.symvers", message, remedy)
    }
}

/// How a rule is checked.
type Check = fn(&Subject<'_>, &mut Vec<Finding>);

/// All rules, in the order in which the loader meets them.
const RULES: [Check; 12] = [
    signature::check,
    object::machine,
    object::sections,
    object::module_size,
    vermagic::check,
    undefined_symbol::check,
    symbol_version::check,
    licence::check,
    namespace::check,
    conflict::export,
    conflict::built_in,
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
