//! Adapter: the keys that sign images, and those that verify them.

use std::{path::PathBuf, sync::Arc};

use crate::{
    blocking::blocking,
    parts::{FindingKind, Parts, TargetError},
    provenance::PublicKey,
    signing::{self, SignatureHash, Signer},
    site::ImageSigning,
};

/// A key that signs images, with its public half in the form that verifies.
pub(super) struct ImageSigner {
    signer: Arc<Signer>,
    pub(super) public: PublicKey,
}

impl ImageSigner {
    /// The site's; `None` where the site signs no images.
    pub(super) async fn load(parts: &Parts) -> Result<Option<Self>, TargetError> {
        let Some(signing) = &parts.definitions.site.image_signing else { return Ok(None) };
        let ImageSigning { key, passphrase, public_key, .. } = signing;
        let path = public_key.as_ref().map(|path| parts.definitions.root.join(path));
        let public = path.as_deref().map(signing::read_public_key).transpose()?;
        let secrets = parts.fetcher.net().secrets();
        let signer = Signer::load(key, passphrase.as_ref(), public.as_ref(), secrets).await?;
        if let (Some(path), Some(public)) = (&path, &public) {
            signer.must_match(public, path)?;
        }
        let public = PublicKey::from_info(signer.public_key().info())
            .map_err(|source| TargetError::image_key("imageSigning", source))?;
        Ok(Some(Self { signer: Arc::new(signer), public }))
    }

    /// Not on the asynchronous threads: a program may be asked.
    pub(super) async fn sign(&self, content: Vec<u8>) -> Result<Vec<u8>, TargetError> {
        let signer = Arc::clone(&self.signer);
        Ok(blocking(move || signer.sign(SignatureHash::Sha256, &content)).await?)
    }
}

/// Fails where images are to be signed and cannot be: better before a compilation than after it.
pub(crate) async fn can_sign_images(parts: &Parts) -> Result<(), TargetError> {
    ImageSigner::load(parts).await.map(drop)
}

/// The keys that an image is verified with: those that are named, else those that the policy asks for, else the site's own.
/// At least one.
pub async fn verification_keys(parts: &Parts, named: &[PathBuf]) -> Result<Vec<PublicKey>, TargetError> {
    if !named.is_empty() {
        return read_keys(named.to_vec()).await;
    }
    let required = required_keys(parts).await?;
    if !required.is_empty() {
        return Ok(required);
    }
    own_key(parts).await?.map(|key| vec![key]).ok_or_else(|| {
        TargetError::finding(
            FindingKind::Usage,
            "there is no key to verify the image with".to_owned(),
            Some(
                "give --key, or name keys in site.yaml (policy.requireSigned, imageSigning); without one, \
                 --insecure-no-signature looks at the rest, which whoever may write to the registry can make fit"
                    .to_owned(),
            ),
        )
    })
}

/// The public half of the site's own key. Where a file has it, the key itself is not needed: it stays on the side
/// of an air gap where images are signed.
pub(super) async fn own_key(parts: &Parts) -> Result<Option<PublicKey>, TargetError> {
    let Some(signing) = &parts.definitions.site.image_signing else { return Ok(None) };
    match &signing.public_key {
        Some(path) => Ok(read_keys(vec![parts.definitions.root.join(path)]).await?.pop()),
        None => Ok(ImageSigner::load(parts).await?.map(|signer| signer.public)),
    }
}

/// The keys of which one must have signed (`policy.requireSigned`).
pub(super) async fn required_keys(parts: &Parts) -> Result<Vec<PublicKey>, TargetError> {
    let root = &parts.definitions.root;
    let paths = parts.definitions.site.policy.require_signed.iter().map(|path| root.join(path));
    read_keys(paths.collect()).await
}

/// The keys that make a published image count as an input: the site's own, and those that the policy names.
pub(super) async fn trusted_keys(parts: &Parts) -> Result<Vec<PublicKey>, TargetError> {
    let mut keys = required_keys(parts).await?;
    keys.extend(own_key(parts).await?);
    Ok(keys)
}

/// Reads public keys in PEM form.
async fn read_keys(paths: Vec<PathBuf>) -> Result<Vec<PublicKey>, TargetError> {
    let mut keys = Vec::new();
    for path in paths {
        let text = fs_err::tokio::read_to_string(&path).await?;
        let key = PublicKey::from_pem(&text);
        keys.push(key.map_err(|source| TargetError::image_key(&path.display().to_string(), source))?);
    }
    Ok(keys)
}
