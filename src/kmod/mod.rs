//! Pure: kernel modules: ELF, modinfo, vermagic, symbol versions, and what the loader would say.

use crate::kernel::{Architecture, KernelRelease};

/// What a header set says about its kernel.
#[derive(Clone, Debug)]
pub struct KernelFacts {
    /// The release, from `include/config/kernel.release` or `utsrelease.h`.
    pub release: KernelRelease,
    /// Architecture.
    pub arch: Architecture,
    /// `include/config/auto.conf`, parsed.
    pub config: KernelConfig,
    /// `Module.symvers`; `None` when the header set has none.
    pub symbols: Option<SymbolTable>,
}

/// The kernel's configuration.
#[derive(Clone, Debug, Default)]
pub struct KernelConfig;

/// A `Module.symvers`.
#[derive(Clone, Debug, Default)]
pub struct SymbolTable;
