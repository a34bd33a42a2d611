//! The assemble stage turns a checked payload into an image that is ready to be pushed.

use std::{collections::BTreeMap, path::PathBuf};

use farrier_core::{
    facts::{CheckReportDocument, ImageFacts, annotations, media_type},
    image::{RuntimeBase, checked::to_strings},
    plan::Cell,
};
use farrier_local::blocking::blocking;
use farrier_payload as payload;
use kmod::ModuleReport;
use oci::{Artifact, Assembled, Assembly, Descriptor, ImageManifest, Layer};

use super::{
    cell_build::{CellBuild, CheckedPayload},
    sign::module_signer,
};
use crate::{
    images::{BaseImage, runtime_base},
    services::{BuildError, Result, Stage},
};

/// An image that is ready to be pushed.
pub(super) struct Image {
    /// Configuration and manifest.
    pub(super) assembled: Assembled,
    /// The check report, which is stored as a referrer of the image.
    pub(super) check_report: Artifact,
    /// Files of the layers above the base.
    pub(super) layers: Vec<(PathBuf, Layer)>,
    /// Base image. The push copies its blobs that the target repository lacks.
    pub(super) base: Option<BaseImage>,
}

/// Assembles the image from the payload and its base.
pub(super) async fn assemble(build: &CellBuild<'_>, checked: &CheckedPayload) -> Result<Image> {
    build.stage(Stage::Assemble);
    let CellBuild { services, cell, image, .. } = build;
    let CheckedPayload { payload, headers, header_content: _, report } = checked;
    let runtime = &image.spec.runtime;
    if let Some(RuntimeBase::Runfile(_)) = &runtime.base {
        check_module_version(&report.modules, &cell.version)?;
    }
    let summary = report.short_summary();
    let mut facts = ImageFacts {
        input_hash: Some(cell.input_hash),
        declared_hash: (cell.declared_hash != cell.input_hash).then_some(cell.declared_hash),
        kernel_release: Some(cell.target.release.clone()),
        driver_version: Some(cell.version.clone()),
        payload_digest: None,
        exposed_digest: payload.exposed.clone(),
        verdict: Some(report.verdict),
        check_summary: Some(summary.clone()),
        recipe: Some(cell.recipe),
        unsigned_hash: cell.unsigned_hash,
        module_signer: module_signer(build),
        reused_from: payload.reused_from.as_ref().map(|from| from.digest.clone()),
        os: Some(format!("{} {}", cell.target.os, cell.target.os_version)),
        toolchain: Some(payload.toolchain.clone()),
        members: BTreeMap::new(),
    };
    let mut entrypoint = None;
    let (base, layers) = if let Some(engine_image) = &payload.image {
        (Some(engine_image_as_base(engine_image, cell)?), engine_image.layers.clone())
    } else {
        let base = match &runtime.base {
            None => None,
            Some(base) => Some(runtime_base(services, base, &image.spec.sources, cell).await?),
        };
        let usr_merged = base.as_ref().is_some_and(|base| base.usr_merged);
        let (tree, layer_path) = (payload.tree.clone(), payload.work.path().join("layer.tar.gz"));
        let file = layer_path.clone();
        let written = blocking(move || payload::write_payload_layer(&tree, usr_merged, &file)).await?;
        facts.payload_digest = Some(written.payload_digest);
        if image.spec.contains_entrypoint() {
            let file = payload.work.path().join("entrypoint.tar.gz");
            let layer = services.tools.entrypoint.write_layer(cell.target.arch, file.clone()).await?;
            // A base that is itself a driver image already has the entrypoint.
            let is_in_base = base.as_ref().is_some_and(|base| base.image.contains(&layer.digest));
            entrypoint = (!is_in_base).then_some((file, layer));
        }
        (base, vec![(layer_path, written.layer)])
    };
    let mut image_annotations = facts.to_annotations();
    image_annotations.insert(annotations::TITLE.to_owned(), cell.image.to_string());
    image_annotations.insert(annotations::VERSION.to_owned(), cell.version.clone());
    image_annotations.insert(annotations::CREATED.to_owned(), oci::CREATED.to_owned());
    for (key, origins) in [(annotations::HEADERS, headers), (annotations::SOURCES, &payload.sources)] {
        if !origins.is_empty() {
            image_annotations.insert(key.to_owned(), origins.join(", "));
        }
    }
    // If the build engine made the image, `base` already has all layers.
    let new_layers: Vec<Layer> = match payload.image {
        Some(_) => Vec::new(),
        None => layers.iter().map(|(_, layer)| layer.clone()).collect(),
    };
    let assembled = oci::assemble(&Assembly {
        base: base.as_ref().map(|base| &base.image),
        entrypoint_layer: entrypoint.as_ref().map(|(_, layer)| layer),
        layers: &new_layers,
        entrypoint: &to_strings(&runtime.entrypoint),
        env: &runtime.env.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect(),
        labels: &BTreeMap::new(),
        annotations: &image_annotations,
        architecture: cell.target.arch.as_str(),
    })?;
    let document = CheckReportDocument { report, reused_from: payload.reused_from.as_ref() };
    Ok(Image {
        check_report: document.artifact(&assembled.manifest, &summary)?,
        assembled,
        layers: entrypoint.into_iter().chain(layers).collect(),
        base: base.filter(|_| payload.image.is_none()),
    })
}

/// Checks that module `nvidia`, if there is one, has the version of the user space. Otherwise the module refuses that
/// user space on the node (`NVRM: API mismatch`).
fn check_module_version(modules: &[ModuleReport], expected: &str) -> Result<()> {
    let module = modules.iter().find(|module| module.name == "nvidia");
    match module.and_then(|module| module.about.version.as_ref()).filter(|version| *version != expected) {
        None => Ok(()),
        Some(actual) => Err(BuildError::unmet(
            format!(
                "module nvidia has version {actual}, but the user space of the runtime base has {expected}"
            ),
            "compile the installer's own modules (`kernel-open` or `kernel`), or sources of the same version",
        )),
    }
}

/// Converts an image that the build engine made to a base with the same configuration and layers. The caller adds the
/// annotations.
fn engine_image_as_base(image: &payload::ArchiveImage, cell: &Cell) -> Result<BaseImage> {
    let layers = image.layers.iter().map(|(_, layer)| layer.descriptor()).collect();
    let manifest = ImageManifest::new(Descriptor::of(media_type::OCI_CONFIG, &image.config), layers);
    let image = oci::Base::parse(&manifest.to_bytes()?, &image.config, cell.target.arch.as_str())?;
    Ok(BaseImage { image, repository: cell.reference.repository.clone(), usr_merged: false })
}

#[cfg(test)]
mod tests {
    use kmod::ModuleAbout;

    use super::*;

    #[test]
    fn user_space_of_another_version_than_the_modules_is_refused() {
        let module = |name: &str, version: &str| ModuleReport {
            name: name.to_owned(),
            about: ModuleAbout { version: Some(version.to_owned()), ..ModuleAbout::default() },
            ..ModuleReport::default()
        };
        // NVIDIA's other modules have different versions.
        let modules = [module("nvidia_fs", "2.17"), module("nvidia", "580.95.05")];
        assert!(check_module_version(&modules, "580.95.05").is_ok());
        assert!(check_module_version(&[], "580.95.05").is_ok());
        let error = check_module_version(&modules, "580.82.09").unwrap_err();
        insta::assert_snapshot!(error, @"module nvidia has version 580.95.05, but the user space of the runtime base has 580.82.09");
    }
}
