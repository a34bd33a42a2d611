//! Documents about an image (check report, bill of materials, provenance). They are pushed as referrers before the
//! image's tags, and looked up again later.

use farrier_core::{
    facts::{annotations, media_type},
    image::{Digest, Version},
    plan::NamedInputs,
    provenance::{
        self, CHECK_REPORT_PREDICATE, CYCLONEDX_PREDICATE, Provenance, PublicKey, SIGNED_PREDICATE,
        SLSA_PREDICATE, SPDX_PREDICATE, Statement, Subject,
    },
};
use oci::{AnyManifest, Artifact, Descriptor, ImageError, ImageManifest, referrers_tag};
use serde_json::Value;

use super::signatures::StoredImage;
use crate::services::Result;

/// Maximum number of JSON objects and arrays in a document. In memory, an object takes 600 bytes or more, an array 128.
const MAX_OBJECTS: usize = 200_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DocumentKind {
    /// Name for messages.
    pub name: &'static str,
    /// Media type of the artifact and of its layer.
    pub media_type: &'static str,
    /// Predicate type in attestations.
    pub(crate) predicate_type: &'static str,
}

impl DocumentKind {
    const fn new(name: &'static str, media_type: &'static str, predicate_type: &'static str) -> Self {
        Self { name, media_type, predicate_type }
    }
}

/// Report of the check against the kernel's module loader.
pub const CHECK_REPORT: DocumentKind =
    DocumentKind::new("check report", media_type::CHECK_REPORT, CHECK_REPORT_PREDICATE);
/// Bill of materials with the components of the image.
pub const BILL_OF_MATERIALS: DocumentKind =
    DocumentKind::new("bill of materials", media_type::CYCLONEDX, CYCLONEDX_PREDICATE);
/// The bill of materials as SPDX.
pub(crate) const SPDX: DocumentKind =
    DocumentKind::new("bill of materials (SPDX)", media_type::SPDX, SPDX_PREDICATE);
/// Provenance with the inputs and steps of the build.
pub const PROVENANCE: DocumentKind = DocumentKind::new("provenance", media_type::IN_TOTO, SLSA_PREDICATE);

/// Documents of an image.
pub(super) const DOCUMENTS: [DocumentKind; 4] = [CHECK_REPORT, BILL_OF_MATERIALS, SPDX, PROVENANCE];

/// Predicate types of the claims that farrier signs.
pub(super) const PREDICATE_TYPES: [&str; 5] =
    [CHECK_REPORT_PREDICATE, CYCLONEDX_PREDICATE, SPDX_PREDICATE, SLSA_PREDICATE, SIGNED_PREDICATE];

/// A claim about an image that can be signed.
#[derive(Clone, Debug, PartialEq)]
pub struct Claim {
    pub(crate) predicate_type: &'static str,
    /// Content of the claim.
    pub predicate: Value,
}

impl Claim {
    /// Claim with the content of a check report.
    pub(crate) fn of_report(content: &[u8]) -> Result<Self> {
        let predicate =
            serde_json::from_slice(content).map_err(|source| ImageError::Json(CHECK_REPORT.name, source))?;
        Ok(Self { predicate_type: CHECK_REPORT_PREDICATE, predicate })
    }
}

/// Bills of materials and provenance of an image or output, as artifacts and as claims.
pub struct Documents {
    /// Artifacts to push as referrers of the image or output.
    pub artifacts: Vec<Artifact>,
    /// Claims to sign, if the site signs images.
    pub claims: Vec<Claim>,
}

impl Documents {
    /// Creates the documents of the image or output with the manifest bytes `manifest`.
    pub fn of(provenance: &Provenance, manifest: &[u8]) -> Result<Self> {
        let Subject { name, digest, .. } = &provenance.subject;
        let (mut artifacts, mut claims) = (Vec::new(), Vec::new());
        for (kind, predicate) in [
            (BILL_OF_MATERIALS, provenance::bill(provenance)),
            (SPDX, provenance::spdx(provenance)),
            (PROVENANCE, provenance::slsa(provenance)),
        ] {
            let annotation = [(annotations::PREDICATE_TYPE, kind.predicate_type)];
            let (content, annotations) = match kind {
                PROVENANCE => {
                    (provenance::statement(name, digest, SLSA_PREDICATE, &predicate), &annotation[..])
                }
                _ => (predicate.to_string().into_bytes(), &[][..]),
            };
            artifacts.push(Artifact::about(manifest, kind.media_type, content, annotations)?);
            claims.push(Claim { predicate_type: kind.predicate_type, predicate });
        }
        Ok(Self { artifacts, claims })
    }
}

