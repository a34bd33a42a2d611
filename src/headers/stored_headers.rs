//! Adapter: puts header sets of a family's own source into the store, from the cache. What finds them there is
//! [`super::brought`].

use std::path::Path;

use super::{
    FetchError, Fetcher, HeaderLookup, HeaderSet,
    brought::Brought,
    import::{annotations_of, title_of},
    stored::{Keep, Kept},
};
use crate::{
    kernel::{HeaderSource, KernelTarget},
    oci::Descriptor,
    store::{self, Kind},
};

/// A header set was put into the store, or there is none to put.
#[derive(Clone, Debug)]
pub enum KeptHeaders {
    /// The store has it.
    Kept(Box<Kept>),
    /// No source has it.
    Missing {
        /// What was looked for.
        looked_for: String,
        /// What to do.
        hint: String,
    },
}

impl Fetcher {
    /// Puts the header set of a kernel into the store, unless one of its release is there; relative paths start at
    /// `root`. One that came from packages has no identity beyond its release.
    pub async fn keep_headers(
        &self,
        source: &HeaderSource,
        root: &Path,
        target: &KernelTarget,
    ) -> Result<KeptHeaders, FetchError> {
        let KernelTarget { os: _, os_version: _, release, arch } = target;
        let tag = store::header_tag(release, *arch)?;
        let what = title_of(release.as_str(), *arch);
        if let Some(kept) = self.kept_already(Kind::Headers, &what, &tag, None).await? {
            return Ok(KeptHeaders::Kept(Box::new(kept)));
        }
        let HeaderSet { root: tree, facts, compiler, origin, identity: _ } =
            match self.header_set(source, root, target).await? {
                HeaderLookup::Found(found) => *found,
                HeaderLookup::Missing { looked_for, hint } => {
                    return Ok(KeptHeaders::Missing { looked_for, hint });
                }
            };
        let (file, layer, _scratch) = self.pack(tree).await?;
        let set = Brought {
            release: release.to_string(),
            arch: *arch,
            content: layer.diff_id.to_string(),
            identity: self.header_identity(source, root, target).await?,
            origin,
        };
        let notes = annotations_of(&set, &facts, compiler);
        let layer = Descriptor::new(layer.media_type, layer.digest, layer.size);
        let keep = Keep { kind: Kind::Headers, what, tag, declared: None, file: &file, layer, notes };
        Ok(KeptHeaders::Kept(Box::new(self.keep(keep).await?)))
    }
}
