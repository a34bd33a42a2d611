//! Pure: what a rule looks at.

use crate::{Finding, KernelFacts, Module, Rule, Verdict, resolve::Import};

/// A module, and what surrounds it.
pub(crate) struct Subject<'a> {
    pub kernel: &'a KernelFacts,
    pub module: &'a Module,
    /// What it needs, and who provides that.
    pub imports: &'a [Import<'a>],
    /// A module of the payload from which it inherits the taint of a proprietary licence, if it does.
    pub tainted_by: Option<&'a str>,
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
