//! Copies images from other registries into the destination registry, below its prefix.

use std::collections::BTreeSet;

use farrier_core::{
    facts::media_type,
    image::{Digest, HostOutput, ImageReference, Repository, Tag, Version},
    provenance,
};
use farrier_store::{
    DIGEST_TAG_PREFIX,
    registry::{Registry, StoredManifest, join},
};
use oci::{AnyManifest, Descriptor, ImageError, error_chain};

use super::{
    documents::{DOCUMENTS, PREDICATE_TYPES},
    signatures::{MAX_SIGNATURES, last},
};
use crate::services::{BuildError, BuildServices, ImageAccess, MAX_DOCUMENT, Result};

/// Size of the largest signature that is copied.
const MAX_SIGNATURE_BYTES: u64 = 4 << 20;
/// Size limit for the signatures or attestations under one tag, in bytes.
const MAX_TAG_BYTES: u64 = MAX_SIGNATURES as u64 * MAX_DOCUMENT;
/// Maximum nesting of the indexes that are copied.
const MAX_DEPTH: usize = 4;

/// A copy of an image in the destination registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageCopy {
    /// Reference of the copy, by tag.
    pub reference: ImageReference,
    /// Digest of the copy, which equals the original's.
    pub digest: Digest,
    /// Whether the image was copied by this call.
    pub new: bool,
}

/// Copies an image with all its platforms, unless the copy is current. Always copies referrers and signatures, which
/// may be newer than the image.
pub async fn copy_image(services: &BuildServices, text: &str) -> Result<ImageCopy> {
    let wanted: ImageReference = text.parse()?;
    let pinned = services.resolve_reference(text).await?;
    let Version::Digest(digest) = &pinned.version else {
        return Err(BuildError::no_such_image(text));
    };
    let Some(mirror) = services.images.mirror_repository(&wanted)? else {
        return Ok(ImageCopy { digest: digest.clone(), reference: wanted, new: false });
    };
    let tag = copy_tag(&wanted)?;
    let version = Version::Tag(tag);
    let copy = ImageReference { repository: mirror.clone(), version: version.clone() };
    let existing = services.images.registry.manifest(&mirror, &version).await?;
    services.process.ensure_may_write()?;
    let new = existing.is_none_or(|existing| existing.digest != *digest);
    if new {
        copy_manifest(&services.images, &pinned, &mirror, &version, MAX_DEPTH, &mut BTreeSet::new()).await?;
    }
    let source = services.images.registry_of(&pinned.repository);
    let referrers = Referrers { services, source, from: &pinned.repository, image: digest, mirror: &mirror };
    for output in referrers.copy_all().await? {
        Referrers { image: &output, ..referrers }.copy_all().await?;
    }
    Ok(ImageCopy { reference: copy, digest: digest.clone(), new })
}

/// The referrers of an image, to be copied to another repository.
#[derive(Clone, Copy)]
struct Referrers<'a> {
    services: &'a BuildServices,
    source: &'a dyn Registry,
    /// Repository of the image in `source`.
    from: &'a Repository,
    image: &'a Digest,
    mirror: &'a Repository,
}