impl StoredImage<'_> {
    /// Pushes a document about the image, with its blobs. Returns the number of bytes sent.
    pub(crate) async fn push_document(self, artifact: &Artifact) -> Result<u64> {
        let registry = &self.services.images.registry;
        let mut sent = 0;
        for bytes in [oci::EMPTY, &artifact.content] {
            sent += registry.push_bytes(self.repository, bytes).await?.bytes();
        }
        registry.push_referrer(self.repository, &artifact.manifest).await?;
        Ok(sent)
    }

    /// Returns the claims about the image that are signed by one of the keys, without duplicates.
    pub(super) async fn signed_claims(self, keys: &[&PublicKey]) -> Result<Vec<Claim>> {
        let mut claims: Vec<Claim> = Vec::new();
        for statement in self.all_statements(keys).await? {
            let kind = DOCUMENTS.iter().find(|kind| kind.predicate_type == statement.predicate_type);
            let claim = kind
                .map(|kind| Claim { predicate_type: kind.predicate_type, predicate: statement.predicate });
            claims.extend(claim.filter(|claim| !claims.contains(claim)));
        }
        Ok(claims)
    }

    /// Returns the image's document of a kind. If there are several, returns the last one in the registry's list, which
    /// is usually the newest.
    pub async fn find_document(self, kind: &DocumentKind) -> Result<Option<Vec<u8>>> {
        let Self { services, repository, digest } = self;
        let registry = services.images.registry_of(repository);
        for referrer in registry.referrers(repository, digest, Some(kind.media_type)).await?.into_iter().rev()
        {
            if let Some(content) = self.read_document(&referrer.digest, kind).await? {
                return Ok(Some(content));
            }
        }
        Ok(None)
    }

    /// Reads the named inputs of the image's build from its provenance. Empty if there is none.
    pub async fn named_inputs(self) -> Result<NamedInputs> {
        let statement =
            self.find_document(&PROVENANCE).await?.and_then(|bytes| Statement::parse(&bytes).ok());
        Ok(statement.map(|statement| provenance::named_inputs(&statement.predicate)).unwrap_or_default())
    }

    /// Whether the registry has deleted a referrer of this type. Registries without the referrers API keep the list of an
    /// image's referrers under a tag, and the list still names the deleted referrer.
    pub(super) async fn is_referrer_deleted(self, media_type: &str) -> Result<bool> {
        let Self { services, repository, digest } = self;
        let registry = services.images.registry_of(repository);
        let Some(tag) = referrers_tag(digest) else { return Ok(false) };
        let Some(list) = registry.manifest(repository, &Version::Tag(tag)).await? else { return Ok(false) };
        let Ok(AnyManifest::Index(index)) = AnyManifest::parse(&list.bytes) else { return Ok(false) };
        for listed in index.manifests {
            if listed.artifact_type.as_deref() == Some(media_type)
                && registry.manifest(repository, &Version::Digest(listed.digest)).await?.is_none()
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads a document from the list of referrers. Returns `None` if the entry is stale or about another image: clients
    /// maintain these lists, and may leave such entries.
    async fn read_document(self, digest: &Digest, kind: &DocumentKind) -> Result<Option<Vec<u8>>> {
        let Self { services, repository, digest: subject } = self;
        let version = Version::Digest(digest.clone());
        let Some(stored) = services.images.registry_of(repository).manifest(repository, &version).await?
        else {
            return Ok(None);
        };
        let manifest = ImageManifest::parse(&stored.bytes)?;
        let predicate_type = manifest.annotations.get(annotations::PREDICATE_TYPE).map(String::as_str);
        // Other tools use the media type of provenance for statements with other predicates.
        let has_other_predicate = *kind == PROVENANCE && predicate_type != Some(kind.predicate_type);
        if has_other_predicate || manifest.subject.as_ref().is_none_or(|other| other.digest != *subject) {
            return Ok(None);
        }
        let has_media_type = |layer: &&Descriptor| layer.media_type == kind.media_type;
        let Some(layer) = manifest.layers.iter().find(has_media_type) else { return Ok(None) };
        let content = services.images.small_blob(repository, layer, kind.name).await?;
        if content.iter().filter(|byte| matches!(byte, b'{' | b'[')).count() > MAX_OBJECTS {
            let reason = format!("has more than {MAX_OBJECTS} objects and arrays");
            return Err(ImageError::unusable(kind.name, reason).into());
        }
        Ok(Some(content))
    }
}

#[cfg(test)]
mod tests {
    use oci::error_chain;
    use serde_json::json;

    use super::*;
    use crate::testing::Bench;

    /// Anyone who may push can attach 16 MiB of small objects, which would take 1.4 GiB in memory, or of small arrays.
    #[tokio::test]
    async fn a_document_of_many_objects_is_refused() {
        let bench = Bench::new(&json!({}));
        let services = &bench.services;
        let repository = services.images.location.repository("x").unwrap();
        let subject = ImageManifest::artifact("x", Vec::new(), []).to_bytes().unwrap();
        let image = StoredImage { services, repository: &repository, digest: &Digest::of(&subject) };
        for (rest, is_refused) in [("", false), ("[0]", true)] {
            let content = format!("{}{rest}", "[{}]".repeat(MAX_OBJECTS / 2)).into_bytes();
            let report = Artifact::about(&subject, CHECK_REPORT.media_type, content.clone(), &[]).unwrap();
            image.push_document(&report).await.unwrap();
            match image.find_document(&CHECK_REPORT).await {
                Ok(found) => assert!(!is_refused && found == Some(content)),
                Err(error) => {
                    assert!(is_refused);
                    assert_eq!(error_chain(&error), "check report: has more than 200000 objects and arrays");
                }
            }
        }
    }
}
