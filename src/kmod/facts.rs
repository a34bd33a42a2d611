//! Pure: what a header set says about its kernel.

use super::{KernelConfig, SymbolTable, Vermagic};
use crate::kernel::{Architecture, KernelRelease};

/// What a header set says about its kernel.
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
}

impl KernelFacts {
    /// The vermagic that a module built against this header set gets, and that the kernel asks for.
    pub fn expected_vermagic(&self) -> Vermagic {
        Vermagic::expected(&self.release, self.arch, &self.config)
    }
}
