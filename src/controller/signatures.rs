//! Adapter: signatures of images and of what is said about them, kept where `cosign` looks for them.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use futures::{StreamExt as _, stream};
use serde_json::Value;

use super::{
    Controller, TargetError, TargetReport,
    documents::{BILL, CHECK_REPORT, PROVENANCE},
    observe::AT_ONCE,
    provenance::Claim,
    retry::chain,
};
use crate::{
    blocking::blocking,
    image::{Digest, ImageReference, Repository, Tag, Version},
    net::SecretReader,
    oci::{Descriptor, ImageError, ImageManifest, media_type},
    plan::{PlannedSignature, SignatureState},
    provenance::{
        self, CHECK_REPORT_PREDICATE, CYCLONEDX_PREDICATE, DSSE, Envelope, PublicKey, SIMPLE_SIGNING,
        SLSA_PREDICATE, Statement, attestation_layer, layer_signature,
    },
    registry::{
        Upload,
        contention::{MAX_TRIES, pause_before},
    },
    signing::{self, SignatureHash, Signer},
    site::ImageSigning,
};

/// The cache's records of signatures that were found good: a signature over a digest does not become bad.
const SIGNED: &str = "signed";
/// Layers of one tag that are looked at.
const MAX_LAYERS: usize = 100;

/// A key that signs images, with its public half in the form that verifies.
#[derive(Clone)]
struct ImageSigner {
    signer: Arc<Signer>,
    public: PublicKey,
}

impl ImageSigner {
    async fn load(signing: &ImageSigning, root: &Path, secrets: &SecretReader) -> Result<Self, TargetError> {
        let ImageSigning { key, passphrase, public_key, existing: _ } = signing;
        let path = public_key.as_ref().map(|path| root.join(path));
        let public = path.as_deref().map(signing::PublicKey::from_file).transpose()?;
        let signer = Signer::load(key, passphrase.as_ref(), public.as_ref(), secrets).await?;
        if let (Some(path), Some(public)) = (&path, &public) {
            signer.must_match(public, path)?;
        }
        let public = PublicKey::from_info(signer.public_key().der())
            .map_err(|source| TargetError::ImageKey { from: "imageSigning".to_owned(), source })?;
        Ok(Self { signer: Arc::new(signer), public })
    }

    /// Not on the asynchronous threads: a program may be asked.
    async fn sign(&self, content: Vec<u8>) -> Result<Vec<u8>, TargetError> {
        let signer = Arc::clone(&self.signer);
        Ok(blocking(move || signer.sign(SignatureHash::Sha256, &content)).await?)
    }
}

impl Claim {
    /// The claim that a check report is.
    pub(super) fn of_report(content: &[u8]) -> Result<Self, TargetError> {
        Ok(Self { predicate_type: CHECK_REPORT_PREDICATE, predicate: json("check report", content)? })
    }
}

fn json(what: &'static str, content: &[u8]) -> Result<Value, TargetError> {
    Ok(serde_json::from_slice(content).map_err(|source| ImageError::Json { what, source })?)
}

impl Controller {
    /// What signs images; `None` where the site does not say.
    async fn image_signer(&self) -> Result<Option<ImageSigner>, TargetError> {
        match &self.definitions.site.image_signing {
            Some(signing) => {
                let secrets = self.fetcher.net().secrets();
                ImageSigner::load(signing, &self.definitions.root, secrets).await.map(Some)
            }
            None => Ok(None),
        }
    }

    /// Fails where images are to be signed and cannot be: better before a compilation than after it.
    pub(super) async fn can_sign_images(&self) -> Result<(), TargetError> {
        self.image_signer().await.map(drop)
    }

    /// The public half of the site's own key. Where a file has it, the key itself is not needed: it stays on the side
    /// of an air gap where images are signed.
    pub(super) async fn own_key(&self) -> Result<Option<PublicKey>, TargetError> {
        let Some(signing) = &self.definitions.site.image_signing else { return Ok(None) };
        match &signing.public_key {
            Some(path) => Ok(read_keys(vec![self.definitions.root.join(path)]).await?.pop()),
            None => Ok(self.image_signer().await?.map(|signer| signer.public)),
        }
    }

