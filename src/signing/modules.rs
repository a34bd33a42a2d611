//! Adapter: the key that signs modules, and the certificate by which kernels know it.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use jiff::Timestamp;
use tokio::sync::OnceCell;

use super::{
    Result, Signer,
    public_key::{read_certificate, usable},
};
use crate::{
    image::Digest,
    kmod::{self, Certificate, ModuleKey, SignatureHash},
    net::SecretReader,
    provenance::{KeyAlgorithm, PublicKey},
    site::{ModuleSigning, Signed},
};

/// Signs modules. The certificate is read at once, because plans need it, and the key when the first module is signed.
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
    /// Reads the certificate. Relative paths start at `root`. Blocks.
    pub fn open(spec: &ModuleSigning, root: &Path, secrets: SecretReader) -> Result<Self> {
        let path = root.join(&spec.certificate);
        let certificate = read_certificate(&path)?;
        let public = PublicKey::any_from_info(&certificate.public_key);
        let public = usable(public, &path.display().to_string())?;
        Ok(Self { spec: spec.clone(), path, certificate, public, secrets, signer: OnceCell::new() })
    }

    /// The certificate.
    pub fn certificate(&self) -> &Certificate {
        &self.certificate
    }

    /// sha256 over the certificate's DER, as `openssl x509 -fingerprint -sha256` shows it.
    pub fn fingerprint(&self) -> Digest {
        Digest::of(&self.certificate.der)
    }

    /// What becomes of modules that are signed already.
    pub fn signed(&self) -> Signed {
        self.spec.signed
    }

    /// What kind of key it is.
    pub fn kind(&self) -> ModuleKey {
        match self.public.algorithm() {
            KeyAlgorithm::Rsa(_) => ModuleKey::Rsa,
            KeyAlgorithm::P256 | KeyAlgorithm::P384 => ModuleKey::Ecdsa,
        }
    }

    /// Why people may want another certificate. The kernel does not look at validity, so it is no error.
    pub fn warning(&self, now: Timestamp) -> Option<String> {
        let Certificate { not_before, not_after, .. } = &self.certificate;
        let path = self.path.display();
        let all_the_same = "kernels do not look at that, and load what it signs";
        if now > *not_after {
            Some(format!("the module signing certificate {path} expired at {not_after}: {all_the_same}"))
        } else if now < *not_before {
            Some(format!(
                "the module signing certificate {path} is valid from {not_before} on: {all_the_same}"
            ))
        } else {
            None
        }
    }

    /// The key, loaded now if it was not.
    pub async fn load(&self) -> Result<Arc<Signer>> {
        let load = || async {
            let ModuleSigning { key, passphrase, certificate: _, signed: _ } = &self.spec;
            let signer = Signer::load(key, passphrase.as_ref(), Some(&self.public), &self.secrets).await?;
            signer.must_match(&self.public, &self.path)?;
            Ok(Arc::new(signer))
        };
        self.signer.get_or_try_init(load).await.cloned()
    }

    /// What is to follow a module's bytes; `signer` is what [`Self::load`] gave. Blocks.
    pub fn trailer(&self, signer: &Signer, hash: SignatureHash, module: &[u8]) -> Result<Vec<u8>> {
        let signature = signer.sign(hash, module)?;
        Ok(kmod::trailer(&self.certificate, self.kind(), hash, &signature))
    }
}
