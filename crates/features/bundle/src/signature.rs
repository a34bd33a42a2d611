//! The signature of a bundle, in a separate file next to it. It covers the index, which determines every other byte.
//! `cosign verify-blob --signature` accepts it for the `farrier-bundle.json` that `zstd -dc | tar -x` unpacks.

use std::{
    io::Read as _,
    path::{Path, PathBuf},
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use farrier_core::provenance::PublicKey;
use fs_err as fs;

use super::{Bundle, BundleError, Result};

/// Maximum size of a signature file in bytes.
const MAX_SIGNATURE: u64 = 16 << 10;

/// Path of a bundle's signature.
fn signature_file(bundle: &Path) -> PathBuf {
    let mut path = bundle.as_os_str().to_owned();
    path.push(".sig");
    path.into()
}

impl Bundle {
    /// Bytes that the signature covers.
    pub fn signed_bytes(&self) -> Result<Vec<u8>> {
        self.index()
            .to_bytes()
            .map_err(|source| BundleError::Manifest("the bundle's index".to_owned(), source))
    }

    /// Writes the signature next to the bundle.
    pub fn write_signature(&self, signature: &[u8]) -> Result<PathBuf> {
        let path = signature_file(self.path());
        fs::write(&path, STANDARD.encode(signature) + "\n")?;
        Ok(path)
    }

    /// Fails if none of the keys signed the bundle.
    pub fn must_be_signed(&self, keys: &[PublicKey]) -> Result<()> {
        let path = signature_file(self.path());
        let refused = |why: String| BundleError::Unsigned(self.path().to_owned(), why);
        let mut text = String::new();
        let read = fs::File::open(&path).map(|file| file.take(MAX_SIGNATURE).read_to_string(&mut text));
        if let Err(error) | Ok(Err(error)) = read {
            return Err(refused(format!("its signature cannot be read: {error}")));
        }
        let signature = STANDARD.decode(text.trim());
        let signature = signature.map_err(|_| refused(format!("{} is not a signature", path.display())))?;
        let signed = self.signed_bytes()?;
        if keys.iter().any(|key| key.verifies(&signed, &signature)) {
            return Ok(());
        }
        Err(refused(format!(
            "{} was not made with a given key, or belongs to another bundle",
            path.display()
        )))
    }
}
