//! Boot checks for builds, with the kernel image of the target's kernel family.

use std::{path::PathBuf, sync::Arc};

use async_trait::async_trait;
use farrier_builder::services::{
    BootCheck, BootCheckError, BootChecker, BuildError, ProblemKind, Result, with_retry,
};
use farrier_core::kernel::Architecture;
use farrier_inputs::{Fetcher, KernelImageLookup};
use kmod::BootReport;
use tokio_util::sync::CancellationToken;

use crate::{BootError, BootRequest, boot_check, find_init};

/// Boots kernels with QEMU.
#[derive(Clone, Debug)]
pub struct QemuBoot {
    pub fetcher: Fetcher,
    /// The static `driver-entrypoint`; `None` for the one next to farrier's executable.
    pub entrypoint: Option<PathBuf>,
    /// Directory that records that KVM does not work on this machine.
    pub kvm_state_dir: PathBuf,
    pub cancel: CancellationToken,
}

#[async_trait]
impl BootChecker for QemuBoot {
    async fn ensure_can_boot(&self, arch: Architecture) -> Result<()> {
        find_init(self.entrypoint.as_deref(), arch).await?;
        Ok(())
    }

    async fn boot_check(&self, check: &BootCheck<'_>) -> Result<BootReport> {
        let &BootCheck { target, family, payload, ref modules, needed, ref decompression } = check;
        // Fail before the kernel image is fetched.
        let entrypoint = find_init(self.entrypoint.as_deref(), target.arch).await?;
        let fetcher = self.fetcher.in_use();
        let fetch = || fetcher.kernel_images().find(family, target);
        let kernel = match with_retry("fetch kernel image", &self.cancel, fetch).await? {
            KernelImageLookup::Found(image) => *image,
            KernelImageLookup::Missing { looked_for, hint } => {
                let message = format!("cannot boot the kernel: there is no {looked_for}");
                return Err(BuildError::problem(ProblemKind::Unmet, message, Some(hint)));
            }
        };
        let mut request = BootRequest::new(kernel, payload.to_owned(), modules.clone(), entrypoint);
        request.needed = needed.to_vec();
        request.kvm_state_dir = Some(self.kvm_state_dir.clone());
        request.decompression = Arc::clone(decompression);
        Ok(boot_check(&request, &self.cancel).await?)
    }
}

impl From<BootError> for BuildError {
    fn from(error: BootError) -> Self {
        let (is_permanent, is_caused_by_deadline) = match &error {
            BootError::Payload(error) => (error.is_permanent(), error.is_caused_by_deadline()),
            _ => (false, false),
        };
        let hint = error.hint();
        Self::Boot(BootCheckError { error: Box::new(error), hint, is_permanent, is_caused_by_deadline })
    }
}
