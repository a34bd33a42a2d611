//! Finds the published image for a kernel.

use std::{cmp::Ordering, collections::BTreeMap};

use farrier_builder::services::{BuildError, BuildServices, MAX_CONCURRENT_REQUESTS, Result};
use farrier_core::{
    facts::ImageFacts,
    image::{Digest, HostOutput, Repository, Version},
    kernel::{Architecture, KernelRelease, debian_version},
};
use farrier_store::registry::RegistryError;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use oci::ImageManifest;

/// Returns the digest of the image for one kernel: the image under `version`, or else the image of the repository for `release`, with
/// the newest driver version if there are several. Of a union image, returns the member for `release`.
pub async fn find_image(
    services: &BuildServices,
    repository: &Repository,
    version: Option<&Version>,
    release: Option<&KernelRelease>,
    arch: Architecture,
) -> Result<Digest> {
    let absent = |message: String| {
        BuildError::unmet(message, "`farrier build NAME --kernel RELEASE --push` publishes an image")
    };
    let for_kernel = || match release {
        Some(release) => format!("for kernel {release}"),
        None => "for one kernel".to_owned(),
    };
    if let Some(version) = version {
        let found = look_up(services, repository, version, release, arch).await?;
        return found
            .map(|(digest, _)| digest)
            .ok_or_else(|| absent(format!("{repository}{version} is no image {}", for_kernel())));
    }
    let tags = services.images.registry.tags(repository).await?;
    let tags = tags.into_iter().filter(|tag| oci::subject_of_tag(tag).is_none());
    let lookups: Vec<_> = stream::iter(tags)
        .map(|tag| async move {
            let version = Version::Tag(tag.clone());
            Ok::<_, BuildError>((look_up(services, repository, &version, release, arch).await?, tag))
        })
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .try_collect()
        .await?;
    // Several tags may name one image.
    let (mut newest, mut images) = (String::new(), BTreeMap::new());
    for (found, tag) in lookups {
        let Some((digest, driver)) = found else { continue };
        match debian_version::compare(&driver, &newest) {
            Ordering::Less if !images.is_empty() => continue,
            Ordering::Greater => images.clear(),
            Ordering::Less | Ordering::Equal => {}
        }
        newest = driver;
        images.insert(digest, tag);
    }
    if images.len() > 1 {
        let mut tags: Vec<&str> = images.values().map(oci::Tag::as_str).collect();
        tags.sort_unstable();
        let message = format!("{repository} has {} images {}: {}", tags.len(), for_kernel(), tags.join(", "));
        return Err(BuildError::usage(message, "name one of them: NAME:TAG"));
    }
    images.into_keys().next().ok_or_else(|| absent(format!("{repository} has no image {}", for_kernel())))
}

/// Returns the digest and the driver version of the image, if it is for the kernel.
async fn look_up(
    services: &BuildServices,
    repository: &Repository,
    version: &Version,
    release: Option<&KernelRelease>,
    arch: Architecture,
) -> Result<Option<(Digest, String)>> {
    let stored = match services.images.registry.image(repository, version, arch.as_str()).await {
        // The tag holds no image.
        Err(RegistryError::Image(_)) => None,
        stored => stored?,
    };
    let Some(stored) = stored else { return Ok(None) };
    let Ok(facts) = ImageFacts::from_manifest(&stored.bytes) else { return Ok(None) };
    let Ok(manifest) = ImageManifest::parse(&stored.bytes) else { return Ok(None) };
    // In a host's layout directory, tags lead to outputs, whose subject is the image.
    let is_output = HostOutput::has_type(manifest.artifact_type.as_deref());
    let subject = manifest.subject.filter(|_| is_output).map(|subject| subject.digest);
    let digest = match (facts.kernel_release, release) {
        (Some(kernel), Some(requested)) if kernel != *requested => None,
        (Some(_), _) => Some(subject.unwrap_or(stored.digest)),
        (None, Some(requested)) => facts.members.get(requested).cloned(),
        (None, None) => None,
    };
    Ok(digest.map(|digest| (digest, facts.driver_version.unwrap_or_default())))
}
