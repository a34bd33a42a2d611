//! Loads the keys that sign and verify images.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use farrier_core::{
    image::Definitions,
    provenance::{PublicKey, RequiredSigners},
    site::{ImageSigning, RevokedKey},
};
use farrier_local::blocking::blocking;
use farrier_signing as signing;
use farrier_signing::{SignatureHash, Signer};
use jiff::Timestamp;

use crate::services::{BuildError, BuildServices, Result};

/// A key that signs images, with its public key for verification.
pub struct ImageSigner {
    signer: Arc<Signer>,
    pub public: PublicKey,
}

impl ImageSigner {
    /// Loads the site's key; `None` if the site signs no images. Fails if the key is unusable.
    pub async fn load(services: &BuildServices) -> Result<Option<Self>> {
        let Some(signing) = &services.definitions.site.image_signing else { return Ok(None) };
        let ImageSigning { key, passphrase, public_key, .. } = signing;
        let path = public_key.as_ref().map(|path| services.definitions.root.join(path));
        let public = path.as_deref().map(signing::read_public_key).transpose()?;
        let secrets = services.fetcher.net().secrets();
        let signer = Signer::load(key, passphrase.as_ref(), public.as_ref(), secrets).await?;
        if let (Some(path), Some(public)) = (&path, &public) {
            signer.ensure_matches(public, path)?;
        }
        let public = PublicKey::image_key_from_info(signer.public_key().info())
            .map_err(|source| BuildError::image_key("imageSigning", source))?;
        ensure_not_revoked(&services.definitions, "imageSigning", &public).await?;
        Ok(Some(Self { signer: Arc::new(signer), public }))
    }

    /// Signs on a blocking thread: the signer may be an external program.
    pub async fn sign(&self, content: Vec<u8>) -> Result<Vec<u8>> {
        let signer = Arc::clone(&self.signer);
        Ok(blocking(move || signer.sign(SignatureHash::Sha256, &content)).await?)
    }
}

/// Keys to verify an image with: `at_least` of the keys in `key_files`, or else the policy's keys, or else the site's own key.
pub async fn verification_keys(
    services: &BuildServices,
    key_files: &[PathBuf],
    at_least: usize,
) -> Result<RequiredSigners> {
    if !key_files.is_empty() {
        return signers(&services.definitions, "--key", (Path::new(""), key_files), at_least).await;
    }
    if let Some(required) = required_signers(&services.definitions).await? {
        return Ok(required);
    }
    own_signers(services).await?.ok_or_else(|| {
        let hint = "pass --key, or name keys in site.yaml (policy.requireSigned, imageSigning); \
                    --insecure-no-signature checks only what everyone with push access can forge";
        BuildError::usage("no key to verify the image with".to_owned(), hint)
    })
}

/// The site's own public key, as the required signer. Needs no private key if a file has the public key: an air-gapped
/// site has only the public key.
pub(super) async fn own_signers(services: &BuildServices) -> Result<Option<RequiredSigners>> {
    let Some(signing) = &services.definitions.site.image_signing else { return Ok(None) };
    let public = match &signing.public_key {
        Some(path) => Some(read_key(&services.definitions.root.join(path)).await?),
        None => ImageSigner::load(services).await?.map(|signer| signer.public),
    };
    let Some(key) = public else { return Ok(None) };
    ensure_not_revoked(&services.definitions, "imageSigning", &key).await?;
    Ok(Some(RequiredSigners::one("imageSigning", key)))
}

/// Whether the site names any keys for images. This process may be unable to read the key files.
pub(super) fn has_keys(definitions: &Definitions) -> bool {
    let site = &definitions.site;
    site.image_signing.is_some() || !site.policy.require_signed.is_empty()
}

