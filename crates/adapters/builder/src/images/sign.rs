//! Signs images and statements about them, in the forms that `cosign` looks for: tags (2.x) and bundles (3.x).

use farrier_core::{
    facts::media_type,
    image::{Tag, Version},
    provenance::{self, Envelope, PublicKey, RequiredSigners, SIGNED_PREDICATE, Statement},
    site::ExistingImages,
};
use farrier_store::registry::{MAX_TRIES, pause_before};
use oci::{Descriptor, ImageError};
use serde_json::json;

use super::{
    documents::Claim,
    keys::{ImageSigner, own_signers, required_signers},
    signatures::StoredImage,
};
use crate::services::{BuildError, Result};

impl StoredImage<'_> {
    /// If the site signs images, signs the claims about the image, then the image, each in the forms of `cosign` 2 and
    /// 3. Existing signatures by the same key are kept. Returns the number of bytes sent.
    pub async fn sign(self, name: &str, claims: &[Claim]) -> Result<u64> {
        let Self { services, repository, digest } = self;
        let Some(signer) = ImageSigner::load(services).await? else { return Ok(0) };
        let attested = self.attest(&signer, name, claims).await;
        // An attestation tag that is full, or has other content, does not keep the image from its signature.
        if !matches!(attested, Ok(_) | Err(BuildError::Problem(_))) {
            return attested;
        }
        let mut sent = 0;
        if !self.has_tagged_signature(&signer.public).await? {
            let payload = provenance::simple_signing(repository.as_str(), digest);
            let signature = signer.sign(payload.clone()).await?;
            let layer = provenance::signature_layer(&payload, &signature);
            sent += services.images.registry.push_bytes(repository, &payload).await?.bytes();
            sent += self.add_layers(provenance::signature_tag(digest), &[layer]).await?;
        }
        self.remember_signature(&signer.public)?;
        Ok(sent + attested?)
    }

    /// Signs a stored input without documents, unless the site's key has already signed the input. The private key is needed only
    /// for a new signature. Returns whether the site has a key.
    pub(super) async fn sign_input_if_unsigned(self, name: &str) -> Result<bool> {
        let Some(own) = own_signers(self.services).await? else { return Ok(false) };
        for key in own.keys() {
            if !self.has_tagged_signature(key).await? {
                self.sign(name, &[]).await?;
            }
        }
        Ok(true)
    }

    /// Signs each claim under the attestation tag and in a bundle. Also signs the image itself in a bundle, the form of cosign 3.
    async fn attest(self, signer: &ImageSigner, name: &str, claims: &[Claim]) -> Result<u64> {
        let Self { services, repository, digest } = self;
        let subject = self.manifest().await?.bytes;
        let tagged = self.tagged_statements(&[&signer.public]).await?;
        let bundled = self.bundled_statements(&[&signer.public]).await?;
        let image_claim = Claim { predicate_type: SIGNED_PREDICATE, predicate: json!({}) };
        let (mut sent, mut new_layers) = (0, Vec::new());
        for claim in claims.iter().chain([&image_claim]) {
            let Claim { predicate_type, predicate } = claim;
            let contains_claim = |statements: &[Statement]| {
                statements.iter().any(|statement| {
                    statement.predicate_type == *predicate_type && statement.predicate == *predicate
                })
            };
            // The image has its own signature tag (`sign`).
            let is_tagged = claim == &image_claim || contains_claim(&tagged);
            let is_bundled = contains_claim(&bundled);
            if is_tagged && is_bundled {
                continue;
            }
            let payload = provenance::statement(name, digest, predicate_type, predicate);
            let signature = signer.sign(provenance::pre_authentication(&payload)).await?;
            let envelope = Envelope::write(&payload, &signature).map_err(|error| {
                ImageError::Unusable("attestation", format!("of {repository}@{digest}: {error}"))
            })?;
            if !is_bundled {
                let bundle = provenance::bundle(&subject, &envelope, &signer.public, predicate_type)?;
                services.process.ensure_may_write()?;
                sent += self.push_document(&bundle).await?;
            }
            if !is_tagged {
                sent += services.images.registry.push_bytes(repository, &envelope).await?.bytes();
                new_layers.push(provenance::attestation_layer(&envelope, predicate_type));
            }
        }
        if !new_layers.is_empty() {
            sent += self.add_layers(provenance::attestation_tag(digest), &new_layers).await?;
        }
        Ok(sent)
    }

    /// Adds layers to a tag's manifest, and reads the tag again after each write. The registry protocol has no locks, so a
    /// concurrent writer may replace the manifest with one that lacks the layers. Fails if the tag has unusable content, which may be
    /// entries of other signers.
    async fn add_layers(self, tag: Option<Tag>, layers: &[Descriptor]) -> Result<u64> {
        let Self { services, repository, .. } = self;
        let Some(tag) = tag else { return Ok(0) };
        let version = Version::Tag(tag.clone());
        let mut sent = 0;
        for attempt in 0..=MAX_TRIES {
            let before = self.manifest_under(&tag).await?.map_err(|error| self.full_tag(&tag, &error))?;
            let existing = before.as_ref().map(|manifest| manifest.layers.as_slice()).unwrap_or_default();
            if layers.iter().all(|layer| existing.contains(layer)) {
                return Ok(sent);
            }
            pause_before(attempt).await;
            let made = provenance::add_layers(before.as_ref(), layers)
                .map_err(|error| self.full_tag(&tag, &error))?;
            sent += services.images.registry.push_bytes(repository, &made.config).await?.bytes();
            services.process.ensure_may_write()?;
            let kind = media_type::OCI_MANIFEST;
            services.images.registry.push_manifest(repository, &version, kind, &made.manifest).await?;
        }
        let message = format!(
            "{repository}:{tag} lacks the added entries after {MAX_TRIES} writes: other writers replace the tag"
        );
        Err(BuildError::unmet(message, "run again; existing content is kept"))
    }

    fn full_tag(self, tag: &Tag, error: &ImageError) -> BuildError {
        BuildError::unmet(
            format!("cannot add an entry to {}:{tag}: {error}", self.repository),
            "remove attestations that are not needed from the tag, or delete the tag: other signers must then sign again",
        )
    }

    /// Signs the published image, and signs each document again that a key of the site has signed. Other documents are not
    /// signed, because anyone with push access may have written them.
    pub async fn sign_published(self, name: &str) -> Result<()> {
        self.services.process.ensure_may_write()?;
        let (own, required) =
            (own_signers(self.services).await?, required_signers(&self.services.definitions).await?);
        let keys: Vec<&PublicKey> =
            [&own, &required].into_iter().flatten().flat_map(RequiredSigners::keys).collect();
        let claims = self.signed_claims(&keys).await?;
        self.sign(name, &claims).await.map(drop)
    }

    /// Signs an existing image that has no signature by the site's key, if the site signs existing images.
    pub(crate) async fn sign_if_unsigned(self, name: &str) -> Result<()> {
        let Some(signing) = &self.services.definitions.site.image_signing else { return Ok(()) };
        let Some(own) = own_signers(self.services).await? else { return Ok(()) };
        if signing.existing == ExistingImages::Leave || self.ensure_signed_by(&own).await.is_ok() {
            return Ok(());
        }
        self.sign_published(name).await
    }
}

