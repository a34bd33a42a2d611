//! Kernel releases, labels and targets, and the kernel families, which provide headers, toolchains and kernel images.

mod announced;
mod compiler;
mod cross;
pub mod debian_version;
mod family;
mod header_text;
mod image_source;
mod label;
mod offer;
mod pattern;
mod published;
mod range;
pub mod rpm_version;
pub(crate) mod runs;
mod system;
mod target;
mod uname;

pub use announced::{AnnouncedKernels, AnnouncedKernelsKind, AnnouncedKernelsSpec};
pub use compiler::{Compiler, CompilerKind, CompilerTextError};
pub use cross::{
    BUILD_ELSEWHERE_HINT, FOREIGN_TOOLS, NO_CROSS_COMPILERS, cross_compile_blocker, cross_toolchain,
    not_compiled_here,
};
pub use family::{
    AptHeaders, FamilyMatch, HeaderSource, KernelFamily, KernelFamilySpec, KernelTrack, TarballHeaders,
    Toolchain, TrackedSuites, match_family,
};
pub use header_text::HeaderText;
pub use image_source::{AptKernelImage, KernelImageFile, KernelImageSource};
pub use kmod::{Architecture, ArchitectureError, KernelRelease, ReleaseError};
pub use offer::{describe_sources, family_for, missing_compiler, missing_headers_message};
pub use pattern::Pattern;
pub use published::{DetachedSignature, DownloadedHeaders, FileProof, ImageHeaders, image_for, text_for};
pub use range::{KernelRange, version_order};
pub use system::{ImageStreams, NodeSystem, OSTREE_VERSION_LABEL, RHEL_VERSION_LABEL, UNKNOWN_SYSTEM};
pub use target::KernelTarget;
pub use uname::{install_uname, uname_script};

pub use crate::definition::{
    AptSuites, BootstrapSpec, FurtherRpmPackages, RpmArchive, RpmPackages, RpmRepository, RpmSigned,
    RpmToolchain,
    checked::{KernelLabel, OsId, OsVersion},
};
