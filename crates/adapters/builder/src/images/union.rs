//! Publishes images with the payloads of several kernels. Only a configuration and a manifest are sent: the repository
//! already has the layers from the member images.

use farrier_core::{
    facts::{UnionMetadata, UnionPart, assemble_union, media_type},
    image::{Repository, Version},
    plan::{BUILD_FORMAT, NamedInputs, PlannedUnion, Published, UnionMember},
    provenance::{Confinement, Material, Provenance, Role, Subject, Terms},
};
use farrier_store::registry::StoredManifest;
use futures::{StreamExt as _, TryStreamExt as _, stream};
use oci::{Assembled, ImageManifest};

use super::{documents::Documents, shared_tags::tag_for_architecture, signatures::StoredImage};
use crate::services::{BuildError, BuildServices, MAX_CONCURRENT_REQUESTS, Result};

/// Ensures that the registry has a union image. Pushes the manifest under its digest first. The tag comes last, and may
/// also name union images for other architectures.
pub async fn publish_union(services: &BuildServices, union: &PlannedUnion) -> Result<Published> {
    if let Some(found) = services.look_up_for(&union.reference, union.architecture).await? {
        return if found.input_hash == Some(union.input_hash) {
            Ok(found)
        } else {
            Err(BuildError::tag_conflict(&union.reference))
        };
    }
    let repository = &union.reference.repository;
    let members: Vec<UnionPart> = stream::iter(&union.members)
        .map(|member| union_part(services, repository, member))
        .buffered(MAX_CONCURRENT_REQUESTS)
        .try_collect()
        .await?;
    let built = assemble_union(
        &members,
        &UnionMetadata {
            title: union.image.as_str(),
            version: &union.version,
            input_hash: union.input_hash,
            architecture: union.architecture,
        },
    )?;
    services.process.ensure_may_write()?;
    let (registry, kind) = (&services.images.registry, media_type::OCI_MANIFEST);
    registry.push_bytes(repository, &built.config).await?;
    let by_digest = Version::Digest(built.digest.clone());
    registry.push_manifest(repository, &by_digest, kind, &built.manifest).await?;
    let documents = documents(union, &built)?;
    let image = StoredImage { services, repository, digest: &built.digest };
    for artifact in &documents.artifacts {
        image.push_document(artifact).await?;
    }
    image.sign(union.image.as_str(), &documents.claims).await?;
    services.process.ensure_may_write()?;
    let manifest =
        StoredManifest { digest: built.digest, media_type: kind.to_owned(), bytes: built.manifest };
    tag_for_architecture(services, &union.image, union.architecture, &union.reference, &manifest, false)
        .await?;
    let stored = services.look_up_for(&union.reference, union.architecture).await?;
    stored.ok_or_else(|| BuildError::no_such_image(&union.reference))
}

/// Creates the documents of a union image. These documents only list the members, whose own documents have the details.
fn documents(union: &PlannedUnion, built: &Assembled) -> Result<Documents> {
    let members = union.members.iter().map(|member| Material {
        version: Some(member.kernel.to_string()),
        digest: Some(member.digest.clone()),
        ..Material::new(Role::Member, union.image.as_str())
    });
    let provenance = Provenance {
        subject: Subject {
            name: union.image.to_string(),
            version: union.version.clone(),
            output: None,
            digest: built.digest.clone(),
            target: None,
            architecture: union.architecture,
            input_hash: union.input_hash,
            // The bills of materials of the members contain the members' terms.
            terms: Terms::default(),
        },
        farrier: super::FARRIER.to_owned(),
        build_format: BUILD_FORMAT.to_owned(),
        inputs: NamedInputs::new(),
        materials: members.collect(),
        modules: Vec::new(),
        confinement: Confinement::default(),
    };
    Documents::of(&provenance, &built.manifest)
}

/// Manifest and configuration of a member.
async fn union_part(
    services: &BuildServices,
    repository: &Repository,
    member: &UnionMember,
) -> Result<UnionPart> {
    let UnionMember { kernel, digest } = member;
    let image = StoredImage { services, repository, digest };
    image.ensure_trusted(&format!("the image for kernel {kernel},")).await?;
    let stored = image.manifest().await?;
    let config =
        services.images.configuration(repository, &ImageManifest::parse(&stored.bytes)?.config).await?;
    Ok(UnionPart { kernel: kernel.clone(), digest: digest.clone(), manifest: stored.bytes, config })
}

#[cfg(test)]
mod tests {
    use farrier_core::{
        image::{FieldHasher, ImageReference},
        provenance::{PublicKey, RequiredSigners},
        site::{ExistingImages, ImageSigning, KeySource},
    };
    use farrier_signing::testing::{EC_256, OpensslDir};
    use serde_json::json;

    use super::*;
    use crate::{
        images::{CheckResult, verify},
        testing::{Bench, K9, K10, module},
    };

    /// Publishes the images for two kernels, and returns their union.
    async fn union(bench: &Bench) -> PlannedUnion {
        let mut members = Vec::new();
        for release in [K9, K10] {
            let digest = bench.publish(release, &[&module()]).await.unwrap().digest;
            members.push(UnionMember { kernel: release.parse().unwrap(), digest });
        }
        let repository = bench.cell(K9).await.reference.repository;
        PlannedUnion {
            image: "x".parse().unwrap(),
            version: "1.0".to_owned(),
            reference: ImageReference { repository, version: Version::Tag("1.0-union".parse().unwrap()) },
            input_hash: FieldHasher::new("test").finish(),
            architecture: farrier_core::kernel::Architecture::Amd64,
            members,
        }
    }

    #[tokio::test]
    async fn an_image_for_several_kernels_is_signed_and_verified_with_its_members() {
        let openssl_dir = OpensslDir::new();
        openssl_dir.key(EC_256);
        let mut bench = Bench::new(&json!({"tags": ["{{version}}-{{kernel_label}}"]}));
        let signing = ImageSigning {
            key: KeySource::File(openssl_dir.path("k.pem").to_str().unwrap().parse().unwrap()),
            passphrase: None,
            public_key: Some(openssl_dir.path("p.pem").to_str().unwrap().parse().unwrap()),
            existing: ExistingImages::Leave,
            trust_registry_writers: false,
        };
        // A union of members that were published without the key is refused.
        let strangers = union(&bench).await;
        bench.services.definitions.site.image_signing = Some(signing);
        let error = publish_union(&bench.services, &strangers).await.unwrap_err();
        assert!(error.to_string().contains("is not signed with a key of this site"), "{error}");

        bench.image().spec.version = serde_json::from_value(json!("1.1")).unwrap();
        let union = union(&bench).await;
        publish_union(&bench.services, &union).await.unwrap();

        let pem = std::fs::read_to_string(openssl_dir.path("p.pem")).unwrap();
        let ours = RequiredSigners::one("ours", PublicKey::image_key_from_pem(&pem).unwrap());
        let report = verify(&bench.services, &union.reference, Some(&ours), true).await.unwrap();
        assert!(report.verified, "{:#?}", report.checks);
        let reports = report.checks.iter().find(|check| check.message.contains("2 kernels")).unwrap();
        assert_eq!(reports.result, CheckResult::Ok);

        openssl_dir.key(EC_256);
        let pem = std::fs::read_to_string(openssl_dir.path("p.pem")).unwrap();
        let strangers = RequiredSigners::one("theirs", PublicKey::image_key_from_pem(&pem).unwrap());
        let report = verify(&bench.services, &union.reference, Some(&strangers), false).await.unwrap();
        assert!(!report.verified, "{:#?}", report.checks);
    }
}
