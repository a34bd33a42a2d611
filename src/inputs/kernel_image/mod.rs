//! Adapter: kernel images and the kernel's own modules, from packages or from a file system.

mod facts;
mod fetch;
pub mod host;

use std::path::{Path, PathBuf};

use super::{FetchError, Fetcher, Lookup};
use crate::{
    error_chain,
    kernel::{Architecture, KernelRelease},
};

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

impl KernelImage {
    /// The image and what comes with it at their natural places below `root`; its own path is its origin.
    fn below(root: &Path, release: &KernelRelease, arch: Architecture) -> Option<Self> {
        let modules = ["lib/modules", "usr/lib/modules"].map(|dir| root.join(dir).join(release.as_str()));
        let modules = modules.into_iter().find(|path| path.is_dir());
        let vmlinuz = Self::places(root, release).into_iter().find(|path| path.is_file())?;
        let system_map = root.join("boot").join(format!("System.map-{release}"));
        Some(Self {
            release: release.clone(),
            arch,
            origin: vec![vmlinuz.display().to_string()],
            vmlinuz,
            system_map: Some(system_map).filter(|path| path.is_file()),
            modules,
        })
    }

    /// Where images are looked for: RHEL and newer Ubuntu keep them with the modules.
    fn places(root: &Path, release: &KernelRelease) -> Vec<PathBuf> {
        let with_modules = ["lib/modules", "usr/lib/modules"].map(|dir| format!("{dir}/{release}/vmlinuz"));
        let names = [format!("boot/vmlinuz-{release}")].into_iter().chain(with_modules);
        names.map(|name| root.join(name)).collect()
    }
}

/// What became of a search for a kernel image.
pub type KernelImageLookup = Lookup<Box<KernelImage>>;

/// Kernel images; relative paths in definitions start at `root`.
#[derive(Clone, Copy)]
pub struct KernelImages<'a>(pub(super) &'a Fetcher);

/// What the user brings, or the machine has, cannot be used: `cause` says why.
fn unfit(message: &str, cause: &dyn std::error::Error, hint: &str) -> FetchError {
    FetchError::unusable(format!("{message}: {}", error_chain(cause)), hint)
}
