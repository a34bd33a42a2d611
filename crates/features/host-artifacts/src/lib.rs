//! Makes packages for hosts from published images, publishes them beside the images, and fetches them, for `outputs` of
//! definitions and `farrier pull`.
#![forbid(unsafe_code)]

mod deb;
mod entries;
mod find;
mod initramfs;
mod payload;
mod pull;
mod store;
mod sysext;
#[cfg(test)]
mod testing;

pub use find::find_image;
pub use pull::{Pulled, pull};
pub use store::store;

use farrier_builder::{
    images::StoredImage,
    services::{BuildServices, OutputMaker, Result},
};
use farrier_core::{
    facts::annotations,
    image::{Digest, HostOutput, Repository},
};
use farrier_local::blocking::blocking;
use oci::Artifact;

use payload::host_payload;

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
    ) -> Result<Artifact> {
        let (manifest, payload) = host_payload(StoredImage { services, repository, digest: image }).await?;
        let release = payload.release.clone();
        let (name, content) = match output {
            HostOutput::Deb => blocking(move || deb::write(&payload)).await?,
            HostOutput::Initramfs => blocking(move || initramfs::write(&payload)).await?,
            HostOutput::Sysext => sysext::write(&services.tools, payload).await?,
        };
        let notes = [(annotations::KERNEL_RELEASE, release.as_str()), (annotations::TITLE, name.as_str())];
        Ok(Artifact::about(&manifest, output.media_type(), content, &notes)?)
    }
}
