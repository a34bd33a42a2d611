//! The document stage collects an image's inputs for its bill of materials and its provenance.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
};

use farrier_core::{
    image::{
        AptSource, Digest, DriverImage, MinimalSpec, Redistribute, RuntimeBase, SourceOrigin, SourceSpec,
        checked::LicenseExpression, commit_in,
    },
    kernel::{Architecture, BootstrapSpec, KernelTarget, Toolchain},
    plan::{BUILD_FORMAT, FetchedInputs},
    provenance::{Distribution, Material, ModuleFile, PackageList, Provenance, Role, Subject, Terms},
};
use farrier_definitions::read_patch;
use farrier_inputs::{PackageReader, PackageRoot};
use farrier_local::blocking::blocking;
use kmod::CheckReport;
use oci::Hashing;
use sha2::{Digest as _, Sha256};

use super::{
    assemble::Image,
    cell_build::{CellBuild, CheckedPayload},
};
use crate::{
    images::{BaseImage, Claim, Documents, FARRIER, base_image, layer_files, published_root_fs},
    services::{BuildError, BuildServices, ImageAccess, Result},
};

/// Kind of the cache records that list a layer's packages.
const PACKAGES: &str = "packages";

/// Creates the documents of an image.
pub(super) async fn document(
    build: &CellBuild<'_>,
    checked: &CheckedPayload,
    assembled_image: &Image,
) -> Result<Documents> {
    let CellBuild { services, cell, image, .. } = build;
    let CheckedPayload { payload, headers, header_content, report } = checked;
    let mut materials = sources(build).await?;
    let recipe = Digest::of(cell.dockerfile.as_bytes());
    materials.push(Material { digest: Some(recipe), ..Material::new(Role::Recipe, "Dockerfile") });
    match &payload.reused_from {
        None => {
            for origin in headers {
                let distribution = Some(distribution_of(&cell.target));
                materials.push(Material::of_origin(Role::Headers, origin, "kernel headers", distribution));
            }
            materials.extend(header_content.clone().map(|content| Material {
                digest: Some(content),
                ..Material::new(Role::StoredHeaders, "header set")
            }));
            materials.push(toolchain(build).await?);
        }
        // The reused image's provenance names its headers and its toolchain.
        Some(from) => materials.push(Material {
            version: Some(from.kernel.to_string()),
            digest: Some(from.digest.clone()),
            ..Material::new(Role::ReusedImage, cell.image.as_str())
        }),
    }
    materials.extend(cell.needs.iter().map(|need| Material {
        version: Some(need.version.clone()),
        digest: Some(need.exposed.clone()),
        ..Material::new(Role::Need, need.name.as_str())
    }));
    materials.extend(module_certificate(build, report));
    if let (Some(spec), Some(base)) = (&image.spec.runtime.base, &assembled_image.base) {
        materials.push(base_material(build, spec, base).await?);
    }
    if image.spec.contains_entrypoint() {
        let digest = Some(services.tools.entrypoint.binary(cell.target.arch).await?.digest.clone());
        let version = Some(FARRIER.to_owned());
        let name = "driver-entrypoint";
        materials.push(Material { version, digest, ..Material::new(Role::Entrypoint, name) });
    }
    let (tree, report) = (payload.tree.clone(), report.clone());
    let modules = blocking(move || modules(&tree, &report)).await?;
    let provenance = Provenance {
        subject: Subject {
            name: cell.image.to_string(),
            version: cell.version.clone(),
            output: None,
            digest: assembled_image.assembled.digest.clone(),
            target: Some(cell.target.clone()),
            architecture: cell.target.arch,
            input_hash: cell.input_hash,
            terms: terms(image, image.spec.license.as_ref(), image.spec.redistribute),
        },
        farrier: FARRIER.to_owned(),
        build_format: BUILD_FORMAT.to_owned(),
        inputs: cell.inputs.clone(),
        materials,
        modules,
        confinement: payload.confinement.clone(),
    };
    let mut documents = Documents::of(&provenance, &assembled_image.assembled.manifest)?;
    documents.claims.insert(0, Claim::of_report(&assembled_image.check_report.content)?);
    documents.artifacts.insert(0, assembled_image.check_report.clone());
    Ok(documents)
}

/// Returns the certificate whose key signed modules of the payload. Returns `None` if the key signed no module,
/// for example because the kernel does not verify signatures.
fn module_certificate(build: &CellBuild<'_>, report: &CheckReport) -> Option<Material> {
    build.cell.signed_with.as_ref()?;
    let certificate = build.services.tools.module_signer.as_ref()?.certificate();
    let mut signers = report.modules.iter().filter_map(|module| module.about.signed_by.as_ref());
    let is_used = signers.any(|signer| signer.key_id == certificate.key_id);
    is_used.then(|| Material::of_module_certificate(certificate))
}

