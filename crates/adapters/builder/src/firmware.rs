//! Lists the firmware files of an image, so that the check can report firmware that the image's modules need but the image lacks.

use std::path::PathBuf;

use farrier_local::blocking::blocking;
use farrier_payload as payload;
use farrier_payload::ImageLayers;
use kmod::PayloadModule;

use super::cell_build::{CellBuild, Payload};
use crate::{
    images::{layer_files, runtime_base},
    services::Result,
};

/// Kind of the cache records that list a base's firmware.
const RECORDS: &str = "firmware";

/// Returns the firmware files of the payload and its base, as paths in the image. Returns `None` if no module names firmware,
/// because listing a base's files may require fetching the base.
pub(super) async fn files(
    build: &CellBuild<'_>,
    payload: &Payload,
    modules: &[PayloadModule],
) -> Result<Option<Vec<String>>> {
    let names_firmware = |module: &PayloadModule| {
        module.module.as_ref().is_ok_and(|module| module.field("firmware").is_some())
    };
    if !modules.iter().any(names_firmware) {
        return Ok(None);
    }
    let mut firmware = if let Some(image) = &payload.image {
        in_layers(build, image.layers.iter().map(|(path, _)| path.clone()).collect()).await?
    } else {
        let tree = payload.tree.clone();
        blocking(move || payload::list_tree(&tree)).await?.firmware
    };
    if let Some(spec) = build.image.spec.runtime.base.as_ref().filter(|_| payload.image.is_none()) {
        let base = runtime_base(build.services, spec, &build.image.spec.sources, build.cell).await?;
        let key = base.image.digest.hex();
        let base_firmware = if let Some(known) = build.services.cache.read_record(RECORDS, key)? {
            known
        } else {
            let listed = in_layers(build, layer_files(&build.services.images, &base).await?).await?;
            build.services.cache.write_record(RECORDS, key, &listed)?;
            listed
        };
        firmware.extend(base_firmware);
    }
    Ok(Some(firmware.into_iter().map(|file| format!("lib/firmware/{file}")).collect()))
}

async fn in_layers(build: &CellBuild<'_>, layers: Vec<PathBuf>) -> Result<Vec<String>> {
    let scratch = build.services.cache.scratch()?;
    let dest = scratch.path().to_owned();
    let listed = blocking(move || payload::unpack_image(&ImageLayers::Files(layers), &dest, None));
    Ok(listed.await?.firmware)
}
