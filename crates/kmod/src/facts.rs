//! Facts about a kernel, with their sources.

use std::collections::{BTreeMap, BTreeSet};

use derive_more::Display;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{Btf, BtfBase, InTree, KernelConfig, Module, SymbolTable, Vermagic, VermagicHeaders};
use crate::{Architecture, KernelRelease};

/// Facts about a kernel.
#[derive(Clone, Debug)]
pub struct KernelFacts {
    /// Release, from `include/generated/utsrelease.h` or `include/config/kernel.release`.
    pub release: KernelRelease,
    /// Processor architecture.
    pub arch: Architecture,
    /// Parsed `include/config/auto.conf`.
    pub config: KernelConfig,
    /// Parsed `Module.symvers`; `None` if the header set has none.
    pub symbols: Option<SymbolTable>,
    /// The headers that define the kernel's vermagic; `None` if the header set lacks them.
    pub vermagic_headers: Option<VermagicHeaders>,
    /// Facts that a header set does not contain.
    pub beyond_headers: ExtraKernelFacts,
}

/// Facts that only the kernel itself reveals: its image, its own modules, or the machine that runs it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct ExtraKernelFacts {
    /// `sizeof(struct module)` in bytes.
    pub module_size: Option<Known<u64>>,
    /// `vermagic` of one of the kernel's own modules.
    pub vermagic: Option<Known<String>>,
    /// Versions of the symbols that one of the kernel's own modules uses, `module_layout` among them.
    #[serde(default)]
    pub symbol_versions: Option<Known<BTreeMap<String, u32>>>,
    /// User and host that compiled the kernel, from its banner: `debian-kernel@lists.debian.org`.
    #[serde(default)]
    pub builder: Option<Known<String>>,
    /// Names of the symbols that the kernel image exports, without the exports of its modules.
    pub exports: Option<Known<BTreeSet<String>>>,
    /// Modules that come with the kernel.
    pub in_tree: Option<Known<InTree>>,
    /// Whether the loader refuses modules without a valid signature.
    pub enforces_signatures: Option<Known<bool>>,
    /// Identifiers of keys that the kernel trusts, according to the site's owners, as `modinfo` shows them
    /// (`6A:0F:...`). The kernel may trust further keys.
    pub trusted_keys: BTreeSet<String>,
    /// Sizes of the kernel's own type information, where the numbering of its modules' BTF starts.
    pub btf_base: Option<Known<BtfBase>>,
}

/// A fact and its source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known<T> {
    /// The fact itself.
    pub value: T,
    /// Source of the fact.
    pub source: FactSource,
}

/// Source of facts about a kernel, in addition to its header set.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema, Display)]
#[serde(rename_all = "camelCase")]
pub enum FactSource {
    /// Type information (BTF) in the kernel image.
    #[display("the kernel image's BTF")]
    Btf,
    /// Table of exported symbols in the kernel image.
    #[display("the kernel image")]
    KernelImage,
    /// `System.map`.
    #[display("System.map")]
    SystemMap,
    /// One of the kernel's own modules, by name.
    #[display("the kernel's own {_0}")]
    InTreeModule(String),
    /// `modules.dep`, `modules.order` and `modules.builtin` of the kernel's module directory.
    #[display("the kernel's module index")]
    ModuleIndex,
    /// Machine that runs the kernel.
    #[display("the running kernel")]
    Host,
    /// The kernel's configuration.
    #[display("the kernel's configuration")]
    Config,
}

impl ExtraKernelFacts {
    /// Adds facts from the kernel's type information. The size of `struct module` in it takes precedence over the size in one module.
    pub fn add_btf(&mut self, btf: &Btf<'_>, source: &FactSource) {
        let known = |value| Known { value, source: source.clone() };
        self.btf_base = Some(Known { value: btf.base(), source: source.clone() });
        self.module_size = btf.size_of_struct("module").map(known).or(self.module_size.take());
    }

    /// Adds facts from one of the kernel's own modules.
    pub fn add_own_module(&mut self, module: Module) {
        let source = FactSource::InTreeModule(module.name.clone());
        let size = Known { value: module.this_module_size, source: source.clone() };
        self.module_size.get_or_insert(size);
        self.vermagic =
            module.vermagic().map(|text| Known { value: text.to_owned(), source: source.clone() });
        self.symbol_versions = module.versions.map(|value| Known { value, source });
    }
}

impl KernelFacts {
    /// Creates facts from a release and a configuration; other facts can be added.
    pub fn new(release: KernelRelease, arch: Architecture, config: KernelConfig) -> Self {
        let beyond_headers = ExtraKernelFacts::default();
        Self { release, arch, config, symbols: None, vermagic_headers: None, beyond_headers }
    }