/// Returns the sources and the applicable patches.
async fn sources(build: &CellBuild<'_>) -> Result<Vec<Material>> {
    let CellBuild { services, cell, image, .. } = build;
    let mut materials = Vec::new();
    for source in &image.spec.sources {
        // The compile stage has compared the fetched source with this identity.
        let identity = cell.fetched.sources.get(source.name.as_str()).map_or("", String::as_str);
        materials.push(source_material(image, source, identity, &cell.version, &cell.target));
    }
    for patch in &cell.patches {
        let bytes = read_patch(&services.definitions, &image.spec.patches[patch.index].path).await?;
        let digest = Some(Digest::of(&bytes));
        materials.push(Material { digest, ..Material::new(Role::Patch, patch.name.clone()) });
    }
    Ok(materials)
}

/// Returns the material of a source. `identity` names the fetched content as in [`FetchedInputs`].
pub fn source_material(
    image: &DriverImage,
    source: &SourceSpec,
    identity: &str,
    version: &str,
    target: &KernelTarget,
) -> Material {
    let mut material = match &source.from {
        SourceOrigin::Image(_) => Material::of_image(Role::Source, identity),
        SourceOrigin::Git(git) => {
            Material::of_git(source.name.as_str(), git, commit_in(identity).unwrap_or_default())
        }
        from => {
            let distribution = source_distribution(from, target);
            Material::of_origin(Role::Source, identity, source.name.as_str(), distribution)
        }
    };
    if let SourceOrigin::Url { url, .. } = &source.from {
        material.uri = Some(url.to_string());
    }
    material.version.get_or_insert_with(|| version.to_owned());
    material.terms = terms(image, source.license.as_ref(), source.redistribute);
    material
}

/// Returns the supplier, the license and the redistribution terms of an image or of one of its sources.
pub fn terms(
    image: &DriverImage,
    license: Option<&LicenseExpression>,
    redistribute: Option<Redistribute>,
) -> Terms {
    let supplier = image.spec.supplier.as_ref().map(ToString::to_string);
    Terms { supplier, license: license.map(ToString::to_string), redistribute }
}

/// Returns the distribution that a source's package belongs to.
fn source_distribution(from: &SourceOrigin, target: &KernelTarget) -> Option<Distribution> {
    match from {
        SourceOrigin::Apt(AptSource { suites, mirror, .. }) => {
            Distribution::of_suite(suites.first()?, mirror.as_deref())
        }
        SourceOrigin::Rpm(_) => Some(distribution_of(target)),
        SourceOrigin::Path { .. }
        | SourceOrigin::Url { .. }
        | SourceOrigin::Git(_)
        | SourceOrigin::Image(_) => None,
    }
}

fn bootstrap_distribution(spec: &BootstrapSpec) -> Option<Distribution> {
    Distribution::of_suite(&spec.suite, spec.mirror.as_deref())
}

fn distribution_of(target: &KernelTarget) -> Distribution {
    Distribution { id: target.os.to_string(), version: target.os_version.to_string() }
}

async fn toolchain(build: &CellBuild<'_>) -> Result<Material> {
    let cell = build.cell;
    let Some(root) = PackageRoot::of_toolchain(&build.toolchain, &cell.target) else {
        // `cell.toolchain` is the image reference with its digest.
        let (name, digest) = cell.toolchain.split_once('@').unwrap_or((&cell.toolchain, ""));
        return Ok(Material {
            digest: digest.parse().ok(),
            uri: Some(format!("oci://{}", cell.toolchain)),
            ..Material::new(Role::Toolchain, name)
        });
    };
    let distribution = match &build.toolchain {
        Toolchain::Bootstrap(spec) => bootstrap_distribution(spec),
        Toolchain::Rpm(_) | Toolchain::Image(_) => Some(distribution_of(&cell.target)),
    };
    let mut material =
        Material { distribution, ..Material::new(Role::Toolchain, root.package_source(cell.target.arch)) };
    let used = cell.fetched.unverified.get(FetchedInputs::TOOLCHAIN);
    if let Some((digest, list)) = toolchain_packages(build.services, cell.target.arch, &root, used).await? {
        material = Material { digest: Some(digest), ..material.with(list) };
    }
    // Record the toolchain that was used: the registry may hold another toolchain by now.
    if let Some(used) = used
        && material.digest.as_ref() != Some(used)
    {
        material = Material { digest: Some(used.clone()), packages: Vec::new(), ..material };
    }
    Ok(material)
}

