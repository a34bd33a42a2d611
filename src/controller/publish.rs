//! Adapter: turns a payload into an image, and pushes it: blobs first, tags last.

use std::{collections::BTreeMap, path::PathBuf};

use super::{
    Controller, TargetError,
    build::{Made, Origins},
    provenance::{Claim, Documents},
    root_fs::RuntimeBaseImage,
};
use crate::{
    blocking::blocking,
    image::{Digest, DriverImage, ImageReference, Repository, Version},
    kernel::KernelFamily,
    oci::{
        self, Artifact, Assembled, Assembly, CheckReportDocument, Descriptor, ImageFacts, ImageManifest,
        Layer, annotations, media_type,
    },
    payload,
    plan::Cell,
    registry::Upload,
};

/// An image that is ready to be pushed.
pub(super) struct Image {
    /// Configuration and manifest.
    pub assembled: Assembled,
    /// What is stored beside it.
    artifacts: Vec<Artifact>,
    /// What is said of it there, to be signed.
    claims: Vec<Claim>,
    /// Its own layers, as files.
    layers: Vec<(PathBuf, Layer)>,
    /// The base, whose blobs the target repository may lack.
    base: Option<RuntimeBaseImage>,
}

impl Controller {
    /// Assembles the image of a checked payload.
    pub(super) async fn assemble(
        &self,
        cell: &Cell,
        definition: (&DriverImage, &KernelFamily),
        made: &Made,
    ) -> Result<Image, TargetError> {
        let image = definition.0;
        let Made { payload, report, origins, exposed, reused_from } = made;
        let Origins { headers, sources, toolchain } = origins;
        let summary = report.in_a_few_words();
        let runtime = &image.spec.runtime;
        let mut facts = ImageFacts {
            input_hash: Some(cell.input_hash),
            kernel_release: Some(cell.target.release.clone()),
            driver_version: Some(cell.version.clone()),
            payload_digest: None,
            exposed_digest: exposed.clone(),
            verdict: Some(report.verdict),
            check_summary: Some(summary.clone()),
            recipe: Some(cell.recipe),
            unsigned_hash: cell.unsigned_hash,
            module_signer: self.module_signer_fact(cell),
            reused_from: reused_from.as_ref().map(|from| from.digest.clone()),
            os: Some(format!("{} {}", cell.target.os, cell.target.os_version)),
            toolchain: Some(toolchain.clone()),
            members: BTreeMap::new(),
        };
        let mut entrypoint = None;
        let (base, layers) = if let Some(made) = &payload.image {
            (Some(engine_made(made, cell)?), made.layers.clone())
        } else {
            let base = match &runtime.base {
                None => None,
                Some(spec) => Some(self.runtime_base(spec, cell).await?),
            };
            let usr_merged = base.as_ref().is_some_and(|base| base.usr_merged);
            let (tree, out) = (payload.tree.clone(), payload.work.path().join("layer.tar.gz"));
            let file = out.clone();
            let written = blocking(move || payload::write_payload_layer(&tree, usr_merged, &file)).await?;
            facts.payload_digest = Some(written.payload_digest);
            if image.spec.holds_entrypoint() {
                let file = payload.work.path().join("entrypoint.tar.gz");
                let layer = self.entrypoint.write_layer(cell.target.arch, file.clone()).await?;
                // A base that is a driver image has it already.
                let below = base.as_ref().is_some_and(|base| base.image.holds(&layer.digest));
                entrypoint = (!below).then_some((file, layer));
            }
            (base, vec![(out, written.layer)])
        };
        let mut notes = facts.to_annotations();
        notes.insert(annotations::TITLE.to_owned(), cell.image.to_string());
        notes.insert(annotations::VERSION.to_owned(), cell.version.clone());
        notes.insert(annotations::CREATED.to_owned(), oci::CREATED.to_owned());
        for (key, origins) in [(annotations::HEADERS, headers), (annotations::SOURCES, sources)] {
            if !origins.is_empty() {
                notes.insert(key.to_owned(), origins.join(", "));
            }
        }
        // An engine-made image has its layers in `base` already.
        let own: Vec<Layer> = match payload.image {
            Some(_) => Vec::new(),
            None => layers.iter().map(|(_, layer)| layer.clone()).collect(),
        };
        let assembled = oci::assemble(&Assembly {
            base: base.as_ref().map(|base| &base.image),
            entrypoint_layer: entrypoint.as_ref().map(|(_, layer)| layer),
            layers: &own,
            entrypoint: &runtime.entrypoint,
            env: &runtime.env,
            labels: &BTreeMap::new(),
            annotations: &notes,
            architecture: cell.target.arch.as_str(),
        })?;
        let base = base.filter(|_| payload.image.is_none());
        let document = CheckReportDocument { report, reused_from: reused_from.as_ref() };
        let check_report = document.artifact(&assembled.manifest, &summary)?;
        let Documents { mut artifacts, mut claims } =
            self.documents(cell, definition, made, base.as_ref(), &assembled).await?;
        claims.insert(0, Claim::of_report(&check_report.content)?);
        artifacts.insert(0, check_report);
        let layers = entrypoint.into_iter().chain(layers).collect();
        Ok(Image { assembled, artifacts, claims, layers, base })
    }

