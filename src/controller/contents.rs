//! Adapter: what the images that DaemonSets and pods name at this moment hold.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Mutex, PoisonError},
};

use futures::{StreamExt, stream};

use super::{Controller, observe::AT_ONCE};
use crate::{
    image::{ImageReference, Version},
    oci::ImageFacts,
    plan::ImageContents,
};

/// What was found out about images by digest, so that each is looked up once.
#[derive(Debug, Default)]
pub struct ContentsMemory(Mutex<BTreeMap<String, ImageContents>>);

impl Controller {
    /// Looks up those of the images that farrier publishes; others are not asked for, because no registry is contacted
    /// that the configuration does not name. An image that cannot be looked up is not in the answer: what depends on
    /// it waits.
    pub(super) async fn contents(&self, images: &BTreeSet<String>) -> BTreeMap<String, ImageContents> {
        let mut known = self.contents.0.lock().unwrap_or_else(PoisonError::into_inner).clone();
        known.retain(|image, _| images.contains(image));
        let prefix = format!("{}/", self.image_location().prefix.trim_end_matches('/'));
        let wanted = images.iter().filter(|image| !known.contains_key(*image) && image.starts_with(&prefix));
        let found =
            stream::iter(wanted.filter_map(|image| Some((image, image.parse::<ImageReference>().ok()?))))
                .map(|(image, reference)| async move {
                    let by_digest = matches!(reference.version, Version::Digest(_));
                    (image.clone(), by_digest, self.contents_of(&reference).await)
                })
                .buffer_unordered(AT_ONCE)
                .collect::<Vec<_>>()
                .await;
        let mut all = known.clone();
        for (image, by_digest, contents) in found {
            let Some(contents) = contents else { continue };
            if by_digest {
                known.insert(image.clone(), contents.clone());
            }
            all.insert(image, contents);
        }
        *self.contents.0.lock().unwrap_or_else(PoisonError::into_inner) = known;
        all
    }

    async fn contents_of(&self, reference: &ImageReference) -> Option<ImageContents> {
        match self.registry.manifest(&reference.repository, &reference.version).await {
            Ok(manifest) => {
                let facts = ImageFacts::from_manifest(&manifest?.bytes).ok()?;
                let kernels: BTreeSet<String> =
                    facts.kernel_release.iter().map(ToString::to_string).collect();
                (!kernels.is_empty()).then_some(ImageContents { kernels })
            }
            Err(error) => {
                tracing::debug!(%reference, %error, "image in use cannot be looked up");
                None
            }
        }
    }
}
