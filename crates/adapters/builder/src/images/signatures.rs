//! Finds signatures of images and of statements about them where `cosign` stores them: under tags made from the image's
//! digest (2.x), and as bundles that refer to the image (3.x).

use std::collections::{BTreeMap, BTreeSet};

use farrier_core::{
    image::{Digest, ImageReference, Repository, Tag, Version},
    plan::SignatureState,
    provenance::{
        self, DSSE, Envelope, FoundSignatures, ImageSignature, PublicKey, RequiredSigners, SIGNED_PREDICATE,
        SIMPLE_SIGNING, Statement, Trust,
    },
};
use farrier_store::{SignatureStatus, registry::StoredManifest};
use futures::{StreamExt as _, stream};
use oci::{Descriptor, ImageError, ImageManifest, error_chain};

use super::{
    documents::PREDICATE_TYPES,
    keys::{has_keys, own_signers, required_signers, revoked_keys},
};
use crate::services::{BuildError, BuildServices, MAX_CONCURRENT_REQUESTS, MAX_DOCUMENT, Result};

/// Cache records of verified signatures: a valid signature over a digest stays valid.
const SIGNED: &str = "signed";
/// Maximum number of signatures or statements that are read: layers of one tag, or bundles of one image.
pub(super) const MAX_SIGNATURES: usize = 100;
/// Maximum size in bytes of these signatures or statements, which are in memory at the same time.
const MAX_TOTAL_BYTES: u64 = 8 * MAX_DOCUMENT;

/// An image in a repository.
#[derive(Clone, Copy)]
pub struct StoredImage<'a> {
    pub services: &'a BuildServices,
    pub repository: &'a Repository,
    pub digest: &'a Digest,
}

/// Content, or the reason that it cannot be read.
type ReadResult<T> = Result<T, String>;

