//! The signature of a bundle, in a separate file next to it. It covers the index, which determines every other byte.
//! `cosign verify-blob --signature` accepts it for the `farrier-bundle.json` that `zstd -dc | tar -x` unpacks.

use std::{
    io::{self, BufReader, Read as _},
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use base64::{Engine as _, engine::general_purpose::STANDARD};
use farrier_core::{image::Digest, provenance::PublicKey};
use fs_err as fs;
use oci::Hashing;

use super::{
    Bundle, BundleError, BundleIndex, Result,
    read::{CHUNK, Section},
    volume::{remove_link, with_suffix},
};

/// Maximum size of a signature file in bytes.
const MAX_SIGNATURE: u64 = 16 << 10;

impl Bundle {
    /// Bytes that the signature covers.
    pub fn signed_bytes(&self) -> Result<Vec<u8>> {
        Ok(self.index().to_bytes()?)
    }

    /// Writes the signature next to the bundle.
    pub fn write_signature(&self, signature: &[u8]) -> Result<PathBuf> {
        let path = with_suffix(self.path(), ".sig");
        remove_link(&path)?;
        fs::write(&path, STANDARD.encode(signature) + "\n")?;
        Ok(path)
    }

    /// Computes the digest of each of the bundle's files and writes them next to the bundle, in the form that
    /// `sha256sum -c` reads. Returns the path and the text.
    pub fn write_checksums(&self) -> Result<(PathBuf, String)> {
        let mut text = String::new();
        for (Range { start, end }, file) in &self.file.parts {
            let part = Section::new(Arc::clone(&self.file), *start, *end);
            let mut content = BufReader::with_capacity(CHUNK, Hashing::new(part));
            io::copy(&mut content, &mut io::sink())?;
            let (_, digest, _) = content.into_inner().into_parts();
            let name = file.path().file_name().unwrap_or_default().display();
            text.extend([digest.hex(), "  ", &name.to_string(), "\n"]);
        }
        let path = with_suffix(self.path(), ".sha256");
        remove_link(&path)?;
        fs::write(&path, &text)?;
        Ok((path, text))
    }
}

impl BundleIndex {
    /// Returns the fingerprint of the key that signed the bundle, or `None` without keys. Fails if it is none of the keys. The
    /// signature is next to the bundle, unless another file is named.
    pub(super) fn verify_signer(
        &self,
        bundle: &Path,
        keys: &[PublicKey],
        signature: Option<&Path>,
    ) -> Result<Option<Digest>> {
        if keys.is_empty() {
            return Ok(None);
        }
        let path = signature.map_or_else(|| with_suffix(bundle, ".sig"), Path::to_owned);
        let refused = |why: String| BundleError::Unsigned(bundle.to_owned(), why);
        let mut text = String::new();
        let read = fs::File::open(&path).map(|file| file.take(MAX_SIGNATURE).read_to_string(&mut text));
        if let Err(error) | Ok(Err(error)) = read {
            return Err(refused(format!("its signature cannot be read: {error}")));
        }
        let signature = STANDARD.decode(text.trim());
        let signature = signature.map_err(|_| refused(format!("{} is not a signature", path.display())))?;
        let signed = self.to_bytes()?;
        if let Some(key) = keys.iter().find(|key| key.verify_sha256(&signed, &signature)) {
            return Ok(Some(key.fingerprint()));
        }
        let is_given = |signer: &&Digest| keys.iter().any(|key| key.fingerprint() == **signer);
        let claimed = self.signer.as_ref();
        if let Some(other) = claimed.filter(|signer| !is_given(signer)) {
            return Err(BundleError::OtherSigner(bundle.to_owned(), other.clone()));
        }
        let why = match claimed {
            Some(_) => "belongs to another bundle",
            None => "was not made with a given key, or belongs to another bundle",
        };
        Err(refused(format!("{} {why}", path.display())))
    }
}
