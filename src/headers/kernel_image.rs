//! Adapter: kernel images and the kernel's own modules, from packages or from a file system.

mod facts;
mod fetch;

use std::{
    io,
    path::{Path, PathBuf},
};

pub(super) use facts::module_facts;

use crate::{
    kernel::{Architecture, KernelRelease},
    kmod::{BtfError, VmlinuzError},
    payload::PayloadError,
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
    pub(super) fn below(root: &Path, release: &KernelRelease, arch: Architecture) -> Option<Self> {
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
    pub(super) fn places(root: &Path, release: &KernelRelease) -> Vec<PathBuf> {
        let with_modules = ["lib/modules", "usr/lib/modules"].map(|dir| format!("{dir}/{release}/vmlinuz"));
        let names = [format!("boot/vmlinuz-{release}")].into_iter().chain(with_modules);
        names.map(|name| root.join(name)).collect()
    }
}

/// What became of a search for a kernel image.
#[derive(Clone, Debug)]
pub enum KernelImageLookup {
    /// It is in the cache, or where the definition says.
    Found(Box<KernelImage>),
    /// There is none, which is a finding and not a fault.
    Missing {
        /// The packages or file that were looked for, and where.
        looked_for: String,
        /// What to do.
        hint: String,
    },
}

/// Why a kernel image tells nothing.
#[derive(Debug, thiserror::Error)]
pub enum KernelImageError {
    /// The image itself.
    #[error("read {path}")]
    Image {
        /// Which.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: VmlinuzError,
    },
    /// Its type information.
    #[error("read the type information (BTF) in {path}")]
    Btf {
        /// Which file.
        path: PathBuf,
        /// What is wrong.
        #[source]
        source: BtfError,
    },
    /// The image is of another kernel.
    #[error("{path} is the image of kernel {found}, not of {wanted}")]
    Release {
        /// Which.
        path: PathBuf,
        /// What it says.
        found: String,
        /// What was asked for.
        wanted: KernelRelease,
    },
    /// A module of the kernel's own.
    #[error(transparent)]
    Module(#[from] PayloadError),
    /// A file that comes with the image.
    #[error("{action} {path}")]
    Io {
        /// What was done.
        action: &'static str,
        /// To what.
        path: PathBuf,
        /// The system's answer.
        #[source]
        source: io::Error,
    },
}

impl KernelImageError {
    /// What to do about it.
    pub fn remedy(&self) -> &'static str {
        match self {
            Self::Image { source, .. } => source.remedy(),
            Self::Btf { .. } => "the image is damaged, or made by a newer kernel build than farrier knows",
            Self::Release { .. } => "give the image of exactly this kernel",
            Self::Module(_) | Self::Io { .. } => "look at the file's rights and the disk",
        }
    }
}

fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> KernelImageError {
    move |source| KernelImageError::Io { action, path: path.to_owned(), source }
}