impl Referrers<'_> {
    /// Copies all referrers, and the signatures and attestations that `cosign` stores under tags made from the image's digest.
    /// Returns the image's outputs. If the lookup of referrers fails, only reports a note, because the image is complete without
    /// referrers.
    async fn copy_all(self) -> Result<Vec<Digest>> {
        let Self { services, source, from, image, mirror } = self;
        let mut referrers = match source.referrers(from, image, None).await {
            Ok(referrers) => referrers,
            Err(error) => {
                let text = format!("cannot copy signatures and documents: {}", error_chain(&error));
                services.process.reporter.note(&format!("{from}@{image}"), &text);
                return Ok(Vec::new());
            }
        };
        // Anyone who may push can add referrers. Those that farrier reads have precedence.
        referrers.sort_by_key(is_read);
        let existing = services.images.registry.referrers(mirror, image, None).await?;
        let mut outputs = Vec::new();
        for referrer in last(referrers) {
            let is_copied = existing.iter().any(|copied| copied.digest == referrer.digest);
            let (version, limit) = (Version::Digest(referrer.digest.clone()), size_limit(&referrer));
            if (is_copied || self.copy(&version, limit).await?)
                && HostOutput::has_type(referrer.artifact_type.as_deref())
            {
                outputs.push(referrer.digest);
            }
        }
        let tags = [provenance::signature_tag(image), provenance::attestation_tag(image)];
        for tag in tags.into_iter().flatten().map(Version::Tag) {
            self.copy(&tag, MAX_TAG_BYTES).await?;
        }
        Ok(outputs)
    }

    /// Copies one referrer, or what is stored under a tag made from the image's digest. Skips manifests about other images, and
    /// those with blobs of more than `max_blobs` bytes in total. Returns whether the manifest refers to the image and was copied.
    async fn copy(self, version: &Version, max_blobs: u64) -> Result<bool> {
        let Self { services, source, from, image, mirror } = self;
        let Some(found) = source.manifest(from, version).await? else { return Ok(false) };
        let Ok(AnyManifest::Image(manifest)) = AnyManifest::parse(&found.bytes) else { return Ok(false) };
        let refers_to_image = manifest.subject.as_ref().is_some_and(|subject| subject.digest == *image);
        let size = manifest.blobs().fold(0, |sum: u64, blob| sum.saturating_add(blob.size));
        if version.digest().is_some() && !refers_to_image {
            return Ok(false);
        }
        if size > max_blobs {
            tracing::warn!(
                "skipping {from}{version}, which is about {image}: {size} bytes, at most {max_blobs} are copied"
            );
            return Ok(false);
        }
        for blob in manifest.blobs() {
            copy_blob(&services.images, source, from, mirror, blob).await?;
        }
        match version {
            Version::Digest(_) => {
                services.images.registry.push_referrer(mirror, &found.bytes).await?;
            }
            Version::Tag(tag) => {
                let manifest = (&*found.media_type, &found.bytes[..]);
                if !join(services.images.registry.as_ref(), mirror, tag, manifest).await? {
                    let note = format!("signatures not copied: cannot add them to {mirror}:{tag}");
                    services.process.reporter.note(&format!("{from}@{image}"), &note);
                }
            }
        }
        Ok(true)
    }
}

/// Whether farrier reads referrers of this type: outputs, documents, signatures.
fn is_read(referrer: &Descriptor) -> bool {
    let artifact_type = referrer.artifact_type.as_deref();
    HostOutput::has_type(artifact_type)
        || DOCUMENTS.iter().any(|kind| artifact_type == Some(kind.media_type))
        || provenance::may_be_bundle(referrer, &PREDICATE_TYPES)
}

/// Size limit for a referrer's blobs, in bytes. The disk limits the size of an output.
fn size_limit(referrer: &Descriptor) -> u64 {
    match referrer.artifact_type.as_deref() {
        kind if HostOutput::has_type(kind) => u64::MAX,
        Some(provenance::SIGSTORE_BUNDLE) => MAX_SIGNATURE_BYTES,
        _ => MAX_DOCUMENT,
    }
}

/// Copies an artifact to `mirror` under a tag, with its blobs and signatures. Anyone may add referrers to an artifact, so neither
/// other referrers nor large ones are copied.
pub async fn copy_artifact(
    services: &BuildServices,
    source: &dyn Registry,
    from: &Repository,
    artifact: &StoredManifest,
    mirror: &Repository,
    tag: Tag,
) -> Result<()> {
    let StoredManifest { digest, media_type, bytes } = artifact;
    for blob in AnyManifest::parse(bytes)?.blobs() {
        copy_blob(&services.images, source, from, mirror, blob).await?;
    }
    services.images.registry.push_manifest(mirror, &Version::Tag(tag), media_type, bytes).await?;
    let mut bundles = source.referrers(from, digest, None).await?;
    bundles.retain(|referrer| provenance::may_be_bundle(referrer, &[provenance::SIGNED_PREDICATE]));
    let bundles = last(bundles).into_iter().map(|bundle| Version::Digest(bundle.digest));
    let tag = provenance::signature_tag(digest).map(Version::Tag);
    let referrers = Referrers { services, source, from, image: digest, mirror };
    for version in bundles.chain(tag) {
        referrers.copy(&version, MAX_SIGNATURE_BYTES).await?;
    }
    Ok(())
}

