//! Outputs of an image, which are published as its referrers.

use farrier_core::image::{Digest, HostOutput, Repository};
use oci::Artifact;

use super::{build_services::BuildServices, error::Result};
use crate::images::Documents;

/// An output of an image.
pub struct MadeOutput {
    /// The output, as a referrer of the image.
    pub artifact: Artifact,
    /// Provenance and bills of materials of the output, as referrers of the output.
    pub documents: Documents,
}

/// Makes outputs from published images.
#[async_trait::async_trait]
pub trait OutputMaker: Send + Sync {
    /// Makes an output of the image for one kernel. The same image yields the same bytes on every machine.
    async fn make(
        &self,
        services: &BuildServices,
        repository: &Repository,
        image: &Digest,
        output: HostOutput,
    ) -> Result<MadeOutput>;
}