    /// Pushes what the registry lacks, then the manifest by its digest, the documents that refer to it, the signatures,
    /// and the manifest under every tag: no tag is ever there without its report. Returns the bytes sent.
    pub(super) async fn publish(
        &self,
        cell: &Cell,
        image: &Image,
        overwrite: bool,
    ) -> Result<u64, TargetError> {
        self.may_write()?;
        let repository = &cell.reference.repository;
        let mut sent = 0;
        if let Some(base) = &image.base {
            for layer in &base.image.layers {
                sent += self.push_base_layer(repository, base, layer).await?;
            }
        }
        for (file, layer) in &image.layers {
            let upload = self.registry.push_blob(repository, &layer.digest, file).await?;
            sent += bytes_of(upload);
        }
        let config = &image.assembled.config;
        sent += bytes_of(self.registry.push_bytes(repository, config).await?);
        let (digest, manifest) = (&image.assembled.digest, &image.assembled.manifest);
        let version = Version::Digest(digest.clone());
        self.registry.push_manifest(repository, &version, media_type::OCI_MANIFEST, manifest).await?;
        for artifact in &image.artifacts {
            sent += self.push_document(repository, artifact).await?;
        }
        sent += self.sign_image(repository, digest, cell.image.as_str(), &image.claims).await?;
        for reference in cell.references() {
            self.push_tag(cell, reference, &image.assembled.manifest, overwrite).await?;
        }
        Ok(sent)
    }

    /// Puts the manifest under one tag, unless the tag has got other content meanwhile (guarantee 3).
    async fn push_tag(
        &self,
        cell: &Cell,
        reference: &ImageReference,
        manifest: &[u8],
        overwrite: bool,
    ) -> Result<(), TargetError> {
        if let Some(found) = self.look_up(reference).await? {
            if found.input_hash == Some(cell.input_hash) && !overwrite {
                return Ok(());
            }
            if !overwrite {
                return Err(TargetError::Overtaken { tag: reference.to_string() });
            }
        }
        // The layers may have taken minutes.
        self.may_write()?;
        self.registry
            .push_manifest(&reference.repository, &reference.version, media_type::OCI_MANIFEST, manifest)
            .await?;
        Ok(())
    }

    /// Gives an image that is published further tags.
    pub(super) async fn tag(
        &self,
        cell: &Cell,
        digest: &Digest,
        references: &[ImageReference],
    ) -> Result<(), TargetError> {
        let repository = &cell.reference.repository;
        let by_digest = Version::Digest(digest.clone());
        let stored = self.registry.manifest(repository, &by_digest).await?;
        let stored = stored.ok_or_else(|| TargetError::BaseMissing(format!("{repository}@{digest}")))?;
        for reference in references {
            self.may_write()?;
            self.registry
                .push_manifest(repository, &reference.version, &stored.media_type, &stored.bytes)
                .await?;
        }
        Ok(())
    }

    /// Pushes one layer of a base from where it is kept, when the target repository lacks it.
    async fn push_base_layer(
        &self,
        repository: &Repository,
        base: &RuntimeBaseImage,
        layer: &Descriptor,
    ) -> Result<u64, TargetError> {
        if self.registry.has_blob(repository, &layer.digest).await? {
            return Ok(0);
        }
        if self.registry.mount_blob(repository, &layer.digest, &base.repository).await? {
            return Ok(0);
        }
        let file = self.base_layer_file(base, layer).await?;
        let upload = self.registry.push_blob(repository, &layer.digest, &file).await?;
        Ok(bytes_of(upload))
    }
}

fn bytes_of(upload: Upload) -> u64 {
    match upload {
        Upload::Sent(bytes) => bytes,
        Upload::Present => 0,
    }
}

/// An image that the engine made, in the form that bases have: its configuration and layers are kept,
/// annotations are added.
fn engine_made(made: &payload::ArchiveImage, cell: &Cell) -> Result<RuntimeBaseImage, TargetError> {
    let manifest = ImageManifest {
        schema_version: 2,
        media_type: Some(media_type::OCI_MANIFEST.to_owned()),
        artifact_type: None,
        config: Descriptor::new(media_type::OCI_CONFIG, Digest::of(&made.config), made.config.len() as u64),
        layers: made
            .layers
            .iter()
            .map(|(_, layer)| Descriptor::new(layer.media_type, layer.digest.clone(), layer.size))
            .collect(),
        subject: None,
        annotations: BTreeMap::new(),
    };
    let image = oci::Base::parse(&manifest.to_bytes()?, &made.config, cell.target.arch.as_str())?;
    Ok(RuntimeBaseImage { image, repository: cell.reference.repository.clone(), usr_merged: false })
}
