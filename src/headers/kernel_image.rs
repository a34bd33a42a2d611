//! Adapter: kernel images and the kernel's own modules, from packages or from a file system.

use std::path::PathBuf;

use crate::kernel::{Architecture, KernelRelease};

/// A kernel image with what comes with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KernelImage {
    /// The release.
    pub release: KernelRelease,
    /// Architecture.
    pub arch: Architecture,
    /// The bootable image (`vmlinuz`).
    pub vmlinuz: PathBuf,
    /// `System.map`.
    pub system_map: Option<PathBuf>,
    /// The kernel's own module directory (`/lib/modules/<release>`), with `modules.dep` or without it.
    pub modules: Option<PathBuf>,
    /// Packages and versions, or files: for provenance.
    pub origin: Vec<String>,
}