    /// Returns the vermagic that the kernel requires, from the best available source: one of the kernel's own modules, the headers
    /// that define the vermagic, or else the configuration.
    pub fn expected_vermagic(&self) -> Vermagic {
        let exact = self.beyond_headers.vermagic.as_ref().map(|known| Vermagic::exact(&known.value));
        exact.unwrap_or_else(|| self.header_vermagic())
    }

    /// Returns the vermagic of modules that are built against this header set, as far as the headers reveal it.
    pub(super) fn header_vermagic(&self) -> Vermagic {
        let headers = self.vermagic_headers.as_ref();
        headers
            .and_then(|headers| headers.evaluate(&self.release, &self.config))
            .unwrap_or_else(|| Vermagic::expected(&self.release, self.arch, &self.config))
    }

    /// Whether the loader refuses modules without a valid signature. `None` if neither the configuration nor the machine
    /// decides. A boot parameter or lockdown may then still enforce signatures.
    pub fn enforces_signatures(&self) -> Option<Known<bool>> {
        if self.config.is_set("MODULE_SIG_FORCE") || self.is_locked_down() {
            return Some(Known { value: true, source: FactSource::Config });
        }
        self.beyond_headers.enforces_signatures.clone()
    }

    /// Whether the configuration locks the kernel down (`LOCK_DOWN_KERNEL_FORCE_*`), so that it refuses unsigned modules
    /// (`module_sig_check` in `kernel/module/signing.c`).
    pub(super) fn is_locked_down(&self) -> bool {
        let forced = ["LOCK_DOWN_KERNEL_FORCE_INTEGRITY", "LOCK_DOWN_KERNEL_FORCE_CONFIDENTIALITY"];
        // RHEL 8 has its own lockdown, which this option turns on.
        if self.config.is_set("LOCK_DOWN_MANDATORY") {
            return true;
        }
        self.can_lock_down() && forced.iter().any(|name| self.config.is_set(name))
    }

    /// Whether the kernel locks itself down under Secure Boot. Linux does not, but many distributions have a patch with one of these
    /// options (Ubuntu: without `EFI`).
    pub(super) fn locks_down_under_secure_boot(&self) -> bool {
        let options = ["LOCK_DOWN_IN_EFI_SECURE_BOOT", "LOCK_DOWN_IN_SECURE_BOOT"];
        self.can_lock_down() && options.iter().any(|name| self.config.is_set(name))
    }

    /// Whether the kernel starts the security module that can lock it down.
    fn can_lock_down(&self) -> bool {
        let starts_early = self.config.is_set("SECURITY_LOCKDOWN_LSM_EARLY");
        self.config.is_set("SECURITY_LOCKDOWN_LSM") && (starts_early || self.has_security_module("lockdown"))
    }

    /// Whether the configuration starts a security module (`CONFIG_LSM`). Without that option, the kernel starts all security
    /// modules that were compiled.
    pub(super) fn has_security_module(&self, name: &str) -> bool {
        self.config.get("LSM").is_none_or(|list| list.split(',').any(|module| module == name))
    }

    /// Whether this is a kernel of RHEL 9, or of a rebuild of RHEL 9, with at least this build number. The build number of
    /// `5.14.0-503.40.1.el9_5.x86_64` is 503. These kernels contain many changes of later kernels.
    pub(super) fn is_rhel_9_since(&self, build: u64) -> bool {
        let text = self.release.as_str();
        let number = text.strip_prefix("5.14.0-").filter(|rest| rest.contains(".el9"));
        let number = number.and_then(|rest| rest.split('.').next()?.parse().ok());
        number.is_some_and(|number: u64| number >= build)
    }

    /// Whether the kernel checks the size of `struct module` and the number of some sections: since Linux 6.4 (commit
    /// f3b93547b91a) and RHEL 9.5.
    pub(super) fn checks_section_sanity(&self) -> bool {
        self.since(6, 4) || self.is_rhel_9_since(503)
    }

    /// Whether the kernel has the checks of Linux 6.18 that Linux 6.12 has since its stable update 6.12.117.
    pub(super) fn has_checks_of_6_18(&self) -> bool {
        let version = self.release.version();
        self.since(6, 18) || (version.major, version.minor) == (6, 12) && version.patch >= 117
    }

    /// Whether the kernel's version is at least this one.
    pub(super) fn since(&self, major: u64, minor: u64) -> bool {
        let version = self.release.version();
        (version.major, version.minor) >= (major, minor)
    }
}
