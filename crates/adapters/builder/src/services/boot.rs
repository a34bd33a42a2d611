//! The boot check of a build.

use std::{
    error::Error,
    fmt,
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_core::kernel::{Architecture, KernelFamily, KernelTarget};
use farrier_payload::DecompressionBudget;
use kmod::BootReport;

use super::error::Result;

/// A boot check to run.
#[derive(Clone, Debug)]
pub struct BootCheck<'a> {
    /// The kernel to boot.
    pub target: &'a KernelTarget,
    /// The kernel's family, which names the source of the kernel image.
    pub family: &'a KernelFamily,
    /// Directory of the payload.
    pub payload: &'a Path,
    /// The modules to load, as paths relative to `payload`, in load order.
    pub modules: Vec<String>,
    /// Directories with modules of needed images, which can be loaded first.
    pub needed: &'a [PathBuf],
    /// Budget for decompressing modules.
    pub decompression: Arc<DecompressionBudget>,
}

/// Boots kernels in throwaway virtual machines and loads modules there.
#[async_trait::async_trait]
pub trait BootChecker: Send + Sync {
    /// Fails fast if no kernel of this architecture can be booted.
    async fn ensure_can_boot(&self, _arch: Architecture) -> Result<()> {
        Ok(())
    }

    /// Returns the outcome of each module. A module that the kernel refuses is part of the report. A missing kernel
    /// image is an error, and so is a virtual machine that cannot be started.
    async fn boot_check(&self, check: &BootCheck<'_>) -> Result<BootReport>;
}

/// Reason why a boot check has no result.
#[derive(Debug)]
pub struct BootCheckError {
    /// The error of the boot checker.
    pub error: Box<dyn Error + Send + Sync>,
    pub hint: String,
    /// Whether the same build would fail again.
    pub is_permanent: bool,
    /// Whether the same build may succeed with a longer deadline.
    pub is_caused_by_deadline: bool,
}

impl fmt::Display for BootCheckError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl Error for BootCheckError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}
