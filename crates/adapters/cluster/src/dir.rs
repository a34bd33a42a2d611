//! A directory of manifests (`dir:PATH`), read as a cluster and edited in place.
//!
//! An edit changes only the bytes of the image value. farrier therefore writes no record of the replaced value here, unlike the
//! annotations in a live cluster: version control provides the directory's history.

use std::{
    collections::BTreeSet,
    fs::Metadata,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, fchown},
    path::{Path, PathBuf},
};

use farrier_core::plan::{Candidates, Change, ClusterSnapshot, ImageChange};
use farrier_local::blocking::blocking;
use fs_err::{self as fs, File};
use walkdir::WalkDir;

use super::{
    edit,
    error::ClusterError,
    manifest::{self, DaemonSet, Manifest},
    source::Cluster,
};

/// Limits on the input: generous for a real fleet, and small enough for memory.
const FILE_BYTES: u64 = 32 << 20;
const TOTAL_BYTES: u64 = 256 << 20;
const FILES: usize = 50_000;

/// A directory of manifests, or a single file.
///
/// All `*.yaml`, `*.yml` and `*.json` files below the directory are read. Hidden files and directories are skipped, and so are
/// files outside the directory that a symbolic link points to.
#[derive(Clone, Debug)]
pub struct Directory {
    root: PathBuf,
}

impl Directory {
    /// Opens an existing directory or file.
    pub fn open(path: &Path) -> Result<Self, ClusterError> {
        let root = std::fs::canonicalize(path).map_err(|source| {
            let words = format!("read the manifests of --cluster dir:{}: {source}", path.display());
            io::Error::new(source.kind(), words)
        })?;
        Ok(Self { root })
    }

    /// Reads every manifest. Blocks the thread.
    ///
    /// A file that is not YAML is an error and is not skipped: a rewrite could break a node that farrier did not see.
    pub fn read(&self) -> Result<ClusterSnapshot, ClusterError> {
        let mut snapshot = ClusterSnapshot { read_only_nodes: true, ..ClusterSnapshot::default() };
        for path in self.files()? {
            let Manifest { nodes, daemon_sets } = parse(&path, &read_text(&path)?)?;
            snapshot.nodes.extend(nodes.into_iter().map(Into::into));
            snapshot.daemon_sets.extend(daemon_sets.into_iter().map(|found| found.facts));
        }
        Ok(snapshot)
    }

    /// Sets one container's image. Blocks the thread. The file is replaced atomically.
    pub fn set_image(&self, change: &ImageChange) -> Result<(), ClusterError> {
        let object = object_name(change);
        let refused = |reason: String| ClusterError::Refused { object: object.clone(), reason };
        let mut found: Vec<(PathBuf, String, DaemonSet)> = Vec::new();
        for path in self.files()? {
            let text = read_text(&path)?;
            let Manifest { nodes: _, daemon_sets } = parse(&path, &text)?;
            for daemon_set in daemon_sets {
                let facts = &daemon_set.facts;
                if facts.namespace == change.namespace && facts.name == change.daemon_set {
                    found.push((path.clone(), text.clone(), daemon_set));
                }
            }
        }
        let [(path, text, daemon_set)] = found.as_slice() else {
            return Err(refused(format!("found {} DaemonSets with this name", found.len())));
        };
        let containers = &daemon_set.facts.containers;
        let mut named = containers.iter().zip(&daemon_set.images).filter(|(c, _)| c.name == change.container);
        let (Some((container, image)), None) = (named.next(), named.next()) else {
            return Err(refused("the DaemonSet does not have exactly one such container".to_owned()));
        };
        let to = &change.to;
        if container.image == *to {
            return Ok(());
        }
        if let Some(reason) = &container.fixed {
            return Err(refused(reason.clone()));
        }
        if container.image != change.expected {
            return Err(ClusterError::Conflict {
                object,
                expected: change.expected.clone(),
                found: container.image.clone(),
            });
        }
        let scalar = image.as_ref().ok_or_else(|| refused("the container has no image field".to_owned()))?;
        let edited = edit::replace(text, scalar, to).map_err(refused)?;
        replace_file(path, text, &edited, || ClusterError::Conflict {
            object: object.clone(),
            expected: change.expected.clone(),
            found: "a file that another program is writing".to_owned(),
        })
    }

    /// Returns the manifest files, sorted and without duplicates.
    fn files(&self) -> Result<BTreeSet<PathBuf>, ClusterError> {
        let hidden = |entry: &walkdir::DirEntry| {
            entry.depth() > 0 && entry.file_name().as_encoded_bytes().starts_with(b".")
        };
        let mut files = BTreeSet::new();
        for entry in WalkDir::new(&self.root).into_iter().filter_entry(|entry| !hidden(entry)) {
            let entry = entry.map_err(io::Error::from)?;
            if entry.depth() > 0 && !is_manifest_name(entry.path()) {
                continue;
            }
            let path = if entry.path_is_symlink() {
                // A mounted ConfigMap consists of links to hidden files in the same directory.
                let target = fs::canonicalize(entry.path())?;
                if !target.starts_with(&self.root) {
                    tracing::warn!(path = %entry.path().display(), "skipping a symbolic link that leads outside the directory");
                    continue;
                }
                target
            } else {
                entry.into_path()
            };
            if path.is_file() {
                files.insert(path);
            }
        }
        let too_large = |reason: String| Err(ClusterError::TooLarge(self.root.clone(), reason));
        if files.len() > FILES {
            return too_large(format!("more than {FILES} files"));
        }
        let mut total = 0;
        for path in &files {
            total += fs::metadata(path)?.len();
        }
        if total > TOTAL_BYTES {
            return too_large(format!("{total} bytes in total, more than {TOTAL_BYTES}"));
        }
        Ok(files)
    }
}