    /// The keys of which one must have signed (`policy.requireSigned`).
    pub(super) async fn required_keys(&self) -> Result<Vec<PublicKey>, TargetError> {
        let root = self.definitions.root.clone();
        let paths = self.definitions.site.policy.require_signed.iter().map(|path| root.join(path));
        read_keys(paths.collect()).await
    }

    /// Signs what is said about an image, then the image itself, where the site signs. What is signed already by the
    /// same key is not signed again. Returns the bytes sent.
    pub(super) async fn sign_image(
        &self,
        repository: &Repository,
        image: &Digest,
        name: &str,
        claims: &[Claim],
    ) -> Result<u64, TargetError> {
        let Some(signer) = self.image_signer().await? else { return Ok(0) };
        let mut sent = self.attest(&signer, repository, image, name, claims).await?;
        let own = std::slice::from_ref(&signer.public);
        if self.signed_by(repository, image, own).await?.is_ok() {
            return Ok(sent);
        }
        let payload = provenance::simple_signing(repository.as_str(), image);
        let signature = signer.sign(payload.clone()).await?;
        let layer = provenance::signature_layer(&payload, &signature);
        sent += self.push_small(repository, &payload).await?;
        sent += self.add_layers(repository, provenance::signature_tag(image), &[layer]).await?;
        self.remember_signature(repository, image, &signer.public)?;
        Ok(sent)
    }

    async fn attest(
        &self,
        signer: &ImageSigner,
        repository: &Repository,
        image: &Digest,
        name: &str,
        claims: &[Claim],
    ) -> Result<u64, TargetError> {
        let own = std::slice::from_ref(&signer.public);
        let known = self.attested(repository, image, own).await?;
        let (mut sent, mut new) = (0, Vec::new());
        for Claim { predicate_type, predicate } in claims {
            let is_it =
                |known: &Statement| known.predicate_type == *predicate_type && known.predicate == *predicate;
            if known.iter().any(is_it) {
                continue;
            }
            let payload = provenance::statement(name, image, predicate_type, predicate);
            let signature = signer.sign(provenance::pre_authentication(&payload)).await?;
            let envelope = Envelope::write(&payload, &signature)
                .map_err(|error| not_written(repository, image, &error.to_string()))?;
            sent += self.push_small(repository, &envelope).await?;
            new.push(attestation_layer(&envelope, predicate_type));
        }
        if !new.is_empty() {
            sent += self.add_layers(repository, provenance::attestation_tag(image), &new).await?;
        }
        Ok(sent)
    }

    async fn push_small(&self, repository: &Repository, bytes: &[u8]) -> Result<u64, TargetError> {
        let upload = self.registry.push_bytes(repository, bytes).await?;
        Ok(match upload {
            Upload::Sent(bytes) => bytes,
            Upload::Present => 0,
        })
    }

    /// Adds layers to what a tag holds, and looks whether they are in it: the protocol has no way to make other
    /// writers wait, and one that read the tag before may write it without them.
    async fn add_layers(
        &self,
        repository: &Repository,
        tag: Option<Tag>,
        layers: &[Descriptor],
    ) -> Result<u64, TargetError> {
        let Some(tag) = tag else { return Ok(0) };
        let mut sent = 0;
        for attempt in 0..=MAX_TRIES {
            let before = self.layers_of(repository, &tag).await?;
            let held = before.as_ref().map(|manifest| manifest.layers.as_slice()).unwrap_or_default();
            if layers.iter().all(|layer| held.contains(layer)) {
                return Ok(sent);
            }
            pause_before(attempt).await;
            let made = provenance::layered(before.as_ref(), layers)?;
            sent += self.push_small(repository, &made.config).await?;
            self.may_write()?;
            let version = Version::Tag(tag.clone());
            self.registry
                .push_manifest(repository, &version, media_type::OCI_MANIFEST, &made.manifest)
                .await?;
        }
        Err(TargetError::SignaturesLost { tag: format!("{repository}:{tag}"), tries: MAX_TRIES })
    }

    /// The manifest of a tag with signatures or attestations. What is no such manifest counts as none: it is replaced.
    async fn layers_of(
        &self,
        repository: &Repository,
        tag: &Tag,
    ) -> Result<Option<ImageManifest>, TargetError> {
        let version = Version::Tag(tag.clone());
        let registry = self.registry_of(repository);
        let stored = registry.manifest(repository, &version).await?;
        Ok(stored.and_then(|stored| ImageManifest::parse(&stored.bytes).ok()))
    }

