//! Adapter: boot checks with QEMU, with the kernel image that the target's family names.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_core::kernel::{Architecture, KernelFamily, KernelTarget};
use kmod::BootReport;
use tokio_util::sync::CancellationToken;

use super::{
    error::{FindingKind, Result, TargetError},
    retry::with_retry,
};
use crate::{
    boot::{self, BootRequest},
    inputs::{Fetcher, KernelImageLookup},
    payload::DecompressionBudget,
};

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

/// Boots kernels with QEMU.
#[derive(Clone, Debug)]
pub struct QemuBoot {
    /// Fetches kernel images.
    pub fetcher: Fetcher,
    /// The static `driver-entrypoint`; `None` for the one next to farrier's executable.
    pub entrypoint: Option<PathBuf>,
    /// Directory that records that KVM does not work on this machine.
    pub memory: PathBuf,
    /// Cancels a boot check.
    pub cancel: CancellationToken,
}

#[async_trait::async_trait]
impl BootChecker for QemuBoot {
    async fn ensure_can_boot(&self, arch: Architecture) -> Result<()> {
        boot::find_init(self.entrypoint.as_deref(), arch).await?;
        Ok(())
    }

    async fn boot_check(&self, check: &BootCheck<'_>) -> Result<BootReport> {
        let &BootCheck { target, family, payload, ref modules, needed, ref decompression } = check;
        // Check cheap prerequisites first.
        let entrypoint = boot::find_init(self.entrypoint.as_deref(), target.arch).await?;
        let fetcher = self.fetcher.in_use();
        let fetch = || fetcher.kernel_images().find(family, target);
        let kernel = match with_retry("fetch kernel image", &self.cancel, fetch).await? {
            KernelImageLookup::Found(image) => *image,
            KernelImageLookup::Missing { looked_for, hint } => {
                let message = format!("boot the kernel: there is no {looked_for}");
                return Err(TargetError::finding(FindingKind::Unmet, message, Some(hint)));
            }
        };
        let mut request = BootRequest::new(kernel, payload.to_owned(), modules.clone(), entrypoint);
        request.needed = needed.to_vec();
        request.memory = Some(self.memory.clone());
        request.decompression = Arc::clone(decompression);
        Ok(boot::boot_check(&request, &self.cancel).await?)
    }
}
