//! Adapter: root file systems from packages, each one gzip-compressed layer: toolchains and runtime bases.

mod assemble;
mod bootstrap;
mod effects;
mod excluded;
mod minimal;
mod packages;
mod runfile;

pub use packages::{PackageRoot, RpmRoot};

use std::{
    fs::Permissions,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    sync::atomic::AtomicBool,
};

use fs_err as fs;

use super::{
    FetchError, Fetcher, Result, TREE, digest,
    root_fs_layer::{self as layer, RootFs},
    stored::{Input, Packed, StoredUnder},
};
use crate::{
    archive::{self, Options},
    blocking::stoppable,
    image::{Digest, Tag},
    kernel::Architecture,
    oci::{Layer, annotations, media_type},
    store::{InputKind, StoredInput, key_tag},
};

/// Time of every file that is newer. A day after the oldest supported toolchain, and any fixed one does.
const MTIME: u64 = 1_700_000_000;

/// Tenths of a percent larger than level 6 for half the time; it must keep up with what it packs.
const LEVEL: u32 = 4;

/// Root file systems, made from packages.
#[derive(Clone, Copy)]
pub struct RootFileSystems<'a>(pub(super) &'a Fetcher);

/// Changes when the same layers give another tree.
const TREE_FORMAT: &str = "root-1";
/// The kind of the cache's entries.
const TREES: &str = "trees";

impl RootFileSystems<'_> {
    /// A root file system as a tree that a sandbox can have below its own files: layers in files, the lowest first, each with
    /// its digest, which is verified once more. It is unpacked once for each content, belongs to the user who runs farrier, and is
    /// never written to; `what` names it in errors.
    pub async fn tree(self, layers: Vec<(Digest, PathBuf)>, what: String) -> Result<PathBuf> {
        let digests = layers.iter().map(|(digest, _)| digest.as_str());
        let key = digest::of_parts(std::iter::once(TREE_FORMAT).chain(digests));
        let make = |dir: PathBuf| {
            stoppable(move |stop| {
                let tree = dir.join(TREE);
                fs::create_dir(&tree)?;
                // Whatever this process keeps from others by default, a root directory is open.
                fs::set_permissions(&tree, Permissions::from_mode(0o755))?;
                layers.iter().try_for_each(|(digest, file)| verify(digest, file, stop))?;
                let layers: Vec<PathBuf> = layers.into_iter().map(|(_, file)| file).collect();
                archive::unpack_image(&layers, &tree, &Options { stop, ..Options::default() })
                    .map_err(|source| FetchError::Unpack(what, source))
            })
        };
        Ok(self.0.cache.get_or_make(TREES, &key, make).await?.join(TREE))
    }

    /// The one that was made on this machine, if it is still in the cache. One that came from the store is another one.
    pub fn made_here(self, key: &str, arch: Architecture) -> Result<Option<RootFs>> {
        for kind in [packages::PLACE, minimal::PLACE] {
            if let Some(place) = self.0.cache.get(kind, key)? {
                return layer::read(&place, arch).map(Some);
            }
        }
        Ok(None)
    }

    /// The one that the store has to build with, by its key.
    pub async fn in_store(self, key: &str) -> Result<Option<StoredInput>> {
        self.0.stored(InputKind::RootFs, &key_tag(key)?).await
    }

    /// Puts one into the store, unless it is there. `root_fs` gives it with its packages, for people.
    async fn keep(
        self,
        what: String,
        key: &str,
        declared: Option<Tag>,
        root_fs: impl Future<Output = Result<(RootFs, String)>>,
    ) -> Result<StoredUnder> {
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

/// A layer waits in the cache until its tree is made, perhaps anew because a step of a build changed the tree.
fn verify(digest: &Digest, file: &Path, stop: &AtomicBool) -> Result<()> {
    if digest::of_file(file, stop)? == digest.hex() {
        return Ok(());
    }
    let message =
        format!("unpack {}: its content is not {digest}: something wrote to the cache", file.display());
    let hint = "find out what wrote to the cache directory, and delete that directory: farrier fetches its content again";
    Err(FetchError::unusable(message, hint))
}
