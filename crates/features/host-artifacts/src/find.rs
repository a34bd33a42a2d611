//! Finds the published image for a kernel.

use std::collections::BTreeMap;

use farrier_builder::services::{BuildError, BuildServices, MAX_CONCURRENT_REQUESTS, Result};
use farrier_core::{
    facts::ImageFacts,
    image::{Digest, HostOutput, Repository, Version},
    kernel::{Architecture, KernelRelease, debian_version},
};
use farrier_store::registry::RegistryError;
use futures::{StreamExt as _, TryStreamExt as _, future, stream};
use oci::ImageManifest;

/// Kernel and system that an image must be for.
#[derive(Clone, Copy)]
pub struct ImageTarget<'a> {
    /// Kernel release; `None` for an image of any kernel.
    pub release: Option<&'a KernelRelease>,
    pub arch: Architecture,
    /// Operating system in the form of the annotation `farrier.dev/os`. Different systems may have kernels of the same release.
    pub os: Option<&'a str>,
    /// Whether an image for another operating system is refused. If not, it is taken only where none is for `os`.
    pub is_os_required: bool,
}

/// An image for the kernel.
struct Found {
    version: Version,
    digest: Digest,
    driver_version: String,
    os: Option<String>,
    arch: Option<String>,
}

/// Returns the digest of the image for one kernel: the image under `version`, or else the image of the repository for `target`, with
/// the newest driver version if there are several. Of a union image, returns the member for the kernel.
pub async fn find_image(
    services: &BuildServices,
    repository: &Repository,
    version: Option<&Version>,
    target: ImageTarget<'_>,
) -> Result<Digest> {
    let ImageTarget { release, arch, os, is_os_required } = target;
    let versions = if let Some(version) = version {
        vec![version.clone()]
    } else {
        let tags = services.images.registry.tags(repository).await?.into_iter();
        tags.filter(|tag| oci::subject_of_tag(tag).is_none()).map(Version::Tag).collect()
    };
    let mut found: Vec<Found> = stream::iter(versions)
        .map(|version| look_up(services, repository, version, release, arch))
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .try_filter_map(future::ok)
        .try_collect()
        .await?;
    if version.is_none() {
        found.retain(|image| image.arch.as_ref().is_none_or(|other| other == arch.as_str()));
        let is_for_os =
            |image: &Found| image.os.as_deref().is_none_or(|other| os.is_none_or(|os| os == other));
        if is_os_required || found.iter().any(is_for_os) {
            found.retain(is_for_os);
        }
    }
    let versions = found.iter().map(|image| image.driver_version.clone());
    let newest = versions.max_by(|a, b| debian_version::compare(a, b)).unwrap_or_default();
    found.retain(|image| debian_version::compare(&image.driver_version, &newest).is_eq());
    // Several tags may name one image.
    let images: BTreeMap<Digest, String> =
        found.into_iter().map(|image| (image.digest, image.version.to_string())).collect();
    let place = format!("{repository}{}", version.map(ToString::to_string).unwrap_or_default());
    let os = os.filter(|_| is_os_required).map(|os| format!(" of {os}")).unwrap_or_default();
    let kernel = release.map_or("one kernel".to_owned(), |release| format!("kernel {release}{os} on {arch}"));
    if images.len() > 1 {
        let mut tags: Vec<&str> = images.values().map(|tag| tag.trim_start_matches(':')).collect();
        tags.sort_unstable();
        let message = format!("{place} has {} images for {kernel}: {}", tags.len(), tags.join(", "));
        return Err(BuildError::usage(message, "name one of them: NAME:TAG"));
    }
    images.into_keys().next().ok_or_else(|| {
        let hint = "`farrier build NAME --kernel RELEASE --push` publishes an image";
        BuildError::unmet(format!("{place} has no image for {kernel}"), hint)
    })
}

/// Returns the image, if it is for the kernel. Of an index, looks at the image for the architecture.
async fn look_up(
    services: &BuildServices,
    repository: &Repository,
    version: Version,
    release: Option<&KernelRelease>,
    arch: Architecture,
) -> Result<Option<Found>> {
    let stored = match services.images.registry.image(repository, &version, arch.as_str()).await {
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
    let Some(digest) = digest else { return Ok(None) };
    // The configuration of an output names no architecture.
    let arch = oci::architecture_of(&services.images.configuration(repository, &manifest.config).await?);
    let driver_version = facts.driver_version.unwrap_or_default();
    Ok(Some(Found { version, digest, driver_version, os: facts.os, arch }))
}

#[cfg(test)]
mod tests {
    use farrier_builder::testing::{Bench, K9};
    use farrier_core::facts::annotations;
    use serde_json::json;

    use super::*;

    /// Publishes an image without layers under a tag, and returns its digest.
    async fn publish(bench: &Bench, tag: &str, (os, arch, driver): (&str, &str, &str)) -> Digest {
        let images = &bench.services.images;
        let repository = images.location.repository("x").unwrap();
        let config = json!({"architecture": arch, "os": "linux"}).to_string();
        images.registry.push_bytes(&repository, config.as_bytes()).await.unwrap();
        let kind = "application/vnd.oci.image.manifest.v1+json";
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": kind,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json",
                "digest": Digest::of(config.as_bytes()),
                "size": config.len(),
            },
            "layers": [],
            "annotations": {
                (annotations::KERNEL_RELEASE): K9,
                (annotations::DRIVER_VERSION): driver,
                (annotations::OS): os,
            },
        })
        .to_string();
        let version = Version::Tag(tag.parse().unwrap());
        images.registry.push_manifest(&repository, &version, kind, manifest.as_bytes()).await.unwrap();
        Digest::of(manifest.as_bytes())
    }

    /// Debian 12 and 13, Ubuntu's releases, and architectures share releases of kernels.
    #[tokio::test]
    async fn kernels_of_one_release_are_told_apart() {
        let bench = Bench::new(&json!({}));
        let mut digests = BTreeMap::new();
        for (tag, image) in [
            ("bookworm", ("debian 12", "amd64", "1.0")),
            ("trixie", ("debian 13", "amd64", "1.0")),
            ("arm", ("debian 12", "arm64", "1.1")),
            ("noble", ("ubuntu 24.04", "amd64", "1.2")),
        ] {
            digests.insert(publish(&bench, tag, image).await, tag);
        }
        let repository = bench.services.images.location.repository("x").unwrap();
        let release = K9.parse().unwrap();
        for (os, is_os_required, arch, expected) in [
            (Some("debian 12"), true, Architecture::Amd64, Ok("bookworm")),
            (Some("debian 12"), false, Architecture::Amd64, Ok("bookworm")),
            (Some("debian 13"), true, Architecture::Amd64, Ok("trixie")),
            (Some("debian 12"), true, Architecture::Arm64, Ok("arm")),
            (Some("fedora 42"), false, Architecture::Amd64, Ok("noble")),
            (None, false, Architecture::Amd64, Ok("noble")),
            (
                Some("fedora 42"),
                true,
                Architecture::Amd64,
                Err("for kernel 6.1.0-9-amd64 of fedora 42 on amd64"),
            ),
        ] {
            let target = ImageTarget { release: Some(&release), arch, os, is_os_required };
            let found = find_image(&bench.services, &repository, None, target).await;
            let found = found.map(|digest| digests[&digest]).map_err(|error| error.to_string());
            match expected {
                Ok(tag) => assert_eq!(found, Ok(tag), "{os:?} {arch}"),
                Err(why) => assert!(found.unwrap_err().contains(why), "{why}"),
            }
        }
    }
}
