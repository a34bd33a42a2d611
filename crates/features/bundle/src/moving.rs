//! Registries with immutable tags. An import moves only a few tags, and checks that the registry allows this before it
//! changes content in use.

use std::collections::BTreeSet;

use farrier_core::image::{Repository, Tag, Version};
use farrier_store::{is_moving_tag, registry::RegistryError};
use oci::subject_of_tag;

use super::{
    BundleError, Result, Target,
    import::{ImportOutcome, Imported},
};

/// Tags that imports, `farrier mirror` and `farrier run` move, in the syntax of immutability rules.
pub(super) const MOVING: &str = "`sha256-*` in all repositories, `declared-*` in sources and rootfs, `latest` in \
    definitions, all but `digest-*` in mirror/**, `last-seen` and `build-times` in kernels";

impl Target {
    /// Writes one tag of each repository that the import will move again, with its present content. Registries with
    /// immutable tags also refuse this write. Tags with signatures are skipped: a concurrent signer writes them.
    pub(super) async fn check_moving_tags(&self, contents: &[Imported]) -> Result<()> {
        let mut tried = BTreeSet::new();
        for Imported { content, outcome } in contents {
            let (ImportOutcome::Moved { .. }, Some(tag)) = (outcome, &content.tag) else { continue };
            if !content.has_moving_tag() || !tried.insert(&content.repository) {
                continue;
            }
            let (repository, version) = (self.repository(&content.repository)?, Version::Tag(tag.clone()));
            let Some(old) = self.registry.manifest(&repository, &version).await? else { continue };
            let written = self.registry.push_manifest(&repository, &version, &old.media_type, &old.bytes);
            if let Err(error) = written.await {
                return Err(self.explain_refusal(&repository, error.into()).await);
            }
        }
        Ok(())
    }

    /// Names the tags to exempt if the registry refused to move an existing tag, and returns other errors as they are.
    pub(super) async fn explain_refusal(&self, repository: &Repository, error: BundleError) -> BundleError {
        let BundleError::Registry(
            RegistryError::Denied { action, .. } | RegistryError::Protocol { action, .. },
        ) = &error
        else {
            return error;
        };
        let name = self.location.name_of(repository).unwrap_or_default();
        let is_moving = |tag: &Tag| is_moving_tag(name, tag) || subject_of_tag(tag).is_some();
        let tag = action.rsplit_once(':').and_then(|(_, tag)| tag.parse::<Tag>().ok()).filter(is_moving);
        let Some(tag) = tag.filter(|_| action.starts_with("push manifest to ")) else { return error };
        match (self.registry.manifest(repository, &Version::Tag(tag.clone())).await, error) {
            (Ok(Some(_)), BundleError::Registry(source)) => {
                BundleError::Immutable(format!("{repository}:{tag}"), source)
            }
            (_, error) => error,
        }
    }
}
