//! Adapter: root file systems from packages, each one gzip-compressed layer: toolchains and runtime bases.

pub mod bootstrap;
mod minimal;

use super::{
    FetchError, Fetcher,
    root_fs_layer::RootFs,
    stored::{Input, Packed, StoredUnder},
};
use crate::{
    image::Tag,
    oci::{Layer, annotations, media_type},
    store::{InputKind, key_tag},
};

/// Root file systems, made with mmdebstrap or from one package.
#[derive(Clone, Copy)]
pub struct RootFileSystems<'a>(pub(super) &'a Fetcher);

impl RootFileSystems<'_> {
    /// Puts one into the store, unless it is there. `root_fs` gives it with its packages, for people.
    async fn keep(
        self,
        what: String,
        key: &str,
        declared: Option<Tag>,
        root_fs: impl Future<Output = Result<(RootFs, String), FetchError>>,
    ) -> Result<StoredUnder, FetchError> {
        let input = Input { kind: InputKind::RootFs, what: what.clone(), tag: key_tag(key)?, declared };
        let content = async {
            let (RootFs { layer: file, digest, diff_id, size, arch }, packages) = root_fs.await?;
            let notes = [
                (annotations::TITLE, Some(what)),
                (annotations::IDENTITY, Some(key.to_owned())),
                (annotations::DIFF_ID, Some(diff_id.to_string())),
                (annotations::ARCHITECTURE, Some(arch.to_string())),
                (annotations::PACKAGES, Some(packages)),
            ];
            let layer = Layer { digest, diff_id, size, media_type: media_type::OCI_LAYER_GZIP };
            Ok(Packed::in_cache(file, layer).with_notes(notes))
        };
        self.0.keep(input, content).await
    }
}
