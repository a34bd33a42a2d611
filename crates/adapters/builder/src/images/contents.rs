//! Looks up the contents of images that DaemonSets and pods currently name.

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    facts::ImageFacts,
    image::ImageReference,
    plan::{ImageContents, is_same_image},
};
use farrier_store::registry::StoredManifest;
use futures::{StreamExt, stream};
use oci::AnyManifest;

use crate::services::{ImageAccess, MAX_CONCURRENT_REQUESTS, Result, entries, image_location};

/// Updates `known` to the contents of `images`. Reuses known contents of images by digest, and drops images that are no
/// longer in use. Looks up only images below farrier's own prefix, because farrier contacts only registries that the
/// configuration names. An image whose lookup fails stays unknown, and the plan leaves everything about it unchanged.
pub async fn look_up_contents(
    access: &ImageAccess,
    images: &BTreeSet<String>,
    known: &mut BTreeMap<String, ImageContents>,
) {
    known.retain(|image, _| images.contains(image) && image.contains("@sha256:"));
    let prefix = format!("{}/", image_location(&access.location).prefix.trim_end_matches('/'));
    let new = images.iter().filter(|image| !known.contains_key(*image) && image.starts_with(&prefix));
    let found = stream::iter(new.filter_map(|image| Some((image, image.parse::<ImageReference>().ok()?))))
        .map(|(image, reference)| async move {
            let contents = contents_of(access, &reference).await.unwrap_or_else(|error| {
                tracing::debug!(%reference, %error, "cannot look up an image in use");
                None
            });
            Some((image.clone(), contents?))
        })
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .collect::<Vec<_>>()
        .await;
    known.extend(found.into_iter().flatten());
    // A webhook may write another registry into DaemonSets and pods: the digest decides.
    let same_digest = |image: &String| {
        let (_, contents) = known.iter().find(|(other, _)| is_same_image(other, image))?;
        Some((image.clone(), contents.clone()))
    };
    let new = images.iter().filter(|image| !known.contains_key(*image));
    let mirrored: Vec<_> = new.filter_map(same_digest).collect();
    known.extend(mirrored);
}

async fn contents_of(access: &ImageAccess, reference: &ImageReference) -> Result<Option<ImageContents>> {
    let ImageReference { repository, version } = reference;
    let Some(stored) = access.registry.manifest(repository, version).await? else { return Ok(None) };
    let Ok(AnyManifest::Index(index)) = AnyManifest::parse(&stored.bytes) else {
        return Ok(contents_of_manifest(&stored));
    };
    let entries = entries(access.registry.as_ref(), repository, &index, &stored.bytes).await?;
    let platforms: Option<BTreeMap<_, _>> =
        entries.iter().map(|(arch, stored)| Some((*arch, contents_of_manifest(stored)?))).collect();
    let platforms = platforms.filter(|platforms| !platforms.is_empty());
    Ok(platforms.map(|platforms| ImageContents { platforms, ..ImageContents::default() }))
}

fn contents_of_manifest(stored: &StoredManifest) -> Option<ImageContents> {
    let facts = ImageFacts::from_manifest(&stored.bytes).ok()?;
    Some(ImageContents::of(&facts, &stored.digest)).filter(|contents| !contents.kernels.is_empty())
}

#[cfg(test)]
mod tests {
    use farrier_store::registry::RegistryLocation;
    use serde_json::json;

    use super::*;
    use crate::testing::{Bench, K9, module};

    #[tokio::test]
    async fn an_image_of_a_mirror_has_the_contents_of_its_digest() {
        let mut bench = Bench::new(&json!({}));
        bench.services.images.location =
            RegistryLocation::Remote { host: "registry.test".to_owned(), prefix: None };
        let published = bench.publish(K9, &[&module()]).await.unwrap();
        let image = format!("{}@{}", bench.cell(K9).await.reference.repository, published.digest);
        let mirrored = image.replace("registry.test", "mirror.test");
        let foreign = "mirror.test/other:1".to_owned();
        let images = BTreeSet::from([image, mirrored.clone(), foreign.clone()]);
        let mut known = BTreeMap::new();
        look_up_contents(&bench.services.images, &images, &mut known).await;
        assert!(known[&mirrored].kernels.contains(K9) && !known.contains_key(&foreign), "{known:?}");
    }
}