#[async_trait::async_trait]
impl Cluster for Directory {
    fn describe(&self) -> String {
        format!("manifests in {}", self.root.display())
    }

    async fn snapshot(&self) -> Result<ClusterSnapshot, ClusterError> {
        let this = self.clone();
        blocking(move || this.read()).await
    }

    /// Searches the text of the manifests, whatever their kinds.
    async fn mentions(&self, images: &Candidates) -> Result<BTreeSet<String>, ClusterError> {
        let (this, images) = (self.clone(), images.clone());
        blocking(move || {
            let mut mentioned = BTreeSet::new();
            for path in this.files()? {
                images.mentioned_in(&read_text(&path)?, &mut mentioned);
            }
            Ok(mentioned)
        })
        .await
    }

    async fn manifests(&self) -> Result<Vec<String>, ClusterError> {
        let this = self.clone();
        blocking(move || this.files()?.iter().map(|path| read_text(path)).collect()).await
    }

    async fn apply(&self, change: &Change) -> Result<(), ClusterError> {
        let Change::DaemonSet(change) = change else {
            return Err(ClusterError::Refused {
                object: change.object(),
                reason: "only image fields can be set in a directory of manifests".to_owned(),
            });
        };
        for change in change.image_changes() {
            let this = self.clone();
            blocking(move || this.set_image(&change)).await?;
        }
        Ok(())
    }
}

fn is_manifest_name(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ["yaml", "yml", "json"].iter().any(|known| ending == *known))
}

fn object_name(change: &ImageChange) -> String {
    let ImageChange { namespace, daemon_set, container, expected: _, to: _ } = change;
    format!("DaemonSet {namespace}/{daemon_set}, container {container}")
}

fn parse(path: &Path, text: &str) -> Result<Manifest, ClusterError> {
    manifest::read(text).map_err(|error| ClusterError::Manifest {
        path: path.to_path_buf(),
        line: error.at.line,
        column: error.at.column,
        reason: error.message,
    })
}

fn read_text(path: &Path) -> Result<String, ClusterError> {
    let mut bytes = Vec::new();
    // Limit the number of bytes read, because the file may grow after a size check.
    File::open(path)?.take(FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > FILE_BYTES {
        let reason = format!("more than {FILE_BYTES} bytes");
        return Err(ClusterError::TooLarge(path.to_path_buf(), reason));
    }
    String::from_utf8(bytes).map_err(|error| {
        let valid = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
        let last_line = valid.rsplit('\n').next().unwrap_or_default();
        ClusterError::Manifest {
            path: path.to_path_buf(),
            line: 1 + valid.matches('\n').count(),
            column: 1 + last_line.chars().count(),
            reason: "the text is not UTF-8".to_owned(),
        }
    })
}

/// Writes a temporary file in the same directory and renames it, so that readers see either the old text or the new one. Mode and
/// owner are kept. `changed` creates the error for a file that no longer has the content that was edited.
fn replace_file(
    path: &Path,
    before: &str,
    after: &str,
    changed: impl FnOnce() -> ClusterError,
) -> Result<(), ClusterError> {
    let parent = path.parent().unwrap_or(Path::new("."));
    let metadata = fs::metadata(path)?;
    let (file, place) = tempfile::Builder::new().prefix(".farrier-").tempfile_in(parent)?.into_parts();
    let mut file = File::from_parts(file, place.to_path_buf());
    file.write_all(after.as_bytes())?;
    keep_owner_and_mode(&file, &metadata)?;
    file.sync_all()?;
    if read_text(path)? != before {
        return Err(changed());
    }
    place.persist(path).map_err(|failed| {
        io::Error::new(failed.error.kind(), format!("replace {}: {}", path.display(), failed.error))
    })?;
    // The rename is durable after the directory is synced.
    Ok(File::open(parent)?.sync_all()?)
}

fn keep_owner_and_mode(file: &File, metadata: &Metadata) -> io::Result<()> {
    let own = file.metadata()?;
    if (own.uid(), own.gid()) != (metadata.uid(), metadata.gid()) {
        // Only root can change the owner. Without root, the file belongs to the current user, as after an edit in any editor.
        match fchown(file, Some(metadata.uid()), Some(metadata.gid())) {
            Err(error) if error.kind() != io::ErrorKind::PermissionDenied => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    file.set_permissions(metadata.permissions())
}
