//! The sign stage signs the modules of a payload between the static check and the boot check.

use std::sync::Arc;

use farrier_core::{facts::ModuleSignerFact, image::Output, plan::SignedWith, site::Signed};
use farrier_inputs::HeaderSet;
use farrier_local::blocking::blocking;
use farrier_payload as payload;
use farrier_signing::{ModuleSigner, Signer};
use kmod::{self, PayloadModule, Signature, SignatureHash, SigningRule};

use super::cell_build::{CellBuild, Payload};
use crate::services::{BuildError, Result, Stage};

/// Parameters for signing the modules of one payload.
#[derive(Clone)]
pub(super) struct Signing {
    module_signer: Arc<ModuleSigner>,
    signer: Arc<Signer>,
    hash: SignatureHash,
    rule: SigningRule,
}

/// Returns the signer of the image's modules, as recorded in the image's annotations.
pub(super) fn module_signer(build: &CellBuild<'_>) -> Option<ModuleSignerFact> {
    let SignedWith { certificate, signed } = build.cell.signed_with.clone()?;
    let key_id = build.services.tools.module_signer.as_ref()?.certificate().key_id.clone();
    Some(ModuleSignerFact { signed, key_id, certificate })
}

/// Fails fast if the modules cannot be signed. Otherwise notes why they will not be signed, or a warning about the
/// signing key.
pub(super) async fn ensure_can_sign_modules(build: &CellBuild<'_>, headers: &HeaderSet) -> Result<()> {
    let Some(module_signer) = &build.services.tools.module_signer else { return Ok(()) };
    let signed = signing(build, headers, None).await?.is_some();
    if build.image.spec.output == Output::Image {
        build.note("its modules are not signed: the engine makes the whole image (output: image)");
    } else if !signed {
        build
            .note("its modules are not signed: the kernel has no CONFIG_MODULE_SIG and checks no signatures");
    } else if let Some(warning) = module_signer.warning(jiff::Timestamp::now()) {
        build.note(&format!("warning: {warning}"));
    }
    Ok(())
}

/// Returns how to sign the payload's modules for the cell's kernel, or `None` if they are not signed. `previous` is the
/// signer of a reused payload.
pub(super) async fn signing(
    build: &CellBuild<'_>,
    headers: &HeaderSet,
    previous: Option<&ModuleSignerFact>,
) -> Result<Option<Signing>> {
    let Some(module_signer) = &build.services.tools.module_signer else { return Ok(None) };
    if build.image.spec.output == Output::Image {
        return Ok(None);
    }
    let hash = SignatureHash::for_kernel(&headers.facts.config, module_signer.kind()).map_err(|source| {
        BuildError::unmet(
            format!("modules cannot be signed for kernel {}: {source}", build.cell.target.release),
            "sign with an RSA key for a kernel with built-in SHA-256 or SHA-512, or remove moduleSigning from site.yaml",
        )
    })?;
    let Some(hash) = hash else { return Ok(None) };
    let signer = module_signer.load().await?;
    let rule = SigningRule {
        replace: module_signer.signed() == Signed::Replace,
        previous: previous.map(|signer| signer.key_id.clone()),
    };
    Ok(Some(Signing { module_signer: Arc::clone(module_signer), signer, hash, rule }))
}

/// Signs a payload's modules in place.
pub(super) async fn sign(build: &CellBuild<'_>, signing: Option<Signing>, payload: &Payload) -> Result<()> {
    let Some(Signing { module_signer, signer, hash, rule }) = signing else { return Ok(()) };
    build.stage(Stage::Sign);
    let (tree, budget) = (payload.tree.clone(), Arc::clone(&payload.decompression));
    let signed = blocking(move || {
        let settings =
            payload::ModuleSigning { certificate: &module_signer, signer: &signer, hash, rule: &rule };
        payload::sign_modules(&tree, &settings, &budget)
    })
    .await?;
    tracing::info!(subject = build.cell.subject(), modules = signed, "signed");
    Ok(())
}

impl Signing {
    /// Marks modules as signed before [`sign`] signs them, so that the static check treats them as signed. Modules that keep
    /// their own signature stay unchanged. Returns the ID of the signing key, which the kernel trusts according to the
    /// site's configuration.
    pub(super) fn mark_as_signed(&self, modules: &mut [PayloadModule]) -> String {
        let signer = kmod::signer(self.module_signer.certificate(), self.hash);
        for module in modules.iter_mut().filter_map(|module| module.module.as_mut().ok()) {
            if !self.rule.keeps(&module.signature) {
                module.signature = Signature::By(signer.clone());
                // Signing compresses the file again, with CRC32.
                module.has_unsupported_xz_check = false;
            }
        }
        signer.key_id
    }
}