/// Copies the children that are not in `copied`, then the blobs, then the manifest. Children may be nested `depth` levels deep.
async fn copy_manifest(
    access: &ImageAccess,
    from: &ImageReference,
    mirror: &Repository,
    version: &Version,
    depth: usize,
    copied: &mut BTreeSet<Digest>,
) -> Result<()> {
    let repository = &from.repository;
    let found = access.existing_manifest(from).await?;
    let manifest = AnyManifest::parse(&found.bytes)?;
    for part in manifest.children() {
        if !copied.insert(part.digest.clone()) {
            continue;
        }
        let Some(depth) = depth.checked_sub(1) else {
            let reason = format!("its indexes are nested more than {MAX_DEPTH} levels deep");
            return Err(ImageError::unusable("image index", reason).into());
        };
        let version = Version::Digest(part.digest.clone());
        let from = ImageReference { repository: repository.clone(), version: version.clone() };
        Box::pin(copy_manifest(access, &from, mirror, &version, depth, copied)).await?;
    }
    for blob in manifest.blobs() {
        copy_blob(access, access.registry_of(repository), repository, mirror, blob).await?;
    }
    access.registry.push_manifest(mirror, version, &found.media_type, &found.bytes).await?;
    Ok(())
}

async fn copy_blob(
    access: &ImageAccess,
    source: &dyn Registry,
    from: &Repository,
    mirror: &Repository,
    blob: &Descriptor,
) -> Result<()> {
    let Descriptor { media_type, digest, size, .. } = blob;
    if media_type::is_foreign_layer(media_type) {
        tracing::warn!(%from, %digest, media_type, "layer not copied: registries do not store foreign layers");
        return Ok(());
    }
    if access.registry.has_blob(mirror, digest).await? {
        return Ok(());
    }
    let scratch = access.cache.scratch()?;
    let file = scratch.path().join("blob");
    source.fetch_blob(from, digest, *size, &file).await?;
    access.registry.push_blob(mirror, digest, &file).await?;
    Ok(())
}