/// Keys that must have signed an image (`policy.requireSigned`); `None` if the policy requires none.
pub(super) async fn required_signers(definitions: &Definitions) -> Result<Option<RequiredSigners>> {
    let wanted = &definitions.site.policy.require_signed;
    if wanted.is_empty() {
        return Ok(None);
    }
    let key_files = (&*definitions.root, wanted.keys());
    signers(definitions, "policy.requireSigned", key_files, wanted.at_least()).await.map(Some)
}

/// Reads the public keys (PEM) that the command line names. Fails if the site revoked one of them.
pub async fn named_keys(definitions: &Definitions, paths: &[PathBuf]) -> Result<Vec<PublicKey>> {
    let mut keys = Vec::new();
    for path in paths {
        let key = read_key(path).await?;
        ensure_not_revoked(definitions, &format!("--key {}", path.display()), &key).await?;
        keys.push(key);
    }
    Ok(keys)
}

/// Reads accepted keys, without those that the site revoked.
pub(super) async fn signers(
    definitions: &Definitions,
    setting: &str,
    (root, paths): (&Path, &[impl AsRef<Path> + Sync]),
    at_least: usize,
) -> Result<RequiredSigners> {
    let (mut keys, mut revoked) = (Vec::new(), Vec::new());
    for path in paths {
        let name = path.as_ref().display().to_string();
        let key = read_key(&root.join(path)).await?;
        match revoked_since(definitions, &key).await? {
            Some(since) => revoked.push(format!("; {name} is revoked since {since}")),
            None => keys.push((name, key)),
        }
    }
    RequiredSigners::new(keys, at_least).map_err(|error| {
        let hint = "name more keys, or require fewer; a key that is named twice counts once, and revoked keys do not count";
        let message = format!("{setting}: {error}{}", revoked.concat());
        BuildError::usage(message, hint)
    })
}

/// Time since which the site revokes a key.
async fn revoked_since(definitions: &Definitions, key: &PublicKey) -> Result<Option<Timestamp>> {
    for RevokedKey { key: file, fingerprint, since } in &definitions.site.revoked {
        let is_revoked = match file {
            Some(file) => read_key(&definitions.root.join(file)).await?.is_same_key(key),
            None => fingerprint.as_ref().is_some_and(|revoked| key.fingerprints().contains(revoked)),
        };
        if is_revoked {
            return Ok(Some(*since));
        }
    }
    Ok(None)
}

/// Fails if the site revokes the key.
async fn ensure_not_revoked(definitions: &Definitions, setting: &str, key: &PublicKey) -> Result<()> {
    let Some(since) = revoked_since(definitions, key).await? else { return Ok(()) };
    let message = format!("{setting}: its key ({}) is revoked since {since}", key.fingerprint());
    let hint = "use another key: docs/rotation.md says how to replace a key";
    Err(BuildError::usage(message, hint))
}

/// Revoked keys that the site names by file, with a description for messages.
pub(super) async fn revoked_keys(definitions: &Definitions) -> Result<Vec<(String, PublicKey)>> {
    let Definitions { site, root, .. } = definitions;
    let mut keys = Vec::new();
    for RevokedKey { key, since, .. } in &site.revoked {
        let Some(path) = key else { continue };
        keys.push((format!("{}, revoked since {since}", path.display()), read_key(&root.join(path)).await?));
    }
    Ok(keys)
}

/// Fails if the site uses a revoked key; the error names the key. Returns the number of revoked keys.
pub async fn check_revoked_keys(services: &BuildServices) -> Result<usize> {
    let Definitions { site, root, .. } = &services.definitions;
    own_signers(services).await?;
    for path in site.policy.require_signed.keys() {
        let what = format!("policy.requireSigned {}", path.display());
        ensure_not_revoked(&services.definitions, &what, &read_key(&root.join(path)).await?).await?;
    }
    Ok(site.revoked.len())
}

async fn read_key(path: &Path) -> Result<PublicKey> {
    let text = fs_err::tokio::read_to_string(path).await?;
    PublicKey::image_key_from_pem(&text)
        .map_err(|source| BuildError::image_key(&path.display().to_string(), source))
}
