//! Fetches an output of an image, verified by signature and digest.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use farrier_builder::{
    file_digest,
    images::StoredImage,
    services::{OutputMaker as _, Result},
};
use farrier_core::{
    facts::annotations,
    image::{Digest, HostOutput, Version},
    kernel::KernelRelease,
    provenance::RequiredSigners,
};
use farrier_local::blocking::blocking;
use oci::{Descriptor, ImageManifest};
use serde::Serialize;

use super::{HostArtifacts, payload::unmet};

/// Output, image and kernel that the user requested. Tags and image manifests are not signed, so the annotations of the signed output
/// must match.
#[derive(Clone, Copy)]
pub struct Requested<'a> {
    pub output: HostOutput,
    /// Name of the image's definition; `None` for any.
    pub name: Option<&'a str>,
    /// Kernel release; `None` for any.
    pub release: Option<&'a KernelRelease>,
    /// Whether farrier may not make the output itself.
    pub published_only: bool,
}

impl Requested<'_> {
    /// Whether the annotations of a signed output match the request.
    fn accepts(&self, annotations: &BTreeMap<String, String>) -> bool {
        let annotation = |key| annotations.get(key).map_or("", String::as_str);
        let (release, title) = (annotation(annotations::KERNEL_RELEASE), annotation(annotations::TITLE));
        let is_title = |name: &str| match self.output {
            HostOutput::Sysext => *title == format!("farrier-{name}-{release}.raw"),
            HostOutput::Deb | HostOutput::DebMeta | HostOutput::Initramfs => {
                title.starts_with(&format!("{name}-modules-"))
            }
        };
        self.release.is_none_or(|requested| requested.as_str() == release) && self.name.is_none_or(is_title)
    }
}

/// An output that was written to a file.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Pulled {
    pub output: String,
    /// The image by digest.
    pub image: String,
    pub file: PathBuf,
    /// SHA-256 of the file.
    pub digest: Digest,
    pub size: u64,
    /// Manifest digest of the output.
    pub artifact: Digest,
    /// Whether the registry has the output. If not, farrier built the output locally from the image.
    pub published: bool,
    /// Whether a signature was verified.
    pub verified: bool,
}

/// Writes an output of an image to the file `to`; by default to the working directory, under the output's own name. An output that
/// the registry lacks is made from the image, with the same bytes. A file that has the output's bytes already is kept. With `signers`,
/// the published output, or else the image, must be signed.
pub async fn pull(
    image: StoredImage<'_>,
    requested: Requested<'_>,
    signers: Option<&RequiredSigners>,
    to: Option<&Path>,
) -> Result<Pulled> {
    let StoredImage { services, repository, digest } = image;
    let output = requested.output;
    let (mut published, mut refused) = (None, Vec::new());
    for listed in services.images.registry.referrers(repository, digest, Some(output.media_type())).await? {
        let version = Version::Digest(listed.digest);
        let Some(stored) = services.images.registry.manifest(repository, &version).await? else { continue };
        let manifest = ImageManifest::parse(&stored.bytes)?;
        // Clients maintain the lists of referrers, so an entry may be of another kind.
        let Some((_, name)) = output_layer(&manifest, digest, output) else { continue };
        if !requested.accepts(&manifest.annotations) {
            refused.push(format!("{}: it is {name}", stored.digest));
            continue;
        }
        if let Err(why) = verify(StoredImage { digest: &stored.digest, ..image }, signers).await? {
            refused.push(format!("{}: {why}", stored.digest));
            continue;
        }
        published = Some((stored.digest, manifest, None));
        break;
    }
    let (artifact, manifest, made) = match published {
        Some(published) => published,
        None if refused.is_empty() && requested.published_only => {
            let hint = "publish it: `farrier build --push` with `outputs`";
            return Err(unmet(image, &format!("has no {output} in the registry to store"), hint));
        }
        None if refused.is_empty() => {
            if let Err(why) = verify(image, signers).await? {
                let why = format!("is not signed with an accepted key: {why}");
                return Err(unmet(image, &why, "pass the key that signed it with --key"));
            }
            let made = HostArtifacts.make(services, repository, digest, output).await?.artifact;
            (made.digest, ImageManifest::parse(&made.manifest)?, Some(made.content))
        }
        None => {
            let why = format!("has no {output} with an accepted signature: {}", refused.join("; "));
            return Err(unmet(image, &why, "give NAME:TAG, or its signer's --key, or publish it again"));
        }
    };
    let layer = output_layer(&manifest, digest, output).filter(|_| requested.accepts(&manifest.annotations));
    let Some((layer, name)) = layer else {
        return Err(unmet(image, &format!("yields no such {output}"), "give another image"));
    };
    let file = to.unwrap_or(Path::new(name)).to_owned();
    match &made {
        Some(content) => fs_err::tokio::write(&file, content).await?,
        None if has_digest(&file, &layer.digest).await => {}
        None => services.images.registry.fetch_blob(repository, &layer.digest, layer.size, &file).await?,
    }
    Ok(Pulled {
        output: output.to_string(),
        image: format!("{repository}@{digest}"),
        file,
        digest: layer.digest.clone(),
        size: layer.size,
        artifact,
        published: made.is_none(),
        verified: signers.is_some(),
    })
}

/// Whether a file exists and has this digest.
async fn has_digest(file: &Path, digest: &Digest) -> bool {
    let file = file.to_owned();
    blocking(move || file_digest(&file)).await.is_ok_and(|actual| actual == *digest)
}

/// Whether enough of the keys signed a manifest. The inner error is the reason if not.
async fn verify(image: StoredImage<'_>, signers: Option<&RequiredSigners>) -> Result<Result<(), String>> {
    match signers {
        Some(signers) => image.check_signed_by(signers).await,
        None => Ok(Ok(())),
    }
}

/// Returns the layer of an output of the image, and its file name.
fn output_layer<'a>(
    manifest: &'a ImageManifest,
    image: &Digest,
    output: HostOutput,
) -> Option<(&'a Descriptor, &'a str)> {
    let kind = output.media_type();
    let name = manifest.annotations.get(annotations::TITLE)?;
    let is_name = |c: char| c.is_ascii_alphanumeric() || "+.~_-".contains(c);
    let [layer] = &manifest.layers[..] else { return None };
    let is_output_of_image = manifest.subject.as_ref().is_some_and(|subject| subject.digest == *image)
        && manifest.artifact_type.as_deref() == Some(kind)
        && layer.media_type == kind;
    (is_output_of_image && name.chars().all(is_name) && name.starts_with(|c: char| c.is_ascii_alphanumeric()))
        .then_some((layer, name.as_str()))
}
