//! Rules of the kernel's loader, grouped by subject. A rule examines one module and adds its findings.

mod btf;
mod conflict;
mod kernel;
pub(crate) mod layout;
mod license;
mod namespace;
mod object;
mod signature;
mod symbol_version;
mod undefined_symbol;
mod vermagic;

use std::{cell::OnceCell, collections::BTreeMap};

use crate::{
    Difference, Finding, KernelFacts, Module, Rule, Verdict, btf::Fit, resolve::Import, taint::InheritedTaint,
};

/// A module with the context that rules need.
pub(crate) struct Subject<'a> {
    pub kernel: &'a KernelFacts,
    pub module: &'a Module,
    /// Symbols that the module needs, with their providers.
    pub imports: &'a [Import<'a>],
    /// Symbols that earlier modules of the payload export, each with the name of that module.
    pub exported_earlier: &'a BTreeMap<&'a str, &'a str>,
    /// Taint of a proprietary license that the module inherits, or may inherit.
    pub taint: Option<&'a InheritedTaint>,
    /// Result of [`Self::agrees_with_headers`], which findings about many symbols use.
    pub agreement: OnceCell<bool>,
}

impl Subject<'_> {
    /// Finding about a module without vermagic or symbol versions (`try_to_force_load`). With `CONFIG_MODULE_FORCE_LOAD` the
    /// kernel skips the check and sets its taint `F`. Otherwise the kernel refuses the module.
    pub fn force_load(&self, rule: Rule, subject: &str, message: &str, remedy: String) -> Finding {
        let (verdict, consequence) = if self.kernel.config.is_set("MODULE_FORCE_LOAD") {
            (Verdict::Loads, "the kernel skips the check and taints itself (CONFIG_MODULE_FORCE_LOAD)")
        } else {
            (Verdict::Refused, "the kernel refuses it")
        };
        let finding = Finding::new(rule, verdict, subject, format!("{message}: {consequence}"), remedy);
        if verdict == Verdict::Loads { finding.unproven() } else { finding }
    }

    /// Advice for a module that differs from the kernel. A module that agrees with the header set was built against it. In that
    /// case the header set belongs to another kernel build.
    pub fn rebuild_remedy(&self) -> String {
        let release = &self.kernel.release;
        if self.agrees_with_headers() {
            format!(
                "install the headers of exactly this build of {release}, and rebuild it: the given header set, which it was \
                 built against, belongs to another build"
            )
        } else {
            format!("rebuild it against the header set of {release}")
        }
    }

    /// Whether the module's vermagic and its version of `module_layout` are those of the header set.
    pub fn agrees_with_headers(&self) -> bool {
        *self.agreement.get_or_init(|| {
            let (kernel, module, layout) = (self.kernel, self.module, "module_layout");
            let header_crc = kernel.symbols.as_ref().and_then(|table| table.get(layout)).map(|row| row.crc);
            let module_crc = module.versions_for(kernel).and_then(|versions| versions.get(layout).copied());
            let magic = module.vermagic().map(|magic| kernel.header_vermagic().compare(magic, false));
            magic == Some(Difference::None) && module_crc.is_some() && module_crc == header_crc
        })
    }

    /// Whether the module's type information continues the kernel's. `None` if no source has the kernel's type information, or if
    /// the kernel matches the types by name ([`Self::relocates_btf`]).
    pub fn btf_fit(&self) -> Option<Fit> {
        let btf = self.module.btf.as_ref()?.as_ref().ok()?;
        let base = self.kernel.beyond_headers.btf_base.as_ref().filter(|_| !self.relocates_btf())?;
        Some(btf.fit(base.value))
    }

    /// Whether the kernel matches the module's types by name, as for modules with `.BTF.base` since Linux 6.11 and RHEL 9.6.
    pub fn relocates_btf(&self) -> bool {
        self.module.btf_base && (self.kernel.since(6, 11) || self.kernel.is_rhel_9_since(570))
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
const RULES: [Check; 29] = [
    kernel::modules,
    kernel::load_pin,
    kernel::decompression,
    signature::check,
    object::machine,
    object::sections,
    layout::section_names,
    layout::symbol_names,
    layout::placement,
    layout::this_module,
    layout::header_overlaps,
    object::module_size,
    vermagic::check,
    kernel::livepatch,
    kernel::supported,
    layout::plts,
    layout::writable_executable,
    layout::per_cpu,
    layout::export_flags,
    undefined_symbol::check,
    symbol_version::check,
    license::check,
    namespace::check,
    layout::relocations,
    conflict::export,
    conflict::built_in,
    layout::duplicate_names,
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