    /// Which of the keys signed the image; why none of them did, as a value.
    pub(super) async fn signed_by<'a>(
        &self,
        repository: &Repository,
        image: &Digest,
        keys: &'a [PublicKey],
    ) -> Result<Result<&'a PublicKey, String>, TargetError> {
        let Some(tag) = provenance::signature_tag(image) else { return Ok(Err("it has no tag".to_owned())) };
        let Some(manifest) = self.layers_of(repository, &tag).await? else {
            return Ok(Err("it has no signature".to_owned()));
        };
        let mut others = 0;
        let signatures = manifest.layers.iter().filter(|layer| layer.media_type == SIMPLE_SIGNING);
        for layer in signatures.take(MAX_LAYERS) {
            let Some(signature) = layer_signature(layer) else { continue };
            let payload = match self.small_blob(repository, layer, "signed payload").await {
                Ok(payload) => payload,
                Err(error @ TargetError::Registry(_)) if !error.is_unreachable() => {
                    return Ok(Err(format!("its signature cannot be read: {}", chain(&error))));
                }
                Err(error) => return Err(error),
            };
            let Some(key) = keys.iter().find(|key| key.verifies(&payload, &signature)) else {
                others += 1;
                continue;
            };
            match provenance::signed_digest(&payload) {
                Some(signed) if signed == *image => return Ok(Ok(key)),
                // A good signature of another image, put where this one's are looked for.
                _ => others += 1,
            }
        }
        Ok(Err(match others {
            0 => "it has no signature".to_owned(),
            1 => "its signature is not by an accepted key, or not over this image".to_owned(),
            many => format!("none of its {many} signatures is by an accepted key and over this image"),
        }))
    }

    /// Statements about the image that one of the keys signed.
    pub(super) async fn attested(
        &self,
        repository: &Repository,
        image: &Digest,
        keys: &[PublicKey],
    ) -> Result<Vec<Statement>, TargetError> {
        let mut found = Vec::new();
        let Some(tag) = provenance::attestation_tag(image) else { return Ok(found) };
        let Some(manifest) = self.layers_of(repository, &tag).await? else { return Ok(found) };
        let envelopes = manifest.layers.iter().filter(|layer| layer.media_type == DSSE);
        for layer in envelopes.take(MAX_LAYERS) {
            let bytes = match self.small_blob(repository, layer, "attestation").await {
                Ok(bytes) => bytes,
                Err(error @ TargetError::Registry(_)) if !error.is_unreachable() => {
                    tracing::warn!(%repository, %tag, error = %chain(&error), "attestation cannot be read");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let Ok(envelope) = Envelope::parse(&bytes) else { continue };
            if !keys.iter().any(|key| envelope.is_signed_by(key)) {
                continue;
            }
            let Ok(statement) = Statement::parse(&envelope.payload) else { continue };
            if provenance::is_about(&statement, image) {
                found.push(statement);
            }
        }
        Ok(found)
    }

    /// Looks up the signatures of images about which nothing is known yet. Says whether there were any.
    pub(super) async fn look_up_signatures(
        &self,
        images: &BTreeSet<ImageReference>,
        known: &mut BTreeMap<Digest, SignatureState>,
    ) -> bool {
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
            return false;
        }
        // A key that cannot be loaded signs nothing; whoever then tries to sign says why.
        let own = self.own_key().await;
        let required = self.required_keys().await.map_err(|error| chain(&error));
        let found = stream::iter(wanted)
            .map(|(repository, digest)| {
                let (own, required) = (&own, &required);
                async move {
                    let ours = match own {
                        Ok(Some(key)) => {
                            self.state_of(&repository, &digest, std::slice::from_ref(key)).await.is_ok()
                        }
                        Ok(None) => true,
                        Err(_) => false,
                    };
                    let refused = match required {
                        Ok(keys) if keys.is_empty() => None,
                        Ok(keys) => self.state_of(&repository, &digest, keys).await.err(),
                        Err(error) => Some(error.clone()),
                    };
                    (digest, SignatureState { ours, refused })
                }
            })
            .buffer_unordered(AT_ONCE)
            .collect::<Vec<_>>()
            .await;
        known.extend(found);
        true
    }

    /// Is the image signed by one of the keys? What was found good once is not asked for again.
    async fn state_of(
        &self,
        repository: &Repository,
        image: &Digest,
        keys: &[PublicKey],
    ) -> Result<(), String> {
        let remembered = |key: &PublicKey| {
            let record = self.cache.read_record::<bool>(SIGNED, &record_key(repository, image, key));
            record.is_ok_and(|found| found == Some(true))
        };
        if keys.iter().any(remembered) {
            return Ok(());
        }
        match self.signed_by(repository, image, keys).await {
            Ok(Ok(key)) => {
                // A record that cannot be written is only a look-up more the next time.
                let _ = self.remember_signature(repository, image, key);
                Ok(())
            }
            Ok(Err(why)) => Err(why),
            Err(error) => Err(chain(&error)),
        }
    }

    fn remember_signature(
        &self,
        repository: &Repository,
        image: &Digest,
        key: &PublicKey,
    ) -> Result<(), TargetError> {
        Ok(self.cache.write_record(SIGNED, &record_key(repository, image, key), &true)?)
    }

    /// Signs an image that is published without a signature, with the documents that stand beside it.
    pub(super) async fn sign_planned(&self, planned: &PlannedSignature) -> TargetReport {
        let PlannedSignature { image, reference } = planned;
        let subject = format!("{image}, {reference}");
        match self.sign_published(image.as_str(), reference).await {
            Ok(()) => TargetReport::Signed { subject, image: reference.to_string() },
            Err(error) => {
                TargetReport::Failed { subject, error: chain(&error), hint: error.hint(), detail: Vec::new() }
            }
        }
    }

    /// Signs an image and the documents that stand beside it.
    pub(super) async fn sign_published(
        &self,
        name: &str,
        reference: &ImageReference,
    ) -> Result<(), TargetError> {
        let ImageReference { repository, version: Version::Digest(image) } = reference else { return Ok(()) };
        self.may_write()?;
        let mut claims = Vec::new();
        for (kind, predicate_type) in [
            (&CHECK_REPORT, CHECK_REPORT_PREDICATE),
            (&BILL, CYCLONEDX_PREDICATE),
            (&PROVENANCE, SLSA_PREDICATE),
        ] {
            let Some(found) = self.document(repository, image, kind).await? else { continue };
            let document = json(kind.name, &found.content)?;
            let predicate = if *kind == PROVENANCE { document["predicate"].clone() } else { document };
            claims.push(Claim { predicate_type, predicate });
        }
        self.sign_image(repository, image, name, &claims).await.map(drop)
    }

    /// Signs an image that was there already, where the site signs and it is not signed yet.
    pub(super) async fn ensure_signed(
        &self,
        name: &str,
        repository: &Repository,
        image: &Digest,
    ) -> Result<(), TargetError> {
        let Some(signing) = &self.definitions.site.image_signing else { return Ok(()) };
        let Some(own) = self.own_key().await? else { return Ok(()) };
        if !signing.existing.signs()
            || self.state_of(repository, image, std::slice::from_ref(&own)).await.is_ok()
        {
            return Ok(());
        }
        let version = Version::Digest(image.clone());
        self.sign_published(name, &ImageReference { repository: repository.clone(), version }).await
    }
}

/// Reads public keys in PEM form.
pub(super) async fn read_keys(paths: Vec<std::path::PathBuf>) -> Result<Vec<PublicKey>, TargetError> {
    blocking(move || {
        let read = |path: std::path::PathBuf| {
            let text = std::fs::read_to_string(&path)
                .map_err(|source| TargetError::Input { path: path.clone(), source })?;
            let from = path.display().to_string();
            PublicKey::from_pem(&text).map_err(|source| TargetError::ImageKey { from, source })
        };
        paths.into_iter().map(read).collect()
    })
    .await
}

fn record_key(repository: &Repository, image: &Digest, key: &PublicKey) -> String {
    Digest::of(format!("{repository}@{image} {}", key.fingerprint()).as_bytes()).hex().to_owned()
}

fn not_written(repository: &Repository, image: &Digest, reason: &str) -> TargetError {
    ImageError::Unusable { what: "attestation", reason: format!("of {repository}@{image}: {reason}") }.into()
}
