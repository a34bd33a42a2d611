//! Plans without a cluster. The images in the registry determine the kernels.

use std::collections::{BTreeMap, BTreeSet};

use farrier_builder::{
    add_needs,
    services::{BuildServices, ImageAccess, MAX_CONCURRENT_REQUESTS, Result},
};
use farrier_cluster::{Cluster, ClusterError};
use farrier_core::definition::{ApiVersion, Metadata, NonEmpty};
use farrier_core::{
    facts::ImageFacts,
    image::{Definitions, DriverImage, ImageName, Repository, Tag, Version},
    kernel::{AnnouncedKernels, AnnouncedKernelsKind, AnnouncedKernelsSpec, Architecture, KernelTarget},
    plan::{Change, ClusterSnapshot},
};
use farrier_store::{is_referrer_or_signature, registry::RegistryError};
use futures::{StreamExt as _, stream};
use oci::ImageManifest;
use strum::VariantArray as _;

/// A cluster without nodes, which refuses every write.
pub struct NoCluster;

#[async_trait::async_trait]
impl Cluster for NoCluster {
    fn describe(&self) -> String {
        "no cluster".to_owned()
    }

    async fn snapshot(&self) -> Result<ClusterSnapshot, ClusterError> {
        Ok(ClusterSnapshot::default())
    }

    async fn apply(&self, change: &Change) -> Result<(), ClusterError> {
        let object = change.object();
        Err(ClusterError::Refused { object, reason: "there is no cluster".to_owned() })
    }
}

/// Returns the definitions of the images in the registry, and of their needs. The definitions contain no rollouts, and announce
/// the kernels of the registry's images.
pub async fn definitions_of_registry(services: &BuildServices) -> Result<Definitions> {
    let (mut published, mut kernels): (Vec<&DriverImage>, BTreeSet<KernelTarget>) = Default::default();
    for (name, image) in &services.definitions.images {
        let repository = &services.images.location.repository(name.as_str())?;
        let mut tags = services.images.registry.tags(repository).await?;
        tags.retain(|tag| !is_referrer_or_signature(tag));
        let lookups = stream::iter(tags).map(|tag| kernels_of(&services.images, repository, tag));
        let outcomes: Vec<_> = lookups.buffer_unordered(MAX_CONCURRENT_REQUESTS).collect().await;
        let mut image_kernels = BTreeSet::new();
        for outcome in outcomes {
            image_kernels.extend(outcome?);
        }
        if !image_kernels.is_empty() {
            published.push(image);
        }
        kernels.extend(image_kernels);
    }
    add_needs(&services.definitions, &mut published);
    let published: BTreeSet<ImageName> =
        published.into_iter().map(|image| image.metadata.name.clone()).collect();
    let mut definitions = services.definitions.clone();
    definitions.images.retain(|name, _| published.contains(name));
    definitions.images.values_mut().for_each(|image| image.spec.rollout.clear());
    if let (Some(kernels), Ok(name)) = (NonEmpty::new(kernels.into_iter().collect()), "registry".parse()) {
        let announced = AnnouncedKernels {
            api_version: ApiVersion::V1Alpha1,
            kind: AnnouncedKernelsKind::AnnouncedKernels,
            metadata: Metadata { name },
            spec: AnnouncedKernelsSpec { kernels },
        };
        definitions.announced.insert(announced.metadata.name.clone(), announced);
    }
    Ok(definitions)
}

/// Returns the kernels of a tag's images, one for each architecture of an index. Union images, images of other programs and
/// invalid images have no kernel.
async fn kernels_of(access: &ImageAccess, repository: &Repository, tag: Tag) -> Result<Vec<KernelTarget>> {
    let (version, mut images) = (Version::Tag(tag), BTreeMap::new());
    for arch in Architecture::VARIANTS {
        match access.registry.image(repository, &version, arch.as_str()).await {
            Ok(image) => images.extend(image.map(|stored| (stored.digest, stored.bytes))),
            Err(RegistryError::Image(_)) => {}
            Err(error) => return Err(error.into()),
        }
    }
    let mut kernels = Vec::new();
    for bytes in images.into_values() {
        kernels.extend(kernel_of(access, repository, &bytes).await);
    }
    Ok(kernels)
}

async fn kernel_of(access: &ImageAccess, repository: &Repository, image: &[u8]) -> Option<KernelTarget> {
    let manifest = ImageManifest::parse(image).ok()?;
    let facts = ImageFacts::from_annotations(&manifest.annotations).ok()?;
    let (release, os) = facts.kernel_release.zip(facts.os)?;
    let (os, os_version) = os.split_once(' ')?;
    let (os, os_version) = (os.parse().ok()?, os_version.parse().ok()?);
    let config = access.small_blob(repository, &manifest.config, "the configuration of").await.ok()?;
    let arch = oci::architecture_of(&config)?.parse().ok()?;
    Some(KernelTarget { os, os_version, release, arch })
}
