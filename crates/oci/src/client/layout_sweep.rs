//! Deletes manifests from a layout directory: first the index entry, then the blobs that nothing references.

use std::{
    collections::BTreeSet,
    io::ErrorKind,
    path::Path,
    time::{Duration, SystemTime},
};

use fs_err as fs;

use super::{
    error::Result,
    layout::{LayoutRegistry, belongs_to, read_bounded},
    registry::Registry as _,
};
use crate::{AnyManifest, Digest, Repository, error_chain};

/// Age after which an unreferenced blob counts as a leftover of a killed process. A younger blob may belong to an image that is
/// being pushed.
const LEFTOVER_AGE: Duration = Duration::from_hours(24);

impl LayoutRegistry {
    /// Removes a manifest from the index, under all its names in the repository. Returns `false` if the index does not contain it.
    pub(super) fn delete(&self, repository: &Repository, digest: &Digest) -> Result<bool> {
        if !self.root.join("index.json").exists() {
            return Ok(false);
        }
        let _lock = self.lock()?;
        let mut index = self.index()?;
        let previous_count = index.manifests.len();
        index
            .manifests
            .retain(|descriptor| descriptor.digest != *digest || !belongs_to(descriptor, repository));
        if index.manifests.len() == previous_count {
            return Ok(false);
        }
        self.write_index(&index, &format!("delete {repository}@{digest}"))?;
        let remaining = index.manifests.into_iter().map(|descriptor| descriptor.digest).collect();
        match (self.blobs_of(remaining), self.blobs_of(vec![digest.clone()])) {
            (Ok(referenced), Ok(deleted)) => self.sweep(&referenced, &deleted)?,
            // The manifest may reference any blob.
            (Err(error), _) | (_, Err(error)) => tracing::warn!(
                "deleted {repository}@{digest} from {}, but none of its blobs: {}",
                self.describe(),
                error_chain(&error)
            ),
        }
        Ok(true)
    }

    /// Returns the digests of manifests and of everything that they reference. A missing manifest references nothing.
    fn blobs_of(&self, mut manifests: Vec<Digest>) -> Result<BTreeSet<Digest>> {
        let (mut visited, mut blobs) = (BTreeSet::new(), BTreeSet::new());
        while let Some(digest) = manifests.pop() {
            if !visited.insert(digest.clone()) {
                continue;
            }
            let bytes = match read_bounded(&self.blob(&digest)) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                bytes => bytes?,
            };
            let manifest = AnyManifest::parse(&bytes)
                .map_err(|error| self.protocol(&format!("read manifest {digest}"), error_chain(&error)))?;
            blobs.extend(manifest.blobs().map(|blob| blob.digest.clone()));
            manifests.extend(manifest.children().iter().map(|child| child.digest.clone()));
        }
        blobs.append(&mut visited);
        Ok(blobs)
    }

    /// Deletes blobs that only the deleted manifest referenced, and leftovers of killed processes.
    fn sweep(&self, referenced: &BTreeSet<Digest>, deleted: &BTreeSet<Digest>) -> Result<()> {
        for entry in fs::read_dir(self.root.join("blobs/sha256"))? {
            let entry = entry?;
            let name = entry.file_name();
            let Ok(digest) = format!("sha256:{}", name.to_string_lossy()).parse::<Digest>() else { continue };
            if referenced.contains(&digest) {
                continue;
            }
            if deleted.contains(&digest) || is_leftover(&entry.path()) {
                match fs::remove_file(entry.path()) {
                    Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

fn is_leftover(path: &Path) -> bool {
    let written = fs::metadata(path).and_then(|metadata| metadata.modified());
    written.is_ok_and(|time| SystemTime::now().duration_since(time).is_ok_and(|age| age > LEFTOVER_AGE))
}
