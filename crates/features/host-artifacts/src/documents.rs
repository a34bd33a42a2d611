//! Provenance and bills of materials of outputs.

use std::sync::Arc;

use farrier_builder::{
    file_digest,
    images::{Documents, FARRIER},
    services::{BuildError, BuildServices, Result},
    terms,
};
use farrier_core::{
    image::HostOutput,
    kernel::KernelTarget,
    plan::{BUILD_FORMAT, NamedInputs},
    provenance::{Confinement, Material, ModuleFile, Provenance, Role, Subject},
};
use farrier_local::blocking::blocking;
use oci::Artifact;

use super::payload::HostPayload;

/// Creates the documents of an output. The documents of the image list the inputs of the modules.
pub(super) async fn documents(
    services: &BuildServices,
    payload: Arc<HostPayload>,
    output: HostOutput,
    artifact: &Artifact,
) -> Result<Documents> {
    let shared = Arc::clone(&payload);
    let (modules, has_modules) = match output {
        // The package has no files.
        HostOutput::DebMeta => (Vec::new(), false),
        HostOutput::Deb | HostOutput::Initramfs | HostOutput::Sysext => {
            (blocking(move || module_files(&shared)).await?, true)
        }
    };
    let driver_image = Material {
        version: Some(payload.version.clone()),
        digest: Some(payload.image.clone()),
        ..Material::new(Role::DriverImage, payload.name.as_str())
    };
    let certificate = payload.certificate.as_ref().filter(|_| has_modules);
    let certificate = certificate.map(Material::of_module_certificate);
    let definition = services.definitions.images.get(&payload.name);
    let (os, os_version) = payload.os.clone();
    let target = KernelTarget { os, os_version, release: payload.release.clone(), arch: payload.arch };
    let provenance = Provenance {
        subject: Subject {
            name: payload.name.to_string(),
            version: payload.version.clone(),
            output: Some(output),
            digest: artifact.digest.clone(),
            target: Some(target),
            architecture: payload.arch,
            input_hash: payload.input_hash,
            terms: definition
                .map(|image| terms(image, image.spec.license.as_ref(), image.spec.redistribute))
                .unwrap_or_default(),
        },
        farrier: FARRIER.to_owned(),
        build_format: BUILD_FORMAT.to_owned(),
        inputs: NamedInputs::new(),
        materials: std::iter::once(driver_image).chain(certificate).collect(),
        modules,
        confinement: Confinement::default(),
    };
    Documents::of(&provenance, &artifact.manifest)
}

/// Returns the modules, each with its path on a host and the digest of its file. Blocks.
fn module_files(payload: &HostPayload) -> Result<Vec<ModuleFile>, BuildError> {
    let mut files = Vec::new();
    for (path, file, module) in payload.modules()? {
        let field = |key| module.field(key).map(str::to_owned);
        files.push(ModuleFile {
            path: path.to_string_lossy().into_owned(),
            version: field("version"),
            license: field("license"),
            srcversion: field("srcversion"),
            digest: file_digest(file)?,
            name: module.name,
        });
    }
    Ok(files)
}
