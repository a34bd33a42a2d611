//! Toolchains and runtime bases, made from packages as root file systems of one gzip-compressed layer each.

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

use farrier_core::{
    facts::annotations,
    image::{Digest, Tag},
    kernel::Architecture,
};
use farrier_local::{
    archive::{self, Options},
    blocking::stoppable,
};
use farrier_store::{InputKind, StoredInput, key_tag};
use fs_err as fs;

use super::{
    FetchError, Fetcher, Result, TREE, digest,
    root_fs_layer::{self as layer, RootFs},
    stored::{Input, Packed, StoredUnder},
};

/// Modification time of every newer file. Any fixed time works; this one is a day after the oldest supported toolchain.
const MTIME: u64 = 1_700_000_000;

/// Compression level: less than 1% larger than level 6 in half the time. Compression must keep up with packing.
const LEVEL: u32 = 4;

/// Access to root file systems made from packages.
#[derive(Clone, Copy)]
pub struct RootFileSystems<'a>(pub(super) &'a Fetcher);

/// Format version; change it when the same layers give another tree.
const TREE_FORMAT: &str = "root-1";
/// Kind of the cache entries.
const TREES: &str = "trees";

impl RootFileSystems<'_> {
    /// Returns a root file system as a tree that a sandbox can use as the lower directory of an overlay. Takes layer files,
    /// lowest first, with their digests, which are verified again. The tree is unpacked once per content, belongs to the user who
    /// runs farrier, and is never written to. `what` names the root file system in errors.
    pub async fn tree(self, layers: Vec<(Digest, PathBuf)>, what: String) -> Result<PathBuf> {
        let digests = layers.iter().map(|(digest, _)| digest.as_str());
        let key = digest::of_parts(std::iter::once(TREE_FORMAT).chain(digests));
        let make = |dir: PathBuf| {
            stoppable(move |stop| {
                let tree = dir.join(TREE);
                fs::create_dir(&tree)?;
                // A root directory is open to all users, whatever umask this process has.
                fs::set_permissions(&tree, Permissions::from_mode(0o755))?;
                layers.iter().try_for_each(|(digest, file)| verify(digest, file, stop))?;
                let layers: Vec<PathBuf> = layers.into_iter().map(|(_, file)| file).collect();
                archive::unpack_image(&layers, &tree, &Options { stop, ..Options::default() })
                    .map_err(|source| FetchError::Unpack(what, source))
            })
        };
        Ok(self.0.cache.get_or_make(TREES, &key, make).await?.join(TREE))
    }

    /// Returns the root file system that this machine built, if the cache still has it. Root file systems from the store have
    /// separate entries.
    pub fn built_locally(self, key: &str) -> Result<Option<RootFs>> {
        for kind in [packages::KIND, minimal::KIND] {
            if let Some(entry) = self.0.cache.get(kind, key)?.filter(|entry| layer::is_intact(entry)) {
                return layer::read(&entry).map(Some);
            }
        }
        Ok(None)
    }

    /// Returns the stored root file system of a key.
    pub async fn in_store(self, key: &str) -> Result<Option<StoredInput>> {
        self.0.stored(InputKind::RootFs, &key_tag(key)?).await
    }

    /// Puts a root file system into the store, unless the store already has it. `root_fs` returns the root file system, and the names
    /// of its packages for an annotation.
    async fn keep(
        self,
        what: String,
        key: &str,
        arch: Architecture,
        declared: Option<Tag>,
        root_fs: impl Future<Output = Result<(RootFs, String)>>,
    ) -> Result<StoredUnder> {
        let input = Input { kind: InputKind::RootFs, what: what.clone(), tag: key_tag(key)?, declared };
        let content = async {
            let (RootFs { file, layer }, packages) = root_fs.await?;
            let annotation_values = [
                (annotations::TITLE, Some(what)),
                (annotations::IDENTITY, Some(key.to_owned())),
                (annotations::DIFF_ID, Some(layer.diff_id.to_string())),
                (annotations::ARCHITECTURE, Some(arch.to_string())),
                (annotations::PACKAGES, Some(packages)),
            ];
            Ok(Packed::in_cache(file, layer).with_annotations(annotation_values))
        };
        self.0.keep(input, content).await
    }
}

/// Verifies a layer file before unpacking, because the file may be old, and a build step that escaped its sandbox could have modified
/// the cache.
fn verify(digest: &Digest, file: &Path, stop: &AtomicBool) -> Result<()> {
    if digest::of_file(file, stop)? == digest.hex() {
        return Ok(());
    }
    let message = format!(
        "cannot unpack {}: its content does not match {digest}: the cache was modified",
        file.display()
    );
    let hint = "find out what modified the cache directory, and delete that directory: farrier fetches its \
        content again";
    Err(FetchError::unusable(message, hint))
}
