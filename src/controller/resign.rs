//! Adapter: a published payload whose modules are signed otherwise, signed anew without a build: after the key was rotated, or
//! signing was switched on.

use std::fs;

use super::{
    Controller, Stage, TargetError,
    build::{Made, Origins, Payload},
    needs::Needed,
    retry::chain,
};
use crate::{
    blocking::blocking,
    headers::HeaderSet,
    image::{Digest, DriverImage, Version},
    kernel::KernelFamily,
    oci::{ImageFacts, ImageManifest, ReusedFrom, annotations},
    payload,
    plan::{
        Cell,
        reuse::{may_resign, tags_to_resign},
    },
};

/// Tags that are looked up for one target. They are looked up one after the other, the likeliest first.
const MAX_LOOKUPS: usize = 32;

impl Controller {
    /// The cell's payload as it is published with other signatures or none, with the right ones. `None` where there is none;
    /// the reason is told and is no error, nor is a registry that does not answer, because a build needs none.
    pub(super) async fn resign(
        &self,
        cell: &Cell,
        definition: (&DriverImage, &KernelFamily),
        headers: &HeaderSet,
        needed: &Needed,
    ) -> Result<Option<Made>, TargetError> {
        if cell.unsigned_hash.is_none() {
            return Ok(None);
        }
        let subject = cell.subject();
        let found = match self.find_to_resign(cell).await {
            Ok(found) => found,
            Err(error @ TargetError::Registry(_)) => {
                tracing::info!(%subject, reason = chain(&error), "nothing to sign anew");
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let Some((digest, facts, manifest)) = found else { return Ok(None) };
        self.reporter.stage(&subject, Stage::Reuse);
        let Some(layer) = manifest.payload_layer() else { return Ok(None) };
        let work = self.cache.scratch()?;
        let (blob, tree) = (work.path().join("published"), work.path().join("payload"));
        self.registry.fetch_blob(&cell.reference.repository, &layer.digest, &blob).await?;
        let place = tree.clone();
        let unpacked = blocking(move || {
            fs::create_dir(&place).map_err(|source| TargetError::Input { path: place.clone(), source })?;
            Ok::<_, TargetError>(payload::unpack_layer(&blob, &place))
        })
        .await?;
        if let Err(why) = unpacked {
            self.reporter.note(&subject, &format!("{digest} is not signed anew: {}", chain(&why)));
            return Ok(None);
        }
        let report =
            self.check(cell, definition, (headers, facts.module_signer.as_ref()), needed, &tree).await?;
        let sources = manifest.annotations.get(annotations::SOURCES);
        Ok(Some(Made {
            payload: Payload { tree, image: None, work },
            report,
            origins: Origins {
                headers: headers.origin.clone(),
                sources: sources.cloned().into_iter().collect(),
                toolchain: facts.toolchain.clone().unwrap_or_default(),
            },
            exposed: facts.exposed_digest.clone(),
            reused_from: Some(ReusedFrom { kernel: cell.target.release.clone(), digest }),
        }))
    }

    /// The first published image that has the payload.
    async fn find_to_resign(
        &self,
        cell: &Cell,
    ) -> Result<Option<(Digest, ImageFacts, ImageManifest)>, TargetError> {
        let repository = &cell.reference.repository;
        let tags = self.registry.tags(repository).await?;
        for tag in tags_to_resign(cell, tags, MAX_LOOKUPS) {
            let version = Version::Tag(tag);
            let found = self.registry.manifest(repository, &version).await?;
            let Some(stored) = found else { continue };
            // What is no image of farrier's has nothing to take over.
            let Ok(manifest) = ImageManifest::parse(&stored.bytes) else { continue };
            let Ok(facts) = ImageFacts::from_annotations(&manifest.annotations) else { continue };
            if may_resign(cell, &facts) {
                return Ok(Some((stored.digest, facts, manifest)));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
#[path = "resign_tests.rs"]
mod tests;