impl StoredImage<'_> {
    /// Returns whether a trusted key signed the image.
    pub async fn signature_status(self) -> Result<SignatureStatus> {
        if !has_keys(&self.services.definitions) {
            return Ok(SignatureStatus::NoKeys);
        }
        match self.check_trusted().await {
            Ok(outcome) => Ok(outcome.map_or_else(SignatureStatus::Refused, |()| SignatureStatus::Signed)),
            Err(error) if error.is_unreachable() => Err(error),
            // An unreadable key must not stop a process that publishes other images, so refuse only this image.
            Err(error) => Ok(SignatureStatus::Refused(error_chain(&error))),
        }
    }

    /// Fetches the image's manifest. Fails if the image does not exist.
    pub(crate) async fn manifest(self) -> Result<StoredManifest> {
        let (repository, version) = (self.repository.clone(), Version::Digest(self.digest.clone()));
        self.services.images.existing_manifest(&ImageReference { repository, version }).await
    }

    /// Returns the manifest of a tag with signatures or attestations; `None` if the tag is absent. The inner error is the reason why
    /// the tag's content is unusable.
    pub(super) async fn manifest_under(self, tag: &Tag) -> Result<Result<Option<ImageManifest>, ImageError>> {
        let version = Version::Tag(tag.clone());
        let stored =
            self.services.images.registry_of(self.repository).manifest(self.repository, &version).await?;
        Ok(stored.map(|stored| ImageManifest::parse(&stored.bytes)).transpose())
    }

    /// Reads a layer, if its size is at most `remaining`, and subtracts the size.
    async fn read(self, layer: &Descriptor, what: &str, remaining: &mut u64) -> Result<ReadResult<Vec<u8>>> {
        let Self { services, repository, digest } = self;
        let Some(rest) = remaining.checked_sub(layer.size) else {
            return Ok(Err(format!(
                "cannot read {what} {}: only {MAX_TOTAL_BYTES} bytes are read for an image",
                layer.digest
            )));
        };
        *remaining = rest;
        match services.images.small_blob(repository, layer, what).await {
            Ok(bytes) => Ok(Ok(bytes)),
            Err(error @ BuildError::Registry(_)) if !error.is_unreachable() => {
                tracing::warn!(%repository, %digest, error = %error_chain(&error), "cannot read {what}");
                Ok(Err(error_chain(&error)))
            }
            Err(error) => Err(error),
        }
    }

    /// Returns the last layers of one media type under a tag, with their content. Skips attestations that farrier does not sign.
    /// `name` describes a layer in errors.
    async fn layers_under(
        self,
        tag: Option<Tag>,
        media_type: &str,
        name: &str,
    ) -> Result<Vec<(Descriptor, ReadResult<Vec<u8>>)>> {
        let mut contents = Vec::new();
        let Some(tag) = tag else { return Ok(contents) };
        let Ok(Some(mut manifest)) = self.manifest_under(&tag).await? else { return Ok(contents) };
        manifest.layers.retain(|layer| {
            let predicate_type = provenance::layer_predicate_type(layer);
            layer.media_type == media_type
                && predicate_type.is_none_or(|kind| PREDICATE_TYPES.contains(&kind))
        });
        let mut remaining = MAX_TOTAL_BYTES;
        for layer in last(manifest.layers) {
            let read = self.read(&layer, name, &mut remaining).await?;
            contents.push((layer, read));
        }
        Ok(contents)
    }

    /// Signatures under the image's signature tag.
    async fn tagged_signatures(self) -> Result<Vec<ReadResult<ImageSignature>>> {
        let layers =
            self.layers_under(provenance::signature_tag(self.digest), SIMPLE_SIGNING, "signed payload");
        let signature = |(layer, read): (Descriptor, ReadResult<Vec<u8>>)| {
            let signature = provenance::layer_signature(&layer)?;
            Some(read.map(|payload| ImageSignature::Simple { payload, signature }))
        };
        Ok(layers.await?.into_iter().filter_map(signature).collect())
    }

    /// Signed statements of these predicate types in bundles.
    async fn bundled_envelopes(self, predicate_types: &[&str]) -> Result<Vec<ReadResult<Envelope>>> {
        let Self { services, repository, digest } = self;
        let registry = services.images.registry_of(repository);
        let mut envelopes = Vec::new();
        let mut candidates = registry.referrers(repository, digest, None).await?;
        candidates.retain(|referrer| provenance::may_be_bundle(referrer, predicate_types));
        let mut remaining = MAX_TOTAL_BYTES;
        for candidate in last(candidates) {
            let stored = registry.manifest(repository, &Version::Digest(candidate.digest)).await?;
            let manifest = stored.and_then(|stored| ImageManifest::parse(&stored.bytes).ok());
            let layer = manifest.as_ref().and_then(|manifest| provenance::bundle_layer(manifest, digest));
            let Some(layer) = layer else { continue };
            match self.read(layer, "signature bundle", &mut remaining).await? {
                // Bundles can contain other content than statements.
                Ok(bytes) => envelopes.extend(Envelope::of_bundle(&bytes).ok().map(Ok)),
                Err(why) => envelopes.push(Err(why)),
            }
        }
        Ok(envelopes)
    }

    /// Whether the signature tag has a signature by this key.
    pub(super) async fn has_tagged_signature(self, key: &PublicKey) -> Result<bool> {
        let signatures = self.tagged_signatures().await?;
        Ok(signatures.iter().flatten().any(|signature| signature.is_by(self.digest, key)))
    }

    /// Finds signatures by the keys, first under the signature tag. Reads the bundles only if `is_enough` returns false for the
    /// tagged signatures.
    pub(super) async fn find_signatures(
        self,
        keys: &[&PublicKey],
        is_enough: &(dyn Fn(&FoundSignatures) -> bool + Sync),
    ) -> Result<FoundSignatures> {
        let mut found = FoundSignatures::default();
        let add = |found: &mut FoundSignatures, all: Vec<ReadResult<ImageSignature>>| {
            for signature in all {
                match signature {
                    Ok(signature) => found.add(self.digest, &signature, keys.iter().copied()),
                    Err(why) => found.add_unread(why),
                }
            }
        };
        add(&mut found, self.tagged_signatures().await?);
        if !is_enough(&found) {
            let bundled = self.bundled_envelopes(&[SIGNED_PREDICATE]).await?;
            add(&mut found, bundled.into_iter().map(|read| read.map(ImageSignature::Statement)).collect());
        }
        Ok(found)
    }

    /// Returns the statements under the attestation tag that are about the image and signed by one of the keys.
    pub(super) async fn tagged_statements(self, keys: &[&PublicKey]) -> Result<Vec<Statement>> {
        let tag = provenance::attestation_tag(self.digest);
        let layers = self.layers_under(tag, DSSE, "attestation").await?;
        let envelopes = layers.iter().filter_map(|(_, bytes)| Envelope::parse(bytes.as_ref().ok()?).ok());
        Ok(self.signed_statements(envelopes, keys))
    }

    /// Returns the statements in bundles that are about the image and signed by one of the keys.
    pub(super) async fn bundled_statements(self, keys: &[&PublicKey]) -> Result<Vec<Statement>> {
        let envelopes = self.bundled_envelopes(&PREDICATE_TYPES).await?;
        Ok(self.signed_statements(envelopes.into_iter().flatten(), keys))
    }

    /// Returns the statements in either form that are about the image and signed by one of the keys.
    pub(super) async fn all_statements(self, keys: &[&PublicKey]) -> Result<Vec<Statement>> {
        let mut statements = self.tagged_statements(keys).await?;
        statements.extend(self.bundled_statements(keys).await?);
        Ok(statements)
    }

    fn signed_statements(
        self,
        envelopes: impl Iterator<Item = Envelope>,
        keys: &[&PublicKey],
    ) -> Vec<Statement> {
        let signed = envelopes.filter(|envelope| keys.iter().any(|key| envelope.is_signed_by(key)));
        let statements = signed.filter_map(|envelope| Statement::parse(&envelope.payload).ok());
        statements.filter(|statement| provenance::is_about(statement, self.digest)).collect()
    }

    /// Checks the image's signatures with `check`. The inner error is the reason why `check` does not accept the
    /// signatures. Verified signatures are cached and not looked up again.
    async fn check_signatures<'k>(
        self,
        keys: impl Iterator<Item = &'k PublicKey>,
        check: &(dyn Fn(&FoundSignatures) -> Result<(), String> + Sync),
    ) -> Result<Result<(), String>> {
        let keys: Vec<&PublicKey> = keys.collect();
        let mut cached = FoundSignatures::default();
        for key in &keys {
            let record = self.services.cache.read_record::<bool>(SIGNED, &self.record_key(key));
            if record.is_ok_and(|is_signed| is_signed == Some(true)) {
                cached.add_signer(key);
            }
        }
        let outcome = check(&cached);
        if keys.is_empty() || outcome.is_ok() {
            return Ok(outcome);
        }
        let mut found = self.find_signatures(&keys, &|found| check(found).is_ok()).await?;
        for key in found.signers() {
            // Best effort: without the record the next check repeats the lookup.
            let _ = self.remember_signature(key);
        }
        for key in cached.signers() {
            found.add_signer(key);
        }
        match check(&found) {
            Ok(()) => Ok(Ok(())),
            Err(why) => Ok(Err(why + &self.revoked_signers_note().await?)),
        }
    }

    /// Returns a suffix for a message that names the revoked keys that signed the image; empty if there are none.
    pub(super) async fn revoked_signers_note(self) -> Result<String> {
        let revoked = revoked_keys(&self.services.definitions).await?;
        if revoked.is_empty() {
            return Ok(String::new());
        }
        let keys: Vec<&PublicKey> = revoked.iter().map(|(_, key)| key).collect();
        let found = self.find_signatures(&keys, &|_| false).await?;
        let signed = |key: &PublicKey| found.signers().iter().any(|signer| signer.is_same_key(key));
        let names = revoked.iter().filter(|(_, key)| signed(key));
        Ok(names.map(|(name, _)| format!("; it is signed by {name}")).collect::<Vec<_>>().concat())
    }

    /// Checks that enough of the keys signed the image. The inner error says which signatures are missing.
    pub async fn check_signed_by(self, required: &RequiredSigners) -> Result<Result<(), String>> {
        self.check_signatures(required.keys(), &|found| required.check(found).accept()).await
    }

    /// Checks like [`Self::check_signed_by`], but returns a registry error as the reason.
    pub(super) async fn ensure_signed_by(self, required: &RequiredSigners) -> Result<(), String> {
        flattened(self.check_signed_by(required).await)
    }

    /// Checks that builds may use the image ([`Trust`]). The inner error is the reason why builds may not use the image. A registry
    /// that does not answer is no such reason.
    pub(crate) async fn check_trusted(self) -> Result<Result<(), String>> {
        let (own, required) =
            (own_signers(self.services).await?, required_signers(&self.services.definitions).await?);
        let signs_modules = self.services.tools.module_signer.is_some();
        let trust = Trust { own: own.as_ref(), required: required.as_ref(), signs_modules };
        match self.check_signatures(trust.keys(), &|found| trust.check(found)).await {
            Err(error) if error.is_unreachable() => Err(error),
            outcome => Ok(flattened(outcome)),
        }
    }

    /// Fails if builds may not use the image. `what` describes the image in the message.
    pub(crate) async fn ensure_trusted(self, what: &str) -> Result<()> {
        let Self { repository, digest, .. } = self;
        self.check_trusted().await?.map_err(|why| {
            BuildError::unmet(
                format!("{what} {repository}@{digest} is not signed with a key of this site: {why}"),
                "if farrier published the image, delete the tag: farrier then builds and publishes the image again, \
                 before the images that need it; if another team published the image, add the team's key to \
                 policy.requireSigned",
            )
        })
    }

    pub(super) fn remember_signature(self, key: &PublicKey) -> Result<()> {
        Ok(self.services.cache.write_record(SIGNED, &self.record_key(key), &true)?)
    }

    fn record_key(self, key: &PublicKey) -> String {
        let Self { repository, digest, .. } = self;
        Digest::of(format!("{repository}@{digest} {}", key.fingerprint()).as_bytes()).hex().to_owned()
    }
}

