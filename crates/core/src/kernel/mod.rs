//! Pure: what a kernel is called, which target it is, and which family its headers come from.

mod announced;
mod compiler;
pub mod debian_version;
mod family;
mod image_source;
mod label;
mod target;

pub use announced::{AnnouncedKernels, AnnouncedKernelsKind, AnnouncedKernelsSpec};
pub use compiler::{Compiler, CompilerKind, CompilerTextError};
pub use family::{
    AptHeaders, FamilyMatch, HeaderSource, KernelFamily, KernelFamilySpec, KernelTrack, Pattern,
    TarballHeaders, Toolchain, TrackedSuites, match_family,
};
pub use image_source::{AptKernelImage, KernelImageFile, KernelImageSource};
pub use kmod::{Architecture, ArchitectureError, KernelRelease, ReleaseError};
pub use target::KernelTarget;

pub use crate::definition::{
    AptSuites, BootstrapSpec,
    checked::{KernelLabel, OsId, OsVersion},
};
