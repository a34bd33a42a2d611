//! A directory of manifests (`dir:PATH`), read as a cluster and edited in place.
//!
//! An edit changes only the bytes of the image value. In a live cluster farrier records the replaced value in an annotation.
//! Here it writes no record, because version control provides the directory's history.

use std::{
    collections::BTreeSet,
    fs::Metadata,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, fchown},
    path::{Path, PathBuf},
};

use farrier_core::plan::{Candidates, Change, ClusterSnapshot, Container, ImageChange};
use farrier_local::blocking::blocking;
use farrier_yaml::Scalar;
use fs_err::{self as fs, File};
use walkdir::WalkDir;

use super::{
    edit,
    error::ClusterError,
    manifest::{self, DaemonSet, Manifest},
    source::Cluster,
};

// Limits on the input: large enough for any real fleet, and small enough to fit into memory.
const MAX_FILE_BYTES: u64 = 32 << 20;
const MAX_TOTAL_BYTES: u64 = 256 << 20;
const MAX_FILES: usize = 50_000;

/// A directory of manifests, or a single file.
///
/// All `*.yaml`, `*.yml` and `*.json` files below the directory are read. Skipped are hidden files and directories, and symbolic
/// links that lead outside the directory.
#[derive(Clone, Debug)]
pub struct Directory {
    root: PathBuf,
}

impl Directory {
    /// Opens an existing directory or file.
    pub fn open(path: &Path) -> Result<Self, ClusterError> {
        let root = std::fs::canonicalize(path).map_err(|source| {
            let message = format!("read the manifests of --cluster dir:{}: {source}", path.display());
            io::Error::new(source.kind(), message)
        })?;
        Ok(Self { root })
    }

    /// Reads every manifest. Blocks the thread.
    ///
    /// A file that is not YAML is an error. If farrier skipped the file, a rewrite could break a node that the file defines.
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
        let ManifestFile { path, text, daemon_set } = self.find_daemon_set(change)?;
        let Some((container, image)) = sole_container(&daemon_set, &change.container) else {
            return Err(refused(change, "the DaemonSet does not have exactly one such container"));
        };
        if container.image == change.to {
            return Ok(());
        }
        if let Some(reason) = &container.fixed {
            return Err(refused(change, reason));
        }
        if container.image != change.expected {
            return Err(conflict(change, &container.image));
        }
        let scalar = image.ok_or_else(|| refused(change, "the container has no image field"))?;
        let edited = edit::replace(&text, scalar, &change.to).map_err(|reason| refused(change, reason))?;
        replace_file(&path, &text, &edited, || conflict(change, "a file that another program is writing"))
    }

    /// Returns the only manifest that defines the changed DaemonSet.
    fn find_daemon_set(&self, change: &ImageChange) -> Result<ManifestFile, ClusterError> {
        let mut found = Vec::new();
        for path in self.files()? {
            let text = read_text(&path)?;
            let Manifest { nodes: _, daemon_sets } = parse(&path, &text)?;
            for daemon_set in daemon_sets {
                let facts = &daemon_set.facts;
                if facts.namespace == change.namespace && facts.name == change.daemon_set {
                    found.push(ManifestFile { path: path.clone(), text: text.clone(), daemon_set });
                }
            }
        }
        match (found.pop(), found.len()) {
            (Some(manifest), 0) => Ok(manifest),
            (last, others) => {
                let count = others + usize::from(last.is_some());
                Err(refused(change, format!("found {count} DaemonSets with this name")))
            }
        }
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
        if files.len() > MAX_FILES {
            return too_large(format!("more than {MAX_FILES} files"));
        }
        let mut total = 0;
        for path in &files {
            total += fs::metadata(path)?.len();
        }
        if total > MAX_TOTAL_BYTES {
            return too_large(format!("{total} bytes in total, more than {MAX_TOTAL_BYTES}"));
        }
        Ok(files)
    }
}

/// A file, its text, and a DaemonSet in the text.
struct ManifestFile {
    path: PathBuf,
    text: String,
    daemon_set: DaemonSet,
}

