//! Pure: what is known about a kernel, and who said so.

use std::collections::BTreeSet;

use derive_more::Display;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{BtfBase, InTree, KernelConfig, SymbolTable, Vermagic};
use crate::{Architecture, KernelRelease};

/// What is known about a kernel.
#[derive(Clone, Debug)]
pub struct KernelFacts {
    /// The release, from `include/generated/utsrelease.h` or `include/config/kernel.release`.
    pub release: KernelRelease,
    /// Architecture.
    pub arch: Architecture,
    /// `include/config/auto.conf`, parsed.
    pub config: KernelConfig,
    /// `Module.symvers`; `None` when the header set has none.
    pub symbols: Option<SymbolTable>,
    /// Does its `include/linux/vermagic.h` ask for `CONFIG_PREEMPT_RT` before anything else?
    pub real_time_first: bool,
    /// What a header set cannot tell.
    pub beyond_headers: BeyondHeaders,
}

/// What only the kernel itself can tell: its image, its own modules, or the machine that runs it.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct BeyondHeaders {
    /// `sizeof(struct module)` in bytes.
    pub module_size: Option<Known<u64>>,
    /// The `vermagic` of one of the kernel's own modules.
    pub vermagic: Option<Known<String>>,
    /// Names that the kernel image exports, without those of its modules.
    pub exports: Option<Known<BTreeSet<String>>>,
    /// The kernel's own modules.
    pub in_tree: Option<Known<InTree>>,
    /// Does the loader refuse modules without a valid signature?
    pub enforces_signatures: Option<Known<bool>>,
    /// Keys whose signatures the kernel takes, by their identifiers as `modinfo` shows them (`6A:0F:...`), as the site's
    /// owners say. Others may be among the kernel's keys too.
    pub trusted_keys: BTreeSet<String>,
    /// How large the kernel's own type information is, from which that of modules counts on.
    pub btf_base: Option<Known<BtfBase>>,
}

/// A fact and who said it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Known<T> {
    /// The fact.
    pub value: T,
    /// Who said it.
    pub source: FactSource,
}

/// Sources of truth about a kernel, beside its header set.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema, Display)]
#[serde(rename_all = "camelCase")]
pub enum FactSource {
    /// The type information (BTF) in the kernel image.
    #[display("the kernel image's BTF")]
    Btf,
    /// The kernel image's own table of exported symbols.
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
    /// The machine that runs the kernel.
    #[display("the running kernel")]
    Host,
    /// The kernel's configuration.
    #[display("the kernel's configuration")]
    Config,
}

impl KernelFacts {
    /// What a release and a configuration tell; everything else can be added.
    pub fn new(release: KernelRelease, arch: Architecture, config: KernelConfig) -> Self {
        let (real_time_first, beyond_headers) = (false, BeyondHeaders::default());
        Self { release, arch, config, symbols: None, real_time_first, beyond_headers }
    }

    /// The vermagic that a module built against this header set gets, and that the kernel asks for.
    /// One of the kernel's own modules tells it exactly, hash of the layout seed included; else the
    /// configuration tells most of it.
    pub fn expected_vermagic(&self) -> Vermagic {
        match &self.beyond_headers.vermagic {
            Some(known) => Vermagic::exact(&known.value),
            None => Vermagic::expected(&self.release, self.arch, &self.config, self.real_time_first),
        }
    }

    /// Does the loader refuse modules without a valid signature? `None` where neither the configuration nor the
    /// machine says so: a boot parameter or lockdown can still make it.
    pub fn enforces_signatures(&self) -> Option<Known<bool>> {
        if self.config.is_set("MODULE_SIG_FORCE") {
            return Some(Known { value: true, source: FactSource::Config });
        }
        self.beyond_headers.enforces_signatures.clone()
    }

    /// Is the kernel's version at least this one?
    pub(super) fn since(&self, major: u64, minor: u64) -> bool {
        let version = self.release.version();
        (version.major, version.minor) >= (major, minor)
    }
}
