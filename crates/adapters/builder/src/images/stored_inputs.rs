//! Connects the store to the site's keys. farrier signs stored inputs with these keys and verifies the inputs before use, as
//! it does with images. Also finds unverified root file systems in the registry.

use std::{collections::BTreeSet, sync::Arc};

use async_trait::async_trait;
use farrier_core::{
    image::{Digest, DriverImage, Repository, RuntimeBase},
    kernel::{Architecture, KernelTarget},
    plan::{FetchedInputs, Resolved, RootFsKey, Unverified, toolchain_key},
};
use farrier_inputs::PackageRoot;
use farrier_store::{
    SignatureStatus, Store, Trust, TrustFault,
    registry::{Registry, RegistryLocation, Retrying},
};
use oci::error_chain;

use super::{
    root_fs::{RootFsSpec, base_root, unbuildable, unverified_root_fs},
    signatures::StoredImage,
};
use crate::{
    resolve::with_hint,
    services::{BuildError, BuildServices, ImageAccess},
};

/// The store at `location`, with the keys of the site in `services`.
pub fn store_of(services: &BuildServices, location: RegistryLocation, registry: Arc<dyn Registry>) -> Store {
    let store = Store::new(location.clone(), Arc::clone(&registry));
    let retrying = Arc::new(Retrying::new(registry, services.process.cancel.clone()));
    let images = ImageAccess { location, registry: retrying, ..services.images.clone() };
    let services = BuildServices { images, ..services.clone() };
    store.trusting(Arc::new(SiteKeys { services }))
}

/// [`Trust`] by the site's keys. The registry of `services` is the one that holds the store.
struct SiteKeys {
    services: BuildServices,
}

#[async_trait]
impl Trust for SiteKeys {
    async fn signature_status(
        &self,
        repository: &Repository,
        digest: &Digest,
    ) -> Result<SignatureStatus, TrustFault> {
        let stored = StoredImage { services: &self.services, repository, digest };
        stored.signature_status().await.map_err(|error| fault(&error))
    }

    async fn sign(&self, repository: &Repository, digest: &Digest, name: &str) -> Result<bool, TrustFault> {
        let stored = StoredImage { services: &self.services, repository, digest };
        stored.sign_input_if_unsigned(name).await.map_err(|error| fault(&error))
    }
}

fn fault(error: &BuildError) -> TrustFault {
    TrustFault { message: error_chain(error), hint: error.hint(), is_transient: error.is_transient() }
}

/// Looks up the registry's copies of the toolchains and runtime bases that farrier creates.
pub async fn look_up_root_fs(
    services: &BuildServices,
    images: &[&DriverImage],
    targets: &BTreeSet<KernelTarget>,
    resolved: &mut Resolved,
) {
    for target in targets {
        let Some(family) = resolved.family(&services.definitions.families, target) else { continue };
        for image in images {
            let Ok(toolchain) = image.spec.toolchain(family) else { continue };
            let Some(root) = PackageRoot::of_toolchain(&toolchain, target) else { continue };
            let key = toolchain_key(image, family, target, resolved.system(target));
            let Some(Ok(identity)) = resolved.toolchains.get(&key) else { continue };
            let key = (FetchedInputs::TOOLCHAIN, identity.clone(), target.arch);
            look_up_one(services, RootFsSpec::Packages(&root), key, resolved).await;
        }
    }
    let arches: BTreeSet<Architecture> = targets.iter().map(|target| target.arch).collect();
    for image in images {
        let Some(Ok(resolved_image)) = resolved.images.get(&image.metadata.name).cloned() else { continue };
        let Some(identity) = resolved_image.base_identity else { continue };
        for arch in &arches {
            let key = (FetchedInputs::BASE, identity.clone(), *arch);
            match &image.spec.runtime.base {
                Some(base @ (RuntimeBase::Bootstrap(_) | RuntimeBase::Runfile(_))) => {
                    // A failing lookup was already reported with the image.
                    let root = base_root(services, base, &image.spec.sources, &resolved_image.version).await;
                    if let Ok(Some(root)) = root {
                        look_up_one(services, RootFsSpec::Packages(&root), key, resolved).await;
                    }
                }
                Some(RuntimeBase::Minimal(base)) => {
                    look_up_one(services, RootFsSpec::Minimal(base), key, resolved).await;
                }
                None | Some(RuntimeBase::Need(_) | RuntimeBase::Image(_)) => {}
            }
        }
    }
}

/// Looks up one root file system. A registry error is not reported here, because the lookups of images report it.
async fn look_up_one(
    services: &BuildServices,
    spec: RootFsSpec<'_>,
    key: RootFsKey,
    resolved: &mut Resolved,
) {
    if resolved.unverified_root_fs.contains_key(&key) {
        return;
    }
    if let RootFsSpec::Packages(root) = spec
        && let Ok(Some(why)) = unbuildable(services, root, key.2).await
    {
        resolved.unbuildable_root_fs.insert(key.clone(), with_hint(&why));
    }
    let unverified = match unverified_root_fs(services, spec, key.2).await {
        Ok(unverified) => unverified.map(Unverified::Content),
        Err(error) if error.is_unreachable() => {
            resolved.unreachable = true;
            tracing::debug!(
                error = error_chain(&error),
                "cannot look up the root file systems in the registry"
            );
            return;
        }
        Err(error) => Some(Unverified::Refused(with_hint(&error))),
    };
    resolved.unverified_root_fs.insert(key, unverified);
}
