//! Reads and sets the kernel that a boot loader boots by default, and the kernel that it boots once.

mod grub;
mod systemd_boot;

use std::path::Path;

use crate::{Error, Result};
use grub::Grub;
use systemd_boot::SystemdBoot;

/// Boots the default kernel, unless another kernel was chosen for the next boot only.
pub(crate) trait BootLoader {
    /// Returns the default kernel; `None` if the boot loader chooses by itself.
    fn default_kernel(&self) -> Result<Option<String>>;
    fn set_default(&self, release: &str) -> Result<()>;
    /// Returns the kernels that the boot loader has entries for.
    fn kernels(&self) -> Result<Vec<String>>;
    /// Returns the kernel that was chosen for the next boot only.
    fn next_kernel(&self) -> Result<Option<String>>;
    /// Makes the boot loader boot a kernel at the next boot only.
    fn boot_once(&self, release: &str) -> Result<()>;
    /// Makes the boot loader boot its default next.
    fn clear_next(&self) -> Result<()>;
    /// Makes the boot loader keep its default when packages of kernels are installed or replaced. `default` is the confirmed default.
    fn keep_default(&self, default: Option<&str>) -> Result<()>;
}

/// Returns the boot loader that started the host, else GRUB if it is installed.
pub(crate) fn detect(root: &Path) -> Result<Box<dyn BootLoader>> {
    if systemd_boot::started(root)? {
        return Ok(Box::new(SystemdBoot::new(root)));
    }
    Grub::find(root).map(|grub| Box::new(grub) as Box<dyn BootLoader>).ok_or(Error::NoBootLoader)
}
