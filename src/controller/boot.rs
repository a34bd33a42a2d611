//! Adapter: boot checks with QEMU and the kernel image that the target's family names.

use std::path::PathBuf;

use tokio_util::sync::CancellationToken;

use super::{BootCheck, BootChecker, TargetError, retry::with_retry};
use crate::{
    boot::{self, BootRequest},
    headers::{Fetcher, KernelImageLookup},
    kmod::BootReport,
};

/// Boots kernels with QEMU.
#[derive(Clone, Debug)]
pub struct QemuBoot {
    /// Fetches the kernels.
    pub fetcher: Fetcher,
    /// The definitions directory, to which a family's paths are relative.
    pub root: PathBuf,
    /// The static `driver-entrypoint`; `None` for the one beside farrier's own program.
    pub entrypoint: Option<PathBuf>,
    /// Where it is remembered that KVM does not work on this machine.
    pub memory: PathBuf,
    /// Ends a boot at once.
    pub cancel: CancellationToken,
}

#[async_trait::async_trait]
impl BootChecker for QemuBoot {
    async fn boot_check(&self, check: &BootCheck<'_>) -> Result<BootReport, TargetError> {
        let &BootCheck { target, family, payload, ref modules, needed } = check;
        // First what costs nothing to find out.
        let entrypoint = boot::find_entrypoint(self.entrypoint.as_deref())?;
        let fetch = || self.fetcher.kernel_image(family, &self.root, target);
        let kernel = match with_retry("fetch kernel image", &self.cancel, fetch).await? {
            KernelImageLookup::Found(image) => *image,
            KernelImageLookup::Missing { looked_for, hint } => {
                return Err(TargetError::KernelImageMissing { looked_for, hint });
            }
        };
        let mut request = BootRequest::new(kernel, payload.to_owned(), modules.clone(), entrypoint);
        request.needed = needed.to_vec();
        request.memory = Some(self.memory.clone());
        Ok(boot::boot_check(&request, &self.cancel).await?)
    }
}
