//! Adapter: signatures of images and of statements about them, looked up where `cosign` puts them.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt as _, stream};

use super::keys::{own_key, required_keys, trusted_keys};
use crate::{
    error_chain,
    image::{Digest, ImageReference, Repository, Tag, Version},
    oci::{Descriptor, ImageManifest},
    parts::{AT_ONCE, Parts, TargetError},
    plan::SignatureState,
    provenance::{self, DSSE, Envelope, PublicKey, SIMPLE_SIGNING, Statement},
};

/// The cache's records of signatures that were found good: a signature over a digest does not become bad.
const SIGNED: &str = "signed";
/// Layers of one tag that are looked at.
const MAX_LAYERS: usize = 100;
/// What [`StoredImage::signed_by`] says where there is nothing to verify.
pub(super) const NO_SIGNATURE: &str = "it has no signature";

/// An image as it stands in a repository.
#[derive(Clone, Copy)]
pub(crate) struct StoredImage<'a> {
    pub(crate) parts: &'a Parts,
    pub(crate) repository: &'a Repository,
    pub(crate) digest: &'a Digest,
}

impl StoredImage<'_> {
    /// The manifest of a tag with signatures or attestations; `None` for other content too, which is replaced.
    pub(super) async fn manifest_under(self, tag: &Tag) -> Result<Option<ImageManifest>, TargetError> {
        let version = Version::Tag(tag.clone());
        let stored = self.parts.registry_of(self.repository).manifest(self.repository, &version).await?;
        Ok(stored.and_then(|stored| ImageManifest::parse(&stored.bytes).ok()))
    }

    /// The layers of one kind under a tag, each with its bytes, or why they cannot be read.
    async fn layers_under(
        self,
        tag: Option<Tag>,
        (media_type, what): (&str, &str),
    ) -> Result<Vec<(Descriptor, Result<Vec<u8>, String>)>, TargetError> {
        let mut found = Vec::new();
        let Some(tag) = tag else { return Ok(found) };
        let Some(manifest) = self.manifest_under(&tag).await? else { return Ok(found) };
        let layers = manifest.layers.into_iter().filter(|layer| layer.media_type == media_type);
        for layer in layers.take(MAX_LAYERS) {
            let repository = self.repository;
            match self.parts.small_blob(repository, &layer, what).await {
                Ok(bytes) => found.push((layer, Ok(bytes))),
                Err(error @ TargetError::Registry(_)) if !error.is_unreachable() => {
                    tracing::warn!(%repository, %tag, error = %error_chain(&error), "{what} cannot be read");
                    found.push((layer, Err(error_chain(&error))));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(found)
    }

    /// Which of the keys signed the image; why none of them did, as a value.
    pub(super) async fn signed_by(
        self,
        keys: &[PublicKey],
    ) -> Result<Result<&PublicKey, String>, TargetError> {
        let tag = provenance::signature_tag(self.digest);
        let mut others = 0;
        for (layer, payload) in self.layers_under(tag, (SIMPLE_SIGNING, "signed payload")).await? {
            let Some(signature) = provenance::layer_signature(&layer) else { continue };
            let payload = match payload {
                Ok(payload) => payload,
                Err(why) => return Ok(Err(format!("its signature cannot be read: {why}"))),
            };
            // A good signature of another image may be put where this one's are looked for.
            let is_this = provenance::signed_digest(&payload).is_some_and(|signed| signed == *self.digest);
            match keys.iter().find(|key| is_this && key.verifies(&payload, &signature)) {
                Some(key) => return Ok(Ok(key)),
                None => others += 1,
            }
        }
        Ok(Err(match others {
            0 => NO_SIGNATURE.to_owned(),
            1 => "its signature is not by an accepted key, or not over this image".to_owned(),
            many => format!("none of its {many} signatures is by an accepted key and over this image"),
        }))
    }

    /// Statements about the image that one of the keys signed.
    pub(super) async fn attested(self, keys: &[PublicKey]) -> Result<Vec<Statement>, TargetError> {
        let tag = provenance::attestation_tag(self.digest);
        let layers = self.layers_under(tag, (DSSE, "attestation")).await?;
        let envelopes = layers.iter().filter_map(|(_, bytes)| Envelope::parse(bytes.as_ref().ok()?).ok());
        let signed = envelopes.filter(|envelope| keys.iter().any(|key| envelope.is_signed_by(key)));
        let statements = signed.filter_map(|envelope| Statement::parse(&envelope.payload).ok());
        Ok(statements.filter(|statement| provenance::is_about(statement, self.digest)).collect())
    }

    /// Fails where none of the keys signed the image. What was found good once is not looked up again.
    pub(super) async fn must_be_signed(self, keys: &[PublicKey]) -> Result<(), String> {
        let remembered = |key: &PublicKey| {
            let record = self.parts.cache.read_record::<bool>(SIGNED, &self.record_key(key));
            record.is_ok_and(|found| found == Some(true))
        };
        if keys.iter().any(remembered) {
            return Ok(());
        }
        match self.signed_by(keys).await {
            Ok(Ok(key)) => {
                // A record that cannot be written is only a look-up more the next time.
                let _ = self.remember_signature(key);
                Ok(())
            }
            Ok(Err(why)) => Err(why),
            Err(error) => Err(error_chain(&error)),
        }
    }

    /// May something be made from the image? Where the site has keys for images, one of them must have signed it, because
    /// whoever may write to the registry can put any content under its tag, with any annotations; why none did, as a value.
    /// Where modules are signed there are such keys: else its writers could have anything signed.
    pub(crate) async fn trusted(self) -> Result<Result<(), String>, TargetError> {
        let keys = trusted_keys(self.parts).await?;
        if keys.is_empty() {
            return Ok(match self.parts.module_signer {
                None => Ok(()),
                Some(_) => Err("the site has no keys for images".to_owned()),
            });
        }
        Ok(self.must_be_signed(&keys).await)
    }

    /// The same, for what cannot be made without it; `what` names it.
    pub(crate) async fn ensure_trusted(self, what: &str) -> Result<(), TargetError> {
        let Self { repository, digest, .. } = self;
        self.trusted().await?.map_err(|why| {
            TargetError::unmet(
                format!("{what} {repository}@{digest} is not signed with a key of this site: {why}"),
                "if farrier published it, delete its tag: then it is built and published again, before what is made of it; \
                 if another team did, name its key in policy.requireSigned",
            )
        })
    }

    pub(super) fn remember_signature(self, key: &PublicKey) -> Result<(), TargetError> {
        Ok(self.parts.cache.write_record(SIGNED, &self.record_key(key), &true)?)
    }

    fn record_key(self, key: &PublicKey) -> String {
        let Self { repository, digest, .. } = self;
        Digest::of(format!("{repository}@{digest} {}", key.fingerprint()).as_bytes()).hex().to_owned()
    }
}

/// Looks up the signatures of images about which nothing is known yet.
pub(crate) async fn look_up_signatures(
    parts: &Parts,
    images: &BTreeSet<ImageReference>,
    known: &mut BTreeMap<Digest, SignatureState>,
) {
    let wanted: Vec<(Repository, Digest)> = images
        .iter()
        .filter_map(|reference| match &reference.version {
            Version::Digest(digest) if !known.contains_key(digest) => {
                Some((reference.repository.clone(), digest.clone()))
            }
            Version::Digest(_) | Version::Tag(_) => None,
        })
        .collect();
    if wanted.is_empty() {
        return;
    }
    // A key that cannot be loaded signs nothing; whoever then tries to sign says why.
    let own = own_key(parts).await;
    let required = required_keys(parts).await.map_err(|error| error_chain(&error));
    let found = stream::iter(wanted)
        .map(|(repository, digest)| {
            let (own, required) = (&own, &required);
            async move {
                let image = StoredImage { parts, repository: &repository, digest: &digest };
                let ours = match own {
                    Ok(Some(key)) => image.must_be_signed(std::slice::from_ref(key)).await.is_ok(),
                    Ok(None) => true,
                    Err(_) => false,
                };
                let refused = match required {
                    Ok(keys) if keys.is_empty() => None,
                    Ok(keys) => image.must_be_signed(keys).await.err(),
                    Err(error) => Some(error.clone()),
                };
                (digest, SignatureState { ours, refused })
            }
        })
        .buffer_unordered(AT_ONCE)
        .collect::<Vec<_>>()
        .await;
    known.extend(found);
}
