//! Outputs that are published beside an image, for hosts that load modules themselves.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use strum::VariantArray;

use crate::kernel::{HeaderSource, KernelFamily};

/// `ID` in Debian's `os-release`.
pub const DEBIAN: &str = "debian";

/// An output that is made from a published image, and published as its referrer.
#[derive(Serialize, Deserialize, JsonSchema, strum::Display, VariantArray)]
#[serde(rename_all = "kebab-case")]
#[strum(serialize_all = "kebab-case")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostOutput {
    /// A Debian package, for the kernels whose headers are not RPM packages.
    Deb,
    /// A Debian package that depends on `deb` and follows the kernel's meta package, for Debian's kernels.
    DebMeta,
    /// An archive that loads the modules, to append to an initramfs of initramfs-tools or dracut, for the same kernels
    /// as `deb`.
    Initramfs,
    /// A system extension for systemd-sysext, for all kernels.
    Sysext,
}

impl HostOutput {
    /// Media type of the artifact and of its layer.
    pub fn media_type(self) -> &'static str {
        match self {
            Self::Deb => "application/vnd.farrier.deb.v1",
            Self::DebMeta => "application/vnd.farrier.deb-meta.v1",
            Self::Initramfs => "application/vnd.farrier.initramfs.v1",
            Self::Sysext => "application/vnd.farrier.sysext.v1",
        }
    }

    /// Whether an artifact of this type is an output of an image.
    pub fn has_type(artifact_type: Option<&str>) -> bool {
        Self::VARIANTS.iter().any(|output| artifact_type == Some(output.media_type()))
    }

    /// Whether the output contains the certificate of the modules' signatures.
    pub fn contains_certificate(self) -> bool {
        match self {
            Self::Deb | Self::Sysext => true,
            Self::DebMeta | Self::Initramfs => false,
        }
    }

    /// Whether the output is made for the kernels of a family.
    pub fn is_for(self, family: &KernelFamily) -> bool {
        match self {
            Self::Deb | Self::Initramfs => family.spec.headers.rpm_archive().is_none(),
            // Other distributions give the kernel's meta package another version than the kernel's.
            Self::DebMeta => {
                let systems = &family.spec.matches.os;
                matches!(family.spec.headers, HeaderSource::Apt(_))
                    && !systems.is_empty()
                    && systems.iter().all(|os| os.as_str() == DEBIAN)
            }
            Self::Sysext => true,
        }
    }
}