#[cfg(test)]
mod tests {
    use farrier_signing::testing::{EC_256, OpensslDir};
    use oci::{Artifact, ImageIndex};

    use super::*;
    use crate::{
        images::rotate,
        testing::{Bench, K9, module},
    };

    const SCAN: &str = "https://cosign.sigstore.dev/attestation/vuln/v1";

    /// Adds attestations of a scanner that ran on 120 days, in both forms.
    async fn attest_scans(image: StoredImage<'_>) {
        let StoredImage { services, repository, digest } = image;
        let (registry, subject) = (&services.images.registry, image.manifest().await.unwrap().bytes);
        let tag = provenance::attestation_tag(digest).unwrap();
        let before = image.manifest_under(&tag).await.unwrap().unwrap();
        let mut layers = Vec::new();
        for day in 0..120 {
            let content = format!("scan of day {day}").into_bytes();
            layers.push(provenance::attestation_layer(&content, SCAN));
            let annotations = [("dev.sigstore.bundle.predicateType", SCAN)];
            let bundle = Artifact::about(&subject, provenance::SIGSTORE_BUNDLE, content, &annotations);
            image.push_document(&bundle.unwrap()).await.unwrap();
        }
        let tagged = provenance::add_layers(before.as_ref(), &layers).unwrap();
        registry.push_bytes(repository, &tagged.config).await.unwrap();
        let (version, kind) = (Version::Tag(tag), media_type::OCI_MANIFEST);
        registry.push_manifest(repository, &version, kind, &tagged.manifest).await.unwrap();
    }