/// Returns the digest and packages of the toolchain that the build used. Reads the published toolchain if it is as trusted as
/// the used toolchain, and the cached toolchain otherwise. Returns `None` if neither exists: the engine may be the only one
/// that still has the toolchain. Never fetches a toolchain only for the documents.
async fn toolchain_packages(
    services: &BuildServices,
    arch: Architecture,
    root: &PackageRoot,
    used: Option<&Digest>,
) -> Result<Option<(Digest, PackageList)>> {
    let published = published_root_fs(services, root, arch).await?;
    if let Some((reference, _)) = published.filter(|(_, unverified)| unverified.as_ref() == used) {
        let base = base_image(&services.images, &reference, arch).await?;
        let digest = base.image.layers.first().map(|layer| layer.digest.clone());
        let packages = packages_of(&services.images, &base).await?;
        return Ok(digest.map(|digest| (digest, packages)));
    }
    let Some(local) = services.fetcher.root_fs().built_locally(&root.key(arch))? else {
        return Ok(None);
    };
    let packages = packages_in(&services.images, local.layer.digest.hex(), vec![local.file]).await?;
    Ok(Some((local.layer.digest, packages)))
}

async fn base_material(build: &CellBuild<'_>, spec: &RuntimeBase, base: &BaseImage) -> Result<Material> {
    let services = build.services;
    let (name, distribution) = match spec {
        RuntimeBase::Minimal(spec) => return minimal_base(build, spec).await,
        RuntimeBase::Need(name) => (name.to_string(), None),
        RuntimeBase::Bootstrap(spec) => (spec.suite.to_string(), bootstrap_distribution(spec)),
        // The installer is one of the sources.
        RuntimeBase::Runfile(runfile) => {
            let spec = runfile.spec().bootstrap;
            (spec.suite.to_string(), bootstrap_distribution(&spec))
        }
        RuntimeBase::Image(name) => (name.to_string(), None),
    };
    let uri = matches!(spec, RuntimeBase::Image(_))
        .then(|| format!("oci://{}@{}", base.repository, base.image.digest));
    let digest = Some(base.image.digest.clone());
    let material = Material { digest, uri, distribution, ..Material::new(Role::Base, name) };
    Ok(material.with(packages_of(&services.images, base).await?))
}

/// Returns the material of a minimal base: its only package, whose digest is more specific than the image's.
async fn minimal_base(build: &CellBuild<'_>, spec: &MinimalSpec) -> Result<Material> {
    let (services, arch) = (build.services, build.cell.target.arch);
    let package = services
        .process
        .retry("look up busybox", || services.fetcher.root_fs().minimal_package(spec, arch))
        .await?;
    let suite = spec.suites.first();
    let distribution = suite.and_then(|suite| Distribution::of_suite(suite, spec.mirror.as_deref()));
    let material = Material::of_origin(Role::Base, &package, &spec.package, distribution);
    // If only the registry vouches for the package, record the content's digest.
    Ok(match build.cell.fetched.unverified.get(FetchedInputs::BASE) {
        Some(content) => Material { digest: Some(content.clone()), ..material },
        None => material,
    })
}

/// Returns the packages of a base image, from the cache if possible.
async fn packages_of(access: &ImageAccess, base: &BaseImage) -> Result<PackageList> {
    let key = match &base.image.layers[..] {
        [only] => only.digest.hex().to_owned(),
        layers => {
            let mut hash = Sha256::new();
            for layer in layers {
                hash.update(layer.digest.as_str());
            }
            hex::encode(hash.finalize())
        }
    };
    if let Some(known) = access.cache.read_record(PACKAGES, &key)? {
        return Ok(known);
    }
    packages_in(access, &key, layer_files(access, base).await?).await
}

/// Reads the packages from layer files, once per cache.
async fn packages_in(access: &ImageAccess, key: &str, layers: Vec<PathBuf>) -> Result<PackageList> {
    if let Some(known) = access.cache.read_record(PACKAGES, key)? {
        return Ok(known);
    }
    let packages = blocking(move || {
        let mut reader = PackageReader::default();
        for path in layers {
            reader.read_layer(fs_err::File::open(&path)?)?;
        }
        Ok::<_, BuildError>(reader.finish())
    })
    .await?;
    access.cache.write_record(PACKAGES, key, &packages)?;
    Ok(packages)
}

/// Returns the payload's modules, each with the digest of its file.
fn modules(tree: &Path, report: &CheckReport) -> Result<Vec<ModuleFile>> {
    let by_path: BTreeMap<&str, _> =
        report.modules.iter().map(|module| (module.path.as_str(), module)).collect();
    let mut files = Vec::new();
    for module in by_path.values() {
        files.push(ModuleFile {
            path: module.path.clone(),
            name: module.name.clone(),
            version: module.about.version.clone(),
            license: module.about.license.clone(),
            srcversion: module.about.srcversion.clone(),
            digest: file_digest(&tree.join(&module.path))?,
        });
    }
    Ok(files)
}

/// Returns the digest of a file's content. Blocks.
pub fn file_digest(path: &Path) -> io::Result<Digest> {
    let mut file = Hashing::new(fs_err::File::open(path)?);
    io::copy(&mut file, &mut io::sink())?;
    Ok(file.into_parts().1)
}
