//! The key that signs modules, with the certificate that identifies it to kernels.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_core::{
    image::Digest,
    provenance::{KeyAlgorithm, PublicKey},
    site::{ModuleSigning, Signed},
};
use farrier_net::SecretReader;
use jiff::Timestamp;
use kmod::{self, Certificate, ModuleKey, SignatureHash};
use tokio::sync::OnceCell;

use super::{
    Result, Signer,
    public_key::{check_usable, read_certificate},
};

/// Signs modules. The certificate is read immediately, because plans need it; the key is loaded for the first signature.
#[derive(Debug)]
pub struct ModuleSigner {
    spec: ModuleSigning,
    path: PathBuf,
    certificate: Certificate,
    public: PublicKey,
    secrets: SecretReader,
    signer: OnceCell<Arc<Signer>>,
}

impl ModuleSigner {
    /// Reads the certificate. Paths are relative to `root`. Blocks.
    pub fn open(spec: &ModuleSigning, root: &Path, secrets: SecretReader) -> Result<Self> {
        let path = root.join(&spec.certificate);
        let certificate = read_certificate(&path)?;
        let public = PublicKey::any_from_info(&certificate.public_key);
        let public = check_usable(public, &path.display().to_string())?;
        Ok(Self { spec: spec.clone(), path, certificate, public, secrets, signer: OnceCell::new() })
    }

    /// Certificate that signatures name.
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// SHA-256 of the certificate's DER form, as `openssl x509 -fingerprint -sha256` shows it.
    pub fn fingerprint(&self) -> Digest {
        Digest::of(&self.certificate.der)
    }

    /// Returns the treatment of modules that already have a signature.
    pub fn signed(&self) -> Signed {
        self.spec.signed
    }

    /// Algorithm family of the key.
    pub fn kind(&self) -> ModuleKey {
        match self.public.algorithm() {
            KeyAlgorithm::Rsa(_) => ModuleKey::Rsa,
            KeyAlgorithm::P256 | KeyAlgorithm::P384 => ModuleKey::Ecdsa,
        }
    }

    /// Warning if `now` is outside the certificate's validity period. Not an error, because the kernel ignores the period.
    pub fn warning(&self, now: Timestamp) -> Option<String> {
        let Certificate { not_before, not_after, .. } = &self.certificate;
        let path = self.path.display();
        let consequence = "kernels ignore the validity period, and load modules signed with it";
        if now > *not_after {
            Some(format!("the module signing certificate {path} expired at {not_after}: {consequence}"))
        } else if now < *not_before {
            Some(format!(
                "the module signing certificate {path} is not valid before {not_before}: {consequence}"
            ))
        } else {
            None
        }
    }

    /// Returns the private key. The first call loads it.
    pub async fn load(&self) -> Result<Arc<Signer>> {
        let load = || async {
            let ModuleSigning { key, passphrase, certificate: _, signed: _ } = &self.spec;
            let signer = Signer::load(key, passphrase.as_ref(), Some(&self.public), &self.secrets).await?;
            signer.ensure_matches(&self.public, &self.path)?;
            Ok(Arc::new(signer))
        };
        self.signer.get_or_try_init(load).await.cloned()
    }

    /// Signature trailer to append to a module. `signer` comes from [`Self::load`]. Blocks.
    pub fn trailer(&self, signer: &Signer, hash: SignatureHash, module: &[u8]) -> Result<Vec<u8>> {
        let signature = signer.sign(hash, module)?;
        Ok(kmod::trailer(&self.certificate, self.kind(), hash, &signature))
    }

    /// Returns a PKCS#7 message that signs content other than a module, without the content. `signer` comes from [`Self::load`].
    /// Blocks.
    pub fn message(&self, signer: &Signer, hash: SignatureHash, content: &[u8]) -> Result<Vec<u8>> {
        let signature = signer.sign(hash, content)?;
        Ok(kmod::signature_message(&self.certificate, self.kind(), hash, &signature))
    }
}