    #[tokio::test]
    async fn documents_are_signed_and_found_among_many_attestations_of_others() {
        let mut bench = Bench::new(&json!({}));
        let [old, new] = [(); 2].map(|()| {
            let openssl_dir = OpensslDir::new();
            openssl_dir.key(EC_256);
            let pem = std::fs::read_to_string(openssl_dir.path("p.pem")).unwrap();
            (openssl_dir, PublicKey::image_key_from_pem(&pem).unwrap())
        });
        bench.sign_images_with(&old.0);
        let digest = &bench.publish(K9, &[&module()]).await.unwrap().digest;
        let repository = &bench.services.images.location.repository("x").unwrap();
        attest_scans(StoredImage { services: &bench.services, repository, digest }).await;
        bench.sign_images_with(&new.0);
        let accepted = RequiredSigners::one("old", old.1.clone());
        rotate(&bench.services, &accepted, &[]).await.unwrap();

        let image = StoredImage { services: &bench.services, repository, digest };
        let tagged = image.tagged_statements(&[&new.1]).await.unwrap();
        assert!(!tagged.is_empty());
        assert_eq!(tagged, image.tagged_statements(&[&old.1]).await.unwrap());
        let bundled = image.bundled_statements(&[&new.1]).await.unwrap();
        assert_eq!(bundled.len(), tagged.len() + 1, "and the signature of the image");
    }

    #[tokio::test]
    async fn an_unreadable_attestation_tag_keeps_no_image_from_its_signature() {
        let mut bench = Bench::new(&json!({}));
        let digest = &bench.publish(K9, &[&module()]).await.unwrap().digest;
        let repository = &bench.services.images.location.repository("x").unwrap();
        let version = Version::Tag(provenance::attestation_tag(digest).unwrap());
        let bytes = ImageIndex::empty().to_bytes().unwrap();
        let kind = media_type::OCI_INDEX;
        bench.services.images.registry.push_manifest(repository, &version, kind, &bytes).await.unwrap();
        let openssl_dir = OpensslDir::new();
        openssl_dir.key(EC_256);
        bench.sign_images_with(&openssl_dir);
        let image = StoredImage { services: &bench.services, repository, digest };
        let claim = Claim { predicate_type: provenance::SLSA_PREDICATE, predicate: json!({}) };
        let error = image.sign("x", &[claim]).await.unwrap_err();
        assert!(error.to_string().starts_with("cannot add an entry to "), "{error}");
        let pem = std::fs::read_to_string(openssl_dir.path("p.pem")).unwrap();
        let key = PublicKey::image_key_from_pem(&pem).unwrap();
        assert!(image.has_tagged_signature(&key).await.unwrap());
    }

    #[tokio::test]
    async fn content_that_farrier_cannot_read_is_not_replaced() {
        let mut bench = Bench::new(&json!({}));
        let digest = &bench.publish(K9, &[&module()]).await.unwrap().digest;
        let repository = &bench.services.images.location.repository("x").unwrap();
        let version = Version::Tag(provenance::signature_tag(digest).unwrap());
        let registry = bench.services.images.registry.clone();
        let bytes = ImageIndex::empty().to_bytes().unwrap();
        registry.push_manifest(repository, &version, media_type::OCI_INDEX, &bytes).await.unwrap();
        let openssl_dir = OpensslDir::new();
        openssl_dir.key(EC_256);
        bench.sign_images_with(&openssl_dir);
        let image = StoredImage { services: &bench.services, repository, digest };
        let error = image.sign("x", &[]).await.unwrap_err();
        assert!(error.to_string().starts_with("cannot add an entry to "), "{error}");
        assert_eq!(registry.manifest(repository, &version).await.unwrap().unwrap().bytes, bytes);
    }
}
