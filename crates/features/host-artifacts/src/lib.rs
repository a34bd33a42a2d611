//! Makes packages for hosts from published images, publishes them beside the images, and fetches them, for `outputs` of
//! definitions and `farrier pull`.
#![forbid(unsafe_code)]

mod deb;
mod documents;
mod entries;
mod find;
mod initramfs;
mod payload;
mod pull;
mod store;
mod sysext;
#[cfg(test)]
mod testing;

pub use find::{ImageTarget, find_image};
pub use pull::{Pulled, Requested, pull};
pub use store::store;

use std::sync::Arc;

use farrier_builder::{
    images::StoredImage,
    services::{BuildServices, MadeOutput, OutputMaker, Result},
};
use farrier_core::{
    facts::annotations,
    image::{Digest, HostOutput, Repository},
};
use farrier_local::blocking::blocking;
use oci::Artifact;

use documents::documents;
use payload::{host_payload, unmet};

/// Makes outputs of every kind.
pub struct HostArtifacts;

#[async_trait::async_trait]
impl OutputMaker for HostArtifacts {
    async fn make(
        &self,
        services: &BuildServices,
        repository: &Repository,
        image: &Digest,
        output: HostOutput,
    ) -> Result<MadeOutput> {
        let image = StoredImage { services, repository, digest: image };
        let (manifest, payload) = host_payload(image).await?;
        let payload = Arc::new(payload);
        let shared = Arc::clone(&payload);
        let (name, content) = match output {
            HostOutput::Deb => blocking(move || deb::write(&shared)).await?,
            HostOutput::DebMeta => deb::write_meta(&payload)?.ok_or_else(|| {
                let hint = "ask for `deb` instead, or give an image for a kernel of Debian";
                unmet(image, "is for a kernel whose package or meta package is unknown", hint)
            })?,
            HostOutput::Initramfs => blocking(move || initramfs::write(&shared)).await?,
            HostOutput::Sysext => sysext::write(&services.tools, shared).await?,
        };
        let release = payload.release.as_str();
        let notes = [(annotations::KERNEL_RELEASE, release), (annotations::TITLE, name.as_str())];
        let artifact = Artifact::about(&manifest, output.media_type(), content, &notes)?;
        let documents = documents(services, payload, output, &artifact).await?;
        Ok(MadeOutput { artifact, documents })
    }
}