/// Returns the last entries, at most [`MAX_SIGNATURES`]: signers append theirs to a tag.
pub(super) fn last<T>(mut entries: Vec<T>) -> Vec<T> {
    entries.split_off(entries.len().saturating_sub(MAX_SIGNATURES))
}

/// Merges the inner and the outer error into one reason.
fn flattened(outcome: Result<Result<(), String>>) -> Result<(), String> {
    outcome.unwrap_or_else(|error| Err(error_chain(&error)))
}

/// Looks up the signatures of images that `known` lacks.
pub async fn look_up_signatures(
    services: &BuildServices,
    images: &BTreeSet<ImageReference>,
    known: &mut BTreeMap<Digest, SignatureState>,
) {
    let missing: Vec<(Repository, Digest)> = images
        .iter()
        .filter_map(|reference| match &reference.version {
            Version::Digest(digest) if !known.contains_key(digest) => {
                Some((reference.repository.clone(), digest.clone()))
            }
            Version::Digest(_) | Version::Tag(_) => None,
        })
        .collect();
    if missing.is_empty() {
        return;
    }
    // With an unusable key, treat all images as unsigned. The attempt to sign them reports the key's error.
    let own = own_signers(services).await;
    let required = required_signers(&services.definitions).await.map_err(|error| error_chain(&error));
    let states = stream::iter(missing)
        .map(|(repository, digest)| {
            let (own, required) = (&own, &required);
            async move {
                let image = StoredImage { services, repository: &repository, digest: &digest };
                let ours = match own {
                    Ok(Some(own)) => image.ensure_signed_by(own).await.is_ok(),
                    Ok(None) => true,
                    Err(_) => false,
                };
                let refused = match required {
                    Ok(None) => None,
                    Ok(Some(required)) => image.ensure_signed_by(required).await.err(),
                    Err(error) => Some(error.clone()),
                };
                (digest, SignatureState { ours, refused })
            }
        })
        .buffer_unordered(MAX_CONCURRENT_REQUESTS)
        .collect::<Vec<_>>()
        .await;
    known.extend(states);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::Bench;

    /// Anyone who may push can attach a hundred signatures of 16 MiB.
    #[tokio::test]
    async fn signatures_are_read_up_to_a_total_size() {
        let bench = Bench::new(&json!({}));
        let (services, digest) = (&bench.services, Digest::of(b"image"));
        let repository = services.images.location.repository("x").unwrap();
        services.images.registry.push_bytes(&repository, oci::EMPTY).await.unwrap();
        let image = StoredImage { services, repository: &repository, digest: &digest };
        let (layer, mut remaining) = (Descriptor::of(SIMPLE_SIGNING, oci::EMPTY), 3);
        assert_eq!(image.read(&layer, "signed payload", &mut remaining).await.unwrap().unwrap(), oci::EMPTY);
        let why = image.read(&layer, "signed payload", &mut remaining).await.unwrap().unwrap_err();
        assert!(why.ends_with("only 134217728 bytes are read for an image"), "{why}");
        assert_eq!(remaining, 1);
    }
}
