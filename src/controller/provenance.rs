//! Adapter: gathers what an image was made of, for its bill of materials and its provenance.

use std::{
    collections::BTreeMap,
    fs::File,
    io,
    path::{Path, PathBuf},
};

use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::{Controller, TargetError, build::Made, retry::with_retry, root_fs::RuntimeBaseImage};
use crate::{
    blocking::blocking,
    image::{Digest, DriverImage, ImageReference, RuntimeBase, SourceOrigin, Version},
    kernel::{BootstrapSpec, KernelFamily, Toolchain},
    kmod::CheckReport,
    oci::{Artifact, Assembled, annotations, media_type},
    plan::{BUILD_FORMAT, Cell, PlannedUnion},
    provenance::{
        self, CYCLONEDX_PREDICATE, Material, ModuleFile, Package, PackageReader, Provenance, Role,
        SLSA_PREDICATE, Subject,
    },
};

/// farrier's own version, in the documents.
const FARRIER: &str = env!("CARGO_PKG_VERSION");
/// The cache's records of what layers hold.
const PACKAGES: &str = "packages";

/// Something that is said of an image, and can be signed.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Claim {
    /// What kind of claim.
    pub(super) predicate_type: &'static str,
    /// The claim.
    pub(super) predicate: Value,
}

/// The bill and the provenance of an image, as artifacts and as claims.
pub(super) struct Documents {
    /// What is stored beside the image.
    pub(super) artifacts: Vec<Artifact>,
    /// What is signed, where the site signs.
    pub(super) claims: Vec<Claim>,
}

impl Documents {
    fn of(provenance: &Provenance, manifest: &[u8]) -> Result<Self, TargetError> {
        let Subject { name, digest, .. } = &provenance.subject;
        let (bill, slsa) = (provenance::bill(provenance), provenance::slsa(provenance));
        let statement = provenance::statement(name, digest, SLSA_PREDICATE, &slsa);
        let note = [(annotations::PREDICATE_TYPE, SLSA_PREDICATE)];
        let artifacts = vec![
            Artifact::about(manifest, media_type::CYCLONEDX, bill.to_string().into_bytes(), &[])?,
            Artifact::about(manifest, media_type::IN_TOTO, statement, &note)?,
        ];
        let claims = vec![
            Claim { predicate_type: CYCLONEDX_PREDICATE, predicate: bill },
            Claim { predicate_type: SLSA_PREDICATE, predicate: slsa },
        ];
        Ok(Self { artifacts, claims })
    }
}

