//! Adds signatures by the site's own key to artifacts that other trusted keys signed, so that the other keys can be replaced.

use std::collections::BTreeSet;

use farrier_core::{
    image::{Digest, HostOutput, ImageName, Repository, Version},
    provenance::{PublicKey, RequiredSigners},
};
use farrier_store::{InputKind, is_referrer_or_signature};
use oci::AnyManifest;
use serde::Serialize;

use super::{keys::own_signers, root_fs::ROOT_FS, signatures::StoredImage};
use crate::services::{BuildError, BuildServices, ImageAccess, Result};

/// Outcome for one artifact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase", tag = "outcome")]
pub enum RotationOutcome {
    /// The site's key signed the artifact, or documents about it, in this run.
    Signed,
    /// The site's key had already signed the artifact and all documents.
    Present,
    /// No trusted key signed the artifact.
    Untrusted {
        /// Reason for the refusal.
        why: String,
    },
}

/// An image or stored input, and its outcome.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RotatedArtifact {
    /// The artifact by digest.
    pub reference: String,
    #[serde(flatten)]
    pub outcome: RotationOutcome,
}

/// Signs all tagged images, stored inputs and documents that are signed by `accepted` keys. Contacts only the registry of the
/// published images. `undefined_images` names images that have no definition.
pub async fn rotate(
    services: &BuildServices,
    accepted: &RequiredSigners,
    undefined_images: &[ImageName],
) -> Result<Vec<RotatedArtifact>> {
    let own = own_signers(services).await?.ok_or_else(|| {
        BuildError::usage("no key to sign with".to_owned(), "name the new key in site.yaml: `imageSigning`")
    })?;
    let images = services.definitions.images.keys().chain(undefined_images).map(ImageName::as_str);
    let names: BTreeSet<&str> =
        images.chain(InputKind::ALL.map(InputKind::repository)).chain([ROOT_FS]).collect();
    let mut artifacts = Vec::new();
    for name in names {
        let repository = services.images.location.repository(name)?;
        for digest in tagged_digests(&services.images, &repository).await? {
            let image = StoredImage { services, repository: &repository, digest: &digest };
            let outcome = image.rotate(&own, accepted, name).await?;
            artifacts.push(RotatedArtifact { reference: format!("{repository}@{digest}"), outcome });
        }
    }
    Ok(artifacts)
}

/// Returns the digests of all tagged manifests, of the images in tagged indexes, and of the outputs of these images.
async fn tagged_digests(access: &ImageAccess, repository: &Repository) -> Result<BTreeSet<Digest>> {
    let mut digests = BTreeSet::new();
    let tags = access.registry.tags(repository).await?.into_iter();
    for tag in tags.filter(|tag| !is_referrer_or_signature(tag)) {
        let stored = access.registry.manifest(repository, &Version::Tag(tag)).await?;
        let Some(stored) = stored else { continue };
        if let Ok(AnyManifest::Index(index)) = AnyManifest::parse(&stored.bytes) {
            for entry in index.manifests {
                let image = access.registry.manifest(repository, &Version::Digest(entry.digest)).await?;
                digests.extend(image.map(|image| image.digest));
            }
        }
        digests.insert(stored.digest);
    }
    for image in digests.clone() {
        let listed = access.registry.referrers(repository, &image, None).await?;
        let outputs =
            listed.into_iter().filter(|referrer| HostOutput::has_type(referrer.artifact_type.as_deref()));
        digests.extend(outputs.map(|output| output.digest));
    }
    Ok(digests)
}

impl StoredImage<'_> {
    async fn rotate(
        self,
        own: &RequiredSigners,
        accepted: &RequiredSigners,
        name: &str,
    ) -> Result<RotationOutcome> {
        if let Err(why) = self.check_signed_by(accepted).await? {
            return Ok(RotationOutcome::Untrusted { why });
        }
        let keys: Vec<&PublicKey> = accepted.keys().collect();
        let claims = self.signed_claims(&keys).await?;
        let was_signed = self.check_signed_by(own).await?.is_ok();
        let sent = self.sign(name, &claims).await?;
        Ok(if was_signed && sent == 0 { RotationOutcome::Present } else { RotationOutcome::Signed })
    }
}
