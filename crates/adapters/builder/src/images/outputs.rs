//! Publishes the outputs of an image that its definition asks for.

use std::sync::Arc;

use farrier_core::{image::DriverImage, kernel::KernelFamily};

use super::signatures::StoredImage;
use crate::services::{BuildError, BuildTools, MadeOutput, OutputMaker, Result};

/// Returns the maker of the definition's outputs, if the definition asks for any. Fails if this farrier cannot make them.
pub(crate) fn output_maker(tools: &BuildTools, image: &DriverImage) -> Result<Option<Arc<dyn OutputMaker>>> {
    if image.spec.outputs.is_empty() {
        return Ok(None);
    }
    let maker = tools.output_maker.clone().ok_or_else(|| {
        let message = format!("image {}: this farrier cannot make outputs", image.metadata.name);
        BuildError::unmet(message, "use a farrier with the feature host-artifacts, or remove `outputs`")
    })?;
    Ok(Some(maker))
}

impl StoredImage<'_> {
    /// Publishes the outputs of the published image as its referrers, with documents and signed like the image. Content that the
    /// registry has is not sent again. Returns the number of bytes sent.
    pub(crate) async fn publish_outputs(self, image: &DriverImage, family: &KernelFamily) -> Result<u64> {
        let Self { services, repository, digest } = self;
        let Some(maker) = output_maker(&services.tools, image)? else { return Ok(0) };
        let mut sent = 0;
        for output in image.spec.outputs.iter().filter(|output| output.is_for(family)) {
            // The site's key must not sign an output of another writer's image.
            if services.definitions.site.image_signing.is_some() {
                self.ensure_trusted("image").await?;
            }
            let MadeOutput { artifact, documents } =
                maker.make(services, repository, digest, *output).await?;
            services.process.ensure_may_write()?;
            sent += self.push_document(&artifact).await?;
            let output_image = StoredImage { services, repository, digest: &artifact.digest };
            for document in &documents.artifacts {
                sent += output_image.push_document(document).await?;
            }
            sent += output_image.sign(image.metadata.name.as_str(), &documents.claims).await?;
        }
        Ok(sent)
    }
}