impl Controller {
    /// The documents of an image for one kernel.
    pub(super) async fn documents(
        &self,
        cell: &Cell,
        (image, family): (&DriverImage, &KernelFamily),
        made: &Made,
        base: Option<&RuntimeBaseImage>,
        assembled: &Assembled,
    ) -> Result<Documents, TargetError> {
        let mut materials = self.sources(cell, image).await?;
        let recipe = Digest::of(cell.dockerfile.as_bytes());
        materials.push(Material { digest: Some(recipe), ..Material::new(Role::Recipe, "Dockerfile") });
        match &made.reused_from {
            None => {
                let headers = made.origins.headers.iter();
                materials.extend(headers.map(|o| Material::of_origin(Role::Headers, o, "kernel headers")));
                materials.push(self.toolchain(cell, family).await?);
            }
            // What compiled it stands in the provenance of that image.
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
        materials.extend(self.module_certificate(cell, &made.report));
        if let (Some(spec), Some(base)) = (&image.spec.runtime.base, base) {
            materials.push(self.base(cell, spec, base).await?);
        }
        if image.spec.holds_entrypoint() {
            let digest = Some(self.entrypoint.binary().await?.digest.clone());
            let version = Some(FARRIER.to_owned());
            let name = "driver-entrypoint";
            materials.push(Material { version, digest, ..Material::new(Role::Entrypoint, name) });
        }
        let (tree, report) = (made.payload.tree.clone(), made.report.clone());
        let modules = blocking(move || modules(&tree, &report)).await?;
        let provenance = Provenance {
            subject: Subject {
                name: cell.image.to_string(),
                version: cell.version.clone(),
                digest: assembled.digest.clone(),
                target: Some(cell.target.clone()),
                architecture: cell.target.arch,
                input_hash: cell.input_hash,
            },
            farrier: FARRIER.to_owned(),
            build_format: BUILD_FORMAT.to_owned(),
            materials,
            modules,
        };
        Documents::of(&provenance, &assembled.manifest)
    }

    /// The certificate whose key signed modules of the payload; none where the kernel looks at no signatures.
    fn module_certificate(&self, cell: &Cell, report: &CheckReport) -> Option<Material> {
        let signed_with = cell.signed_with.as_ref()?;
        let certificate = self.module_signer.as_ref()?.certificate();
        let key_id = certificate.key_id();
        let signers = report.modules.iter().filter_map(|module| module.about.signed_by.as_ref());
        signers.map(|signer| &signer.key_id).find(|signer| **signer == key_id)?;
        let name = certificate.issuer_name().unwrap_or("module signing");
        Some(Material {
            version: Some(key_id),
            digest: Some(signed_with.certificate.clone()),
            ..Material::new(Role::ModuleCertificate, name)
        })
    }

    /// The documents of an image for several kernels: its members have those with the details.
    pub(super) fn union_documents(union: &PlannedUnion, made: &Assembled) -> Result<Documents, TargetError> {
        let members = union.members.iter().map(|member| Material {
            version: Some(member.kernel.to_string()),
            digest: Some(member.digest.clone()),
            ..Material::new(Role::Member, union.image.as_str())
        });
        let provenance = Provenance {
            subject: Subject {
                name: union.image.to_string(),
                version: union.version.clone(),
                digest: made.digest.clone(),
                target: None,
                architecture: union.architecture,
                input_hash: union.input_hash,
            },
            farrier: FARRIER.to_owned(),
            build_format: BUILD_FORMAT.to_owned(),
            materials: members.collect(),
            modules: Vec::new(),
        };
        Documents::of(&provenance, &made.manifest)
    }

    /// Sources and the patches that apply.
    async fn sources(&self, cell: &Cell, image: &DriverImage) -> Result<Vec<Material>, TargetError> {
        let root = &self.definitions.root;
        let mut materials = Vec::new();
        for source in &image.spec.sources {
            let identity =
                with_retry("look up source", &self.cancel, || self.fetcher.source_identity(source, root))
                    .await?
                    .identity;
            let mut material = Material::of_origin(Role::Source, &identity, source.name.as_str());
            if let SourceOrigin::Url { url, .. } = &source.from {
                material.uri = Some(url.clone());
            }
            if material.version.is_none() {
                material.version = Some(cell.version.clone());
            }
            materials.push(material);
        }
        for patch in &cell.patches {
            let path = root.join(&image.spec.patches[patch.index].path);
            let bytes = tokio::fs::read(&path).await.map_err(|source| TargetError::Input { path, source })?;
            let digest = Some(Digest::of(&bytes));
            materials.push(Material { digest, ..Material::new(Role::Patch, patch.name.clone()) });
        }
        Ok(materials)
    }

    async fn toolchain(&self, cell: &Cell, family: &KernelFamily) -> Result<Material, TargetError> {
        let spec = match &family.spec.toolchain {
            Toolchain::Image(_) => {
                // The cell's toolchain is the reference with its digest.
                let (name, digest) = cell.toolchain.split_once('@').unwrap_or((&cell.toolchain, ""));
                return Ok(Material {
                    digest: digest.parse().ok(),
                    uri: Some(format!("oci://{}", cell.toolchain)),
                    ..Material::new(Role::Toolchain, name)
                });
            }
            Toolchain::Bootstrap(spec) => spec,
        };
        let mut material = Material::new(Role::Toolchain, spec.suite.clone());
        if let Some((digest, packages)) = self.toolchain_packages(cell, spec).await? {
            material.digest = Some(digest);
            material.packages = packages;
        }
        Ok(material)
    }

    /// Layer and packages of the toolchain: of the one in the registry, else of the one in the cache. Neither is there
    /// when the engine kept the toolchain for longer than both; nothing is fetched anew only to be written down.
    async fn toolchain_packages(
        &self,
        cell: &Cell,
        spec: &BootstrapSpec,
    ) -> Result<Option<(Digest, Vec<Package>)>, TargetError> {
        let arch = cell.target.arch;
        let reference = self.bootstrap_reference(spec, arch)?;
        let found = self.registry.manifest(&reference.repository, &reference.version).await?;
        if let Some(stored) = found {
            let version = Version::Digest(stored.digest);
            let reference = ImageReference { repository: reference.repository, version };
            let base = self.base_image(&reference, arch).await?;
            let digest = base.image.layers.first().map(|layer| layer.digest.clone());
            let packages = self.packages_of(&base).await?;
            return Ok(digest.map(|digest| (digest, packages)));
        }
        let Some(made) = self.fetcher.bootstrapped(spec, arch)? else { return Ok(None) };
        let packages = self.packages_in(made.digest.hex(), vec![made.layer.clone()]).await?;
        Ok(Some((made.digest, packages)))
    }

    async fn base(
        &self,
        cell: &Cell,
        spec: &RuntimeBase,
        base: &RuntimeBaseImage,
    ) -> Result<Material, TargetError> {
        let digest = Some(base.image.digest.clone());
        Ok(match spec {
            RuntimeBase::Need(name) => Material { digest, ..Material::new(Role::Base, name.as_str()) },
            RuntimeBase::Minimal(spec) => {
                let arch = cell.target.arch;
                let package =
                    with_retry("look up busybox", &self.cancel, || self.fetcher.minimal_package(spec, arch))
                        .await?;
                // The package is all that is in it, and its digest says more than that of the image made of it.
                Material::of_origin(Role::Base, &package, &spec.package)
            }
            RuntimeBase::Bootstrap(spec) => Material {
                digest,
                packages: self.packages_of(base).await?,
                ..Material::new(Role::Base, spec.suite.clone())
            },
            RuntimeBase::Image(name) => Material {
                digest,
                uri: Some(format!("oci://{}@{}", base.repository, base.image.digest)),
                packages: self.packages_of(base).await?,
                ..Material::new(Role::Base, name.clone())
            },
        })
    }

    /// The packages of an image.
    async fn packages_of(&self, base: &RuntimeBaseImage) -> Result<Vec<Package>, TargetError> {
        let mut key = Sha256::new();
        for layer in &base.image.layers {
            key.update(layer.digest.as_str());
        }
        let key = match &base.image.layers[..] {
            [only] => only.digest.hex().to_owned(),
            _ => hex::encode(key.finalize()),
        };
        if let Some(known) = self.cache.read_record(PACKAGES, &key)? {
            return Ok(known);
        }
        let mut files = Vec::new();
        for layer in &base.image.layers {
            files.push(self.base_layer_file(base, layer).await?);
        }
        self.packages_in(&key, files).await
    }

    /// The same from the layers' files, read once for each cache.
    async fn packages_in(&self, key: &str, layers: Vec<PathBuf>) -> Result<Vec<Package>, TargetError> {
        if let Some(known) = self.cache.read_record(PACKAGES, key)? {
            return Ok(known);
        }
        let packages = blocking(move || {
            let mut reader = PackageReader::default();
            for path in layers {
                let read = File::open(&path).and_then(|file| reader.layer(file));
                read.map_err(|source| TargetError::Input { path, source })?;
            }
            Ok::<_, TargetError>(reader.finish())
        })
        .await?;
        self.cache.write_record(PACKAGES, key, &packages)?;
        Ok(packages)
    }
}

/// The payload's modules with the digests of their files.
fn modules(tree: &Path, report: &CheckReport) -> Result<Vec<ModuleFile>, TargetError> {
    let by_path: BTreeMap<&str, _> =
        report.modules.iter().map(|module| (module.path.as_str(), module)).collect();
    let mut files = Vec::new();
    for module in by_path.values() {
        let path = tree.join(&module.path);
        let mut hasher = Sha256::new();
        let read = File::open(&path).and_then(|mut file| io::copy(&mut file, &mut Hashing(&mut hasher)));
        read.map_err(|source| TargetError::Input { path, source })?;
        files.push(ModuleFile {
            path: module.path.clone(),
            name: module.name.clone(),
            version: module.about.version.clone(),
            licence: module.about.licence.clone(),
            srcversion: module.about.srcversion.clone(),
            digest: Digest::from_sha256(&hasher.finalize().into()),
        });
    }
    Ok(files)
}

struct Hashing<'a>(&'a mut Sha256);

impl io::Write for Hashing<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