/// Tag of a copy: the original's tag, or a tag made from the digest if the original is referenced by digest. A registry
/// might delete an untagged copy as unused.
pub fn copy_tag(reference: &ImageReference) -> Result<Tag> {
    match &reference.version {
        Version::Tag(tag) => Ok(tag.clone()),
        Version::Digest(digest) => Ok(format!("{DIGEST_TAG_PREFIX}{}", digest.hex()).parse()?),
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, path::Path, sync::Arc};

    use farrier_net::{Net, NetOptions};
    use farrier_store::registry::{RegistryLocation, RegistryOptions, RemoteRegistry, connect};
    use oci::{Artifact, ImageIndex, ImageManifest};
    use serde_json::json;

    use super::*;
    use crate::testing::Bench;

    /// Returns services whose other registries are a layout in a directory.
    fn with_remote(directory: &Path) -> (Bench, Arc<dyn Registry>) {
        let mut bench = Bench::new(&json!({}));
        let elsewhere = RegistryLocation::Layout(directory.join("layout"));
        bench.services.images.remote = connect(&elsewhere, &RegistryOptions::default());
        let remote = Arc::clone(&bench.services.images.remote);
        (bench, remote)
    }

    /// Publishes an index with one image at another registry.
    async fn publish(registry: &dyn Registry, repository: &Repository) -> Digest {
        let (config, layer) = (b"{}".as_slice(), b"layer".as_slice());
        let blob = |kind: &str, bytes: &[u8]| Descriptor::new(kind, Digest::of(bytes), bytes.len() as u64);
        for bytes in [config, layer] {
            registry.push_bytes(repository, bytes).await.unwrap();
        }
        let image = ImageManifest {
            schema_version: 2,
            media_type: Some(media_type::OCI_MANIFEST.to_owned()),
            artifact_type: None,
            config: blob(media_type::OCI_CONFIG, config),
            layers: vec![blob(media_type::OCI_LAYER, layer)],
            subject: None,
            annotations: BTreeMap::new(),
        }
        .to_bytes()
        .unwrap();
        let version = Version::Digest(Digest::of(&image));
        registry.push_manifest(repository, &version, media_type::OCI_MANIFEST, &image).await.unwrap();
        let mut index = ImageIndex::empty();
        index.manifests.push(blob(media_type::OCI_MANIFEST, &image));
        let index = index.to_bytes().unwrap();
        let version = Version::Tag("1".parse().unwrap());
        registry.push_manifest(repository, &version, media_type::OCI_INDEX, &index).await.unwrap()
    }

    /// The signatures and documents of an output refer to the output, not to the image.
    #[tokio::test]
    async fn outputs_are_copied_with_their_referrers_and_signatures() {
        let other = tempfile::tempdir().unwrap();
        let (bench, remote) = with_remote(other.path());
        let (repository, text) = ("other.test:5000/hello".parse().unwrap(), "other.test:5000/hello:1");
        let image = publish(remote.as_ref(), &repository).await;
        let image = remote.manifest(&repository, &Version::Digest(image)).await.unwrap().unwrap();
        let push = async |subject: &[u8], kind: &'static str| {
            let artifact = Artifact::about(subject, kind, kind.into(), &[]).unwrap();
            for bytes in [oci::EMPTY, &artifact.content] {
                remote.push_bytes(&repository, bytes).await.unwrap();
            }
            remote.push_referrer(&repository, &artifact.manifest).await.unwrap();
            artifact
        };
        let output = push(&image.bytes, HostOutput::Sysext.media_type()).await;
        copy_image(&bench.services, text).await.unwrap();
        // The documents appear after the first copy of the output.
        let bill = push(&output.manifest, media_type::CYCLONEDX).await;
        let signed = provenance::add_layers(None, &[]).unwrap();
        remote.push_bytes(&repository, &signed.config).await.unwrap();
        let tag = Version::Tag(provenance::signature_tag(&output.digest).unwrap());
        let kind = media_type::OCI_MANIFEST;
        remote.push_manifest(&repository, &tag, kind, &signed.manifest).await.unwrap();

        let mirror = copy_image(&bench.services, text).await.unwrap().reference.repository;
        let here = &bench.services.images.registry;
        let listed = here.referrers(&mirror, &output.digest, None).await.unwrap();
        assert_eq!(listed.into_iter().map(|one| one.digest).collect::<Vec<_>>(), [bill.digest]);
        assert!(here.manifest(&mirror, &tag).await.unwrap().is_some());
    }

    /// Anyone who may push can add referrers to an image.
    #[tokio::test]
    async fn of_many_referrers_those_that_farrier_reads_are_copied() {
        let other = tempfile::tempdir().unwrap();
        let (bench, remote) = with_remote(other.path());
        let (repository, text) = ("other.test:5000/hello".parse().unwrap(), "other.test:5000/hello:1");
        let image = publish(remote.as_ref(), &repository).await;
        let image = remote.manifest(&repository, &Version::Digest(image)).await.unwrap().unwrap();
        let push = async |kind: &'static str, content: Vec<u8>| {
            let artifact = Artifact::about(&image.bytes, kind, content, &[]).unwrap();
            for bytes in [oci::EMPTY, &artifact.content] {
                remote.push_bytes(&repository, bytes).await.unwrap();
            }
            remote.push_referrer(&repository, &artifact.manifest).await.unwrap();
            artifact.digest
        };
        let report = push(media_type::CHECK_REPORT, vec![1]).await;
        let oversized = push(provenance::SIGSTORE_BUNDLE, vec![2; 5 << 20]).await;
        for number in 0..MAX_SIGNATURES {
            push("application/vnd.openvex+json", number.to_string().into_bytes()).await;
        }
        let mirror = copy_image(&bench.services, text).await.unwrap().reference.repository;
        let copied = bench.services.images.registry.referrers(&mirror, &image.digest, None).await.unwrap();
        let copied: BTreeSet<Digest> = copied.into_iter().map(|referrer| referrer.digest).collect();
        assert_eq!(copied.len(), MAX_SIGNATURES - 1);
        assert!(copied.contains(&report) && !copied.contains(&oversized));
    }

    /// Registries store layers of all types except foreign ones.
    #[tokio::test]
    async fn layers_of_unknown_types_are_copied() {
        let other = tempfile::tempdir().unwrap();
        let (bench, remote) = with_remote(other.path());
        let (repository, text) = ("other.test:5000/hello".parse().unwrap(), "other.test:5000/hello:1");
        let (config, layer) = (b"{}".as_slice(), b"encrypted".as_slice());
        for bytes in [config, layer] {
            remote.push_bytes(&repository, bytes).await.unwrap();
        }
        let layers = vec![Descriptor::of("application/vnd.oci.image.layer.v1.tar+gzip+encrypted", layer)];
        let image = ImageManifest::new(Descriptor::of(media_type::OCI_CONFIG, config), layers);
        let (version, kind) = (Version::Tag("1".parse().unwrap()), media_type::OCI_MANIFEST);
        remote.push_manifest(&repository, &version, kind, &image.to_bytes().unwrap()).await.unwrap();
        let mirror = copy_image(&bench.services, text).await.unwrap().reference.repository;
        assert!(bench.services.images.registry.has_blob(&mirror, &Digest::of(layer)).await.unwrap());
    }

    #[tokio::test]
    async fn deeply_nested_indexes_are_refused() {
        let other = tempfile::tempdir().unwrap();
        let (bench, remote) = with_remote(other.path());
        let repository: Repository = "other.test:5000/hello".parse().unwrap();
        let digest = publish(remote.as_ref(), &repository).await;
        let mut bytes = remote.manifest(&repository, &Version::Digest(digest)).await.unwrap().unwrap().bytes;
        for depth in 2..=MAX_DEPTH + 1 {
            let mut index = ImageIndex::empty();
            index.manifests.push(Descriptor::of(media_type::OCI_INDEX, &bytes));
            bytes = index.to_bytes().unwrap();
            let version = Version::Tag(depth.to_string().parse().unwrap());
            remote.push_manifest(&repository, &version, media_type::OCI_INDEX, &bytes).await.unwrap();
            let copied = copy_image(&bench.services, &format!("{repository}:{depth}")).await;
            assert_eq!(copied.is_ok(), depth <= MAX_DEPTH, "{copied:?}");
        }
    }

    /// Anyone who may push can add referrers to an output, and a host's disk is limited.
    #[tokio::test]
    async fn an_artifact_is_copied_with_its_signatures_alone() {
        let bench = Bench::new(&json!({}));
        let other = tempfile::tempdir().unwrap();
        let elsewhere = RegistryLocation::Layout(other.path().join("layout"));
        let source = connect(&elsewhere, &RegistryOptions::default());
        let repository: Repository = "other.test:5000/hello".parse().unwrap();
        let image = publish(source.as_ref(), &repository).await;
        let image = source.manifest(&repository, &Version::Digest(image)).await.unwrap().unwrap();
        let push = async |subject: &[u8], kind: &'static str, content: Vec<u8>| {
            let artifact = Artifact::about(subject, kind, content, &[]).unwrap();
            for bytes in [oci::EMPTY, &artifact.content] {
                source.push_bytes(&repository, bytes).await.unwrap();
            }
            source.push_referrer(&repository, &artifact.manifest).await.unwrap();
            artifact
        };
        let output = push(&image.bytes, HostOutput::Sysext.media_type(), vec![1; 1000]).await;
        let small = push(&output.manifest, provenance::SIGSTORE_BUNDLE, vec![2; 100]).await;
        push(&output.manifest, provenance::SIGSTORE_BUNDLE, vec![3; 5 << 20]).await;
        push(&output.manifest, media_type::CYCLONEDX, vec![4; 100]).await;
        let version = Version::Digest(output.digest.clone());
        let stored = source.manifest(&repository, &version).await.unwrap().unwrap();
        let (here, mirror) = (&bench.services.images.registry, "mirror/hello".parse().unwrap());
        let tag = "1".parse().unwrap();
        copy_artifact(&bench.services, source.as_ref(), &repository, &stored, &mirror, tag).await.unwrap();
        let copied = here.referrers(&mirror, &output.digest, None).await.unwrap();
        assert_eq!(copied.into_iter().map(|one| one.digest).collect::<Vec<_>>(), [small.digest]);
    }

    #[tokio::test]
    async fn a_copy_stands_in_for_a_registry_that_is_not_there() {
        let mut bench = Bench::new(&json!({}));
        let other = tempfile::tempdir().unwrap();
        let options = RegistryOptions::default();
        let elsewhere = RegistryLocation::Layout(other.path().join("layout"));
        bench.services.images.remote = connect(&elsewhere, &options);
        let (repository, text) = ("other.test:5000/base".parse().unwrap(), "other.test:5000/base:1");
        let digest = publish(bench.services.images.remote.as_ref(), &repository).await;
        let remote = Arc::clone(&bench.services.images.remote);
        let subject = remote.manifest(&repository, &Version::Digest(digest.clone())).await.unwrap().unwrap();
        let sign = async |text: &'static str| {
            let kind = provenance::SIGSTORE_BUNDLE;
            let artifact = Artifact::about(&subject.bytes, kind, text.into(), &[]).unwrap();
            for bytes in [oci::EMPTY, &artifact.content] {
                remote.push_bytes(&repository, bytes).await.unwrap();
            }
            remote.push_referrer(&repository, &artifact.manifest).await.unwrap();
            let tag = Version::Tag(provenance::signature_tag(&digest).unwrap());
            let layer = Descriptor::of(provenance::SIMPLE_SIGNING, text.as_bytes());
            let signed = provenance::add_layers(None, &[layer]).unwrap();
            remote.push_bytes(&repository, &signed.config).await.unwrap();
            remote
                .push_manifest(&repository, &tag, media_type::OCI_MANIFEST, &signed.manifest)
                .await
                .unwrap();
        };
        sign("a signature").await;

        let copied = copy_image(&bench.services, text).await.unwrap();
        assert_eq!((&copied.digest, copied.new), (&digest, true));
        assert_eq!(copied.reference.to_string(), "mirror/other.test-5000/base:1");
        // A new signature appears at the source.
        sign("another signature").await;
        assert!(!copy_image(&bench.services, text).await.unwrap().new);
        let (mirror, here) = (copied.reference.repository, Arc::clone(&bench.services.images.registry));
        let listed = here.referrers(&mirror, &digest, Some(provenance::SIGSTORE_BUNDLE)).await.unwrap();
        assert_eq!(listed.len(), 2);
        let tag = Version::Tag(provenance::signature_tag(&digest).unwrap());
        let signed = here.manifest(&mirror, &tag).await.unwrap().unwrap();
        let signed = ImageManifest::parse(&signed.bytes).unwrap();
        // The first signature stays, although the other registry no longer has it: it may be the site's own.
        let layers: Vec<Digest> = signed.layers.into_iter().map(|layer| layer.digest).collect();
        assert_eq!(layers, [Digest::of(b"a signature"), Digest::of(b"another signature")]);
        assert!(here.has_blob(&mirror, &layers[1]).await.unwrap());

        // The other registry disappears.
        bench.services.images.remote = Arc::new(RemoteRegistry::new("none".to_owned(), &options));
        let offline = Net::new(NetOptions { offline: true, ..NetOptions::default() }).unwrap();
        bench.services.fetcher = bench.services.fetcher.clone().with_net(offline);
        let resolved = bench.services.resolve_reference(text).await.unwrap();
        assert_eq!(resolved.to_string(), format!("other.test:5000/base@{digest}"));
        let nearest = bench.services.images.mirrored_reference(resolved).await.unwrap();
        assert_eq!(nearest.to_string(), format!("mirror/other.test-5000/base@{digest}"));
        let AnyManifest::Index(index) = AnyManifest::parse(
            &bench
                .services
                .images
                .registry
                .manifest(&nearest.repository, &nearest.version)
                .await
                .unwrap()
                .unwrap()
                .bytes,
        )
        .unwrap() else {
            panic!("an index")
        };
        let part = Version::Digest(index.manifests[0].digest.clone());
        assert!(bench.services.images.registry.manifest(&nearest.repository, &part).await.unwrap().is_some());
        assert!(
            bench
                .services
                .images
                .registry
                .has_blob(&nearest.repository, &Digest::of(b"layer"))
                .await
                .unwrap()
        );
    }
}
