//! Adapter: publishes images with the payloads of several kernels. Only a configuration and a manifest are sent: the
//! layers are in the repository already, as those of the members.

use futures::{StreamExt as _, TryStreamExt as _, stream};

use super::{Controller, TargetError, observe::AT_ONCE};
use crate::{
    blocking::blocking,
    image::{Repository, Version},
    oci::{self, ImageError, ImageManifest, MAX_MANIFEST, UnionNotes, UnionPart, media_type},
    plan::{PlannedUnion, Published, UnionMember},
};

impl Controller {
    /// Makes sure that a union image is in the registry: the manifest under its digest first, then under its tag.
    pub async fn publish_union(&self, union: &PlannedUnion) -> Result<Published, TargetError> {
        if let Some(found) = self.look_up(&union.reference).await? {
            return if found.input_hash == Some(union.input_hash) {
                Ok(found)
            } else {
                Err(TargetError::Overtaken { tag: union.reference.to_string() })
            };
        }
        let repository = &union.reference.repository;
        let parts: Vec<UnionPart> = stream::iter(&union.members)
            .map(|member| self.union_part(repository, member))
            .buffered(AT_ONCE)
            .try_collect()
            .await?;
        let made = oci::assemble_union(
            &parts,
            &UnionNotes {
                title: union.image.as_str(),
                version: &union.version,
                input_hash: union.input_hash,
                architecture: union.architecture,
            },
        )?;
        self.may_write()?;
        self.registry.push_bytes(repository, &made.config).await?;
        let documents = Self::union_documents(union, &made)?;
        for version in [Version::Digest(made.digest.clone()), union.reference.version.clone()] {
            if matches!(version, Version::Tag(_)) {
                for artifact in &documents.artifacts {
                    self.push_document(repository, artifact).await?;
                }
                self.sign_image(repository, &made.digest, union.image.as_str(), &documents.claims).await?;
            }
            self.may_write()?;
            self.registry
                .push_manifest(repository, &version, media_type::OCI_MANIFEST, &made.manifest)
                .await?;
        }
        let stored = self.look_up(&union.reference).await?;
        stored.ok_or_else(|| TargetError::BaseMissing(union.reference.to_string()))
    }

    /// A member's manifest and configuration.
    async fn union_part(
        &self,
        repository: &Repository,
        member: &UnionMember,
    ) -> Result<UnionPart, TargetError> {
        let UnionMember { kernel, digest } = member;
        let version = Version::Digest(digest.clone());
        let stored = self.registry.manifest(repository, &version).await?;
        let stored = stored.ok_or_else(|| TargetError::BaseMissing(format!("{repository}@{digest}")))?;
        let wanted = ImageManifest::parse(&stored.bytes)?.config;
        if wanted.size > MAX_MANIFEST as u64 {
            let bytes = usize::try_from(wanted.size).unwrap_or(usize::MAX);
            return Err(ImageError::TooLarge { what: "image configuration", bytes }.into());
        }
        let work = self.cache.scratch()?;
        let file = work.path().join("config.json");
        self.registry.fetch_blob(repository, &wanted.digest, &file).await?;
        let config = blocking(move || {
            std::fs::read(&file).map_err(|source| TargetError::Input { path: file, source })
        })
        .await?;
        Ok(UnionPart { kernel: kernel.clone(), digest: digest.clone(), manifest: stored.bytes, config })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{
        controller::{
            CheckResult,
            testing::{Bench, K9, K10, module},
        },
        image::{ImageReference, InputHasher},
        provenance::PublicKey,
        signing::testing::{EC_256, Workshop},
        site::{Existing, ImageSigning, KeySource},
    };

    /// The union of the images for two kernels, which are published.
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
            input_hash: InputHasher::new("test").finish(),
            architecture: crate::kernel::Architecture::Amd64,
            members,
        }
    }

    #[tokio::test]
    async fn an_image_for_several_kernels_is_signed_and_verified_with_its_members() {
        let workshop = Workshop::new();
        workshop.key(EC_256);
        let mut bench = Bench::new(&json!({"tags": ["{{version}}-{{kernel_label}}"]}));
        let signing = ImageSigning {
            key: KeySource::File(workshop.path("k.pem")),
            passphrase: None,
            public_key: Some(workshop.path("p.pem")),
            existing: Existing::Leave,
        };
        bench.controller.definitions.site.image_signing = Some(signing);
        let union = union(&bench).await;
        bench.controller.publish_union(&union).await.unwrap();

        let pem = std::fs::read_to_string(workshop.path("p.pem")).unwrap();
        let ours = [PublicKey::from_pem(&pem).unwrap()];
        let report = bench.controller.verify(&union.reference, &ours, true).await.unwrap();
        assert!(report.verified, "{:#?}", report.checks);
        let reports = report.checks.iter().find(|check| check.message.contains("2 kernels")).unwrap();
        assert_eq!(reports.result, CheckResult::Ok);

        workshop.key(EC_256);
        let pem = std::fs::read_to_string(workshop.path("p.pem")).unwrap();
        let strangers = [PublicKey::from_pem(&pem).unwrap()];
        let report = bench.controller.verify(&union.reference, &strangers, false).await.unwrap();
        assert!(!report.verified, "{:#?}", report.checks);
    }
}
