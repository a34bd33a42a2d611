//! Adapter: signs the modules of a payload between the static check and the boot check.

use std::{path::Path, sync::Arc};

use super::{Controller, Stage, TargetError};
use crate::{
    blocking::blocking,
    headers::HeaderSet,
    image::{DriverImage, Output},
    kmod::{self, KernelFacts, PayloadModule, Signature, SignatureHash, SigningRule},
    oci::ModuleSignerFact,
    payload,
    plan::{Cell, SignedWith},
    signing::{ModuleSigner, Signer},
    site::Signed,
};

/// How the modules of one payload are to be signed.
#[derive(Clone)]
pub(super) struct Signing {
    modules: Arc<ModuleSigner>,
    signer: Arc<Signer>,
    hash: SignatureHash,
    rule: SigningRule,
}

impl Controller {
    /// Who signs an image's modules. What an engine makes whole (`output: image`) is not changed any more.
    pub(super) fn signed_with(&self, image: &DriverImage) -> Option<SignedWith> {
        let modules = self.module_signer.as_ref().filter(|_| image.spec.output == Output::Payload)?;
        Some(SignedWith { certificate: modules.fingerprint(), signed: modules.signed() })
    }

    /// The same as the image's annotations say it.
    pub(super) fn module_signer_fact(&self, cell: &Cell) -> Option<ModuleSignerFact> {
        let SignedWith { certificate, signed } = cell.signed_with.clone()?;
        let key_id = self.module_signer.as_ref()?.certificate().key_id();
        Some(ModuleSignerFact { signed, key_id, certificate })
    }

    /// Finds out before the work that the modules cannot be signed, and tells what people should know of signing.
    pub(super) async fn can_sign(
        &self,
        cell: &Cell,
        image: &DriverImage,
        headers: &HeaderSet,
    ) -> Result<(), TargetError> {
        let Some(modules) = &self.module_signer else { return Ok(()) };
        let subject = cell.subject();
        let signed = self.signing(cell, image, headers, None).await?.is_some();
        if image.spec.output == Output::Image {
            let why = "the engine makes the whole image (output: image)";
            self.reporter.note(&subject, &format!("its modules are not signed: {why}"));
        } else if !signed {
            let why = "the kernel has no CONFIG_MODULE_SIG, and looks at no signature";
            self.reporter.note(&subject, &format!("its modules are not signed: {why}"));
        } else if let Some(warning) = modules.warning(jiff::Timestamp::now()) {
            self.reporter.note(&subject, &format!("warning: {warning}"));
        }
        Ok(())
    }

    /// How the payload's modules are to be signed for the cell's kernel; `None` where they are not. `previous` signed a payload
    /// that was taken over.
    pub(super) async fn signing(
        &self,
        cell: &Cell,
        image: &DriverImage,
        headers: &HeaderSet,
        previous: Option<&ModuleSignerFact>,
    ) -> Result<Option<Signing>, TargetError> {
        let Some(modules) = &self.module_signer else { return Ok(None) };
        if image.spec.output == Output::Image {
            return Ok(None);
        }
        let hash = SignatureHash::for_kernel(&headers.facts.config, modules.kind()).map_err(|source| {
            TargetError::CannotVerify { kernel: cell.target.release.to_string(), source }
        })?;
        let Some(hash) = hash else { return Ok(None) };
        let signer = modules.load().await?;
        let rule = SigningRule {
            replace: modules.signed() == Signed::Replace,
            previous: previous.map(|signer| signer.key_id.clone()),
        };
        Ok(Some(Signing { modules: Arc::clone(modules), signer, hash, rule }))
    }

    /// Signs a payload's modules in place.
    pub(super) async fn sign(
        &self,
        cell: &Cell,
        signing: Option<&Signing>,
        tree: &Path,
    ) -> Result<(), TargetError> {
        let Some(signing) = signing.cloned() else { return Ok(()) };
        self.reporter.stage(&cell.subject(), Stage::Sign);
        let tree = tree.to_owned();
        let signed = blocking(move || {
            let Signing { modules, signer, hash, rule } = &signing;
            let how = payload::ModuleSigning { certificate: modules, signer, hash: *hash, rule };
            payload::sign_modules(&tree, &how)
        })
        .await?;
        tracing::info!(subject = cell.subject(), modules = signed, "signed");
        Ok(())
    }
}

impl Signing {
    /// Makes of modules and kernel what they will be: the modules signed, and, as the site says, the key one of the kernel's.
    pub(super) fn anticipate(&self, modules: &mut [PayloadModule], kernel: &mut KernelFacts) {
        let signer = kmod::signer(self.modules.certificate(), self.hash);
        for module in modules.iter_mut().filter_map(|module| module.module.as_mut().ok()) {
            if !self.rule.keeps(&module.signature) {
                module.signature = Signature::By(signer.clone());
            }
        }
        kernel.beyond_headers.trusted_keys.insert(signer.key_id);
    }
}