/// Returns the container with this name and its image scalar. Returns `None` if no container, or more than one, has the name.
fn sole_container<'d>(daemon_set: &'d DaemonSet, name: &str) -> Option<(&'d Container, Option<&'d Scalar>)> {
    let containers = daemon_set.facts.containers.iter().zip(&daemon_set.images);
    let mut matching = containers.filter(|(container, _)| container.name == name);
    match (matching.next(), matching.next()) {
        (Some((container, image)), None) => Some((container, image.as_ref())),
        _ => None,
    }
}

fn refused(change: &ImageChange, reason: impl Into<String>) -> ClusterError {
    ClusterError::Refused { object: object_name(change), reason: reason.into() }
}

fn conflict(change: &ImageChange, found: &str) -> ClusterError {
    ClusterError::Conflict {
        object: object_name(change),
        expected: change.expected.clone(),
        found: found.to_owned(),
    }
}

#[async_trait::async_trait]
impl Cluster for Directory {
    fn describe(&self) -> String {
        format!("manifests in {}", self.root.display())
    }

    async fn snapshot(&self) -> Result<ClusterSnapshot, ClusterError> {
        let directory = self.clone();
        blocking(move || directory.read()).await
    }

    /// Searches the text of the manifests, whatever their kinds.
    async fn mentions(&self, images: &Candidates) -> Result<BTreeSet<String>, ClusterError> {
        let (directory, images) = (self.clone(), images.clone());
        blocking(move || {
            let mut mentioned = BTreeSet::new();
            for path in directory.files()? {
                images.mentioned_in(&read_text(&path)?, &mut mentioned);
            }
            Ok(mentioned)
        })
        .await
    }

    async fn manifests(&self) -> Result<Vec<String>, ClusterError> {
        let directory = self.clone();
        blocking(move || directory.files()?.iter().map(|path| read_text(path)).collect()).await
    }

    async fn apply(&self, change: &Change) -> Result<(), ClusterError> {
        let Change::DaemonSet(change) = change else {
            return Err(ClusterError::Refused {
                object: change.object(),
                reason: "only image fields can be set in a directory of manifests".to_owned(),
            });
        };
        for change in change.image_changes() {
            let directory = self.clone();
            blocking(move || directory.set_image(&change)).await?;
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
    // Check the number of bytes read and not the file's size, because the file may grow in between.
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let reason = format!("more than {MAX_FILE_BYTES} bytes");
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

/// Writes a temporary file in the same directory and renames it, so that readers see either the old text or the new one. Keeps
/// mode and owner. Returns the error of `changed` if the file no longer contains `before`.
fn replace_file(
    path: &Path,
    before: &str,
    after: &str,
    changed: impl FnOnce() -> ClusterError,
) -> Result<(), ClusterError> {
    let parent = path.parent().unwrap_or(Path::new("."));
    let metadata = fs::metadata(path)?;
    let (file, temporary_path) =
        tempfile::Builder::new().prefix(".farrier-").tempfile_in(parent)?.into_parts();
    let mut file = File::from_parts(file, temporary_path.to_path_buf());
    file.write_all(after.as_bytes())?;
    keep_owner_and_mode(&file, &metadata)?;
    file.sync_all()?;
    if read_text(path)? != before {
        return Err(changed());
    }
    temporary_path.persist(path).map_err(|failed| {
        io::Error::new(failed.error.kind(), format!("replace {}: {}", path.display(), failed.error))
    })?;
    // Syncing the directory makes the rename durable.
    Ok(File::open(parent)?.sync_all()?)
}

fn keep_owner_and_mode(file: &File, metadata: &Metadata) -> io::Result<()> {
    let own = file.metadata()?;
    if (own.uid(), own.gid()) != (metadata.uid(), metadata.gid()) {
        // Only root can change the owner. For other users the new file belongs to its writer, as after an edit in any editor.
        match fchown(file, Some(metadata.uid()), Some(metadata.gid())) {
            Err(error) if error.kind() != io::ErrorKind::PermissionDenied => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    file.set_permissions(metadata.permissions())
}
