//! A directory of manifests (`dir:PATH`), read as a cluster and edited in place.
//!
//! An edit changes only the bytes of the image value. In a live cluster farrier records the replaced value in an annotation.
//! Here it writes no record, because version control provides the directory's history.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    ffi::OsStr,
    fmt::Display,
    fs::Metadata,
    io::{self, Read, Write},
    os::unix::fs::{MetadataExt, fchown},
    path::{Path, PathBuf},
    rc::Rc,
};

use farrier_core::{
    image::{ChartImage, ChartValue},
    plan::{
        Candidates, Change, ClusterSnapshot, Container, DaemonSetFacts, ImageChange, NodeAffinity, Placement,
        ResourceChange,
    },
};
use farrier_local::blocking::blocking;
use farrier_yaml::{Node, Position, YamlError, documents};
use fs_err::{self as fs, File};
use walkdir::WalkDir;

use super::{
    edit,
    error::ClusterError,
    image_field::{ImageField, ImageValue, SourceFile, SplitImage, values_at},
    kustomize::{Kustomizations, MAX_REFERENCES, is_kustomization},
    manifest::{self, DaemonSet, Manifest, Resource, Targets, why_not_editable},
    source::Cluster,
};

// Limits on the input: large enough for any real fleet, and small enough to fit into memory.
const MAX_FILE_BYTES: u64 = 32 << 20;
const MAX_TOTAL_BYTES: u64 = 256 << 20;
const MAX_FILES: usize = 50_000;

/// Value of [`ClusterError::Conflict`]'s `found` if another program changed the file after farrier read it.
const BEING_WRITTEN: &str = "a file that another program is writing";

/// A directory of manifests, or a single file.
///
/// All `*.yaml`, `*.yml` and `*.json` files below the directory are read. Hidden files and directories are skipped, and so are
/// symbolic links that lead nowhere or outside the directory.
#[derive(Clone, Debug)]
pub struct Directory {
    root: PathBuf,
    /// The directory as the user named it, for messages.
    displayed_path: PathBuf,
    /// Directory above `root`, or `root` itself, whose files a kustomization may name.
    boundary: PathBuf,
    /// Chart value that holds the image. If set, farrier reads only the file with this value.
    chart: Option<ChartImage>,
}

impl Directory {
    /// Opens an existing directory or file. A kustomization in it may name files of the same Git working tree.
    pub fn open(path: &Path) -> Result<Self, ClusterError> {
        let root = canonical(path)?;
        let boundary = root.ancestors().find(|directory| directory.join(".git").exists()).unwrap_or(&root);
        Ok(Self { boundary: boundary.to_path_buf(), root, displayed_path: path.to_owned(), chart: None })
    }

    /// Opens a directory or file in `boundary`. A kustomization in it may name files in `boundary`.
    pub fn within(boundary: &Path, path: &Path) -> Result<Self, ClusterError> {
        let (root, boundary) = (canonical(path)?, canonical(boundary)?);
        if !root.starts_with(&boundary) {
            let (path, boundary) = (path.display(), boundary.display());
            let message =
                format!("cannot read the manifests in {path}: a symbolic link leads outside {boundary}");
            return Err(io::Error::other(message).into());
        }
        Ok(Self { root, displayed_path: path.to_owned(), boundary, chart: None })
    }

    /// Restricts the directory to the image in a chart value, if one is given.
    #[must_use]
    pub fn with_chart(self, chart: Option<&ChartImage>) -> Self {
        Self { chart: chart.cloned(), ..self }
    }

    /// Reads every manifest. Blocks the thread. Files and objects that cannot be read are skipped with a reason.
    ///
    /// A file that defines nodes and cannot be read is an error. If farrier skipped the file, a rewrite could break such a node.
    pub fn read(&self) -> Result<ClusterSnapshot, ClusterError> {
        let (mut snapshot, targets) = self.nodes_and_targets()?;
        snapshot.daemon_sets = targets.daemon_sets.into_iter().map(|daemon_set| daemon_set.facts).collect();
        snapshot.resources = targets.resources.into_iter().map(|resource| resource.facts).collect();
        Ok(snapshot)
    }

    /// Returns a snapshot with the nodes and the reasons for skipped files and objects, and the rollout targets.
    fn nodes_and_targets(&self) -> Result<(ClusterSnapshot, Targets), ClusterError> {
        let mut snapshot = ClusterSnapshot { read_only_nodes: true, ..ClusterSnapshot::default() };
        if let Some(chart) = &self.chart {
            let daemon_sets = vec![self.chart_daemon_set(chart)?];
            return Ok((snapshot, Targets { daemon_sets, ..Targets::default() }));
        }
        let mut files = BTreeMap::new();
        for path in self.files()? {
            let name = path.strip_prefix(&self.root).unwrap_or(&path).display();
            let skip_reason = |error: YamlError| format!("{name}:{}: {}", error.position.line, error.message);
            match read_manifest(&path)? {
                Err(error) => snapshot.skipped.push(skip_reason(error)),
                Ok(mut manifest) => {
                    snapshot.skipped.extend(manifest.skipped.drain(..).map(skip_reason));
                    snapshot.nodes.extend(manifest.nodes.drain(..).map(Into::into));
                    let Targets { daemon_sets, resources } = &manifest.targets;
                    if !daemon_sets.is_empty() || !resources.is_empty() || !manifest.documents.is_empty() {
                        files.insert(path, manifest);
                    }
                }
            }
        }
        let kustomizations = Kustomizations {
            files: &files,
            root: &self.root,
            boundary: &self.boundary,
            read: &|path| read_manifest(path).ok()?.ok(),
            referenced: RefCell::default(),
            references_left: MAX_REFERENCES.into(),
        };
        Ok((snapshot, kustomizations.targets()))
    }

    /// Returns the DaemonSet of a chart, with only the container whose image the chart's values set.
    fn chart_daemon_set(&self, chart: &ChartImage) -> Result<DaemonSet, ClusterError> {
        let ChartImage { value: ChartValue { file, path }, target } = chart;
        let values_file = canonical(&self.root.join(&**file))?;
        if !values_file.starts_with(&self.root) {
            return Err(refused(target, format!("{file} leads outside the directory")));
        }
        let source = Rc::new(SourceFile { text: read_text(&values_file)?, path: values_file });
        let documents = documents(&source.text).map_err(|error| manifest_error(&source.path, error))?;
        let values = values_at(documents, path);
        if values.len() > 1 {
            let reason =
                format!("{file} has {} values at {path}: put each into a separate file", values.len());
            return Err(refused(target, reason));
        }
        let name = target.container.to_string();
        let value = values.first().and_then(|value| read_chart_image(name, value));
        let Some((container, value)) = value else {
            let reason =
                format!("{file} has no image at {path}: neither a text, nor a mapping with `repository`");
            return Err(refused(target, reason));
        };
        let unknown_nodes = "its chart decides, and farrier does not render charts: create the DaemonSet in the cluster first";
        let affinity = NodeAffinity::Unsupported(unknown_nodes.to_owned());
        let facts = DaemonSetFacts {
            namespace: target.namespace.to_string(),
            name: target.daemon_set.to_string(),
            containers: vec![container],
            placement: Placement { affinity, ..Placement::default() },
            owner: None,
            paused: false,
            live: None,
        };
        Ok(DaemonSet { facts, images: vec![ImageField { file: source, value }] })
    }

    /// Sets one container's image. Blocks the thread. The file is replaced atomically.
    pub fn set_image(&self, change: &ImageChange) -> Result<(), ClusterError> {
        let daemon_set = self.find_daemon_set(change)?;
        let Some((container, image)) = sole_container(&daemon_set, &change.container) else {
            return Err(refused(change, "the DaemonSet does not have exactly one such container"));
        };
        if container.image == change.to {
            return Ok(());
        }
        if let Some(reason) = &container.why_not_editable {
            return Err(refused(change, reason));
        }
        if container.image != change.expected {
            return Err(conflict(change, change.expected.clone(), container.image.clone()));
        }
        let edited = image.replaced(&change.to).map_err(|reason| refused(change, reason))?;
        let changed = || conflict(change, change.expected.clone(), BEING_WRITTEN.to_owned());
        replace_file(&image.file.path, &image.file.text, &edited, changed)
    }

    /// Sets the fields of an operator's resource. Blocks the thread. The file is replaced atomically.
    fn set_fields(&self, change: &ResourceChange) -> Result<(), ClusterError> {
        let object = format!("{} {}", change.kind, change.name);
        let (_, Targets { mut resources, .. }) = self.nodes_and_targets()?;
        resources.retain(|Resource { facts, .. }| (facts.kind, &facts.name) == (change.kind, &change.name));
        let [Resource { file, section: Some(section), .. }] = resources.as_slice() else {
            return Err(refused(&object, "the manifests do not have exactly one such resource"));
        };
        let planned = change.kind.driver_path().iter().fold(&change.spec, |value, key| &value[*key]);
        let current = manifest::json(section, true);
        if planned.as_object().is_some_and(|fields| fields.iter().all(|(key, value)| current[key] == *value))
        {
            return Ok(());
        }
        for (key, expected) in change.expected.iter().filter_map(serde_json::Value::as_object).flatten() {
            if current[key] != *expected {
                let [expected, found] = [expected, &current[key]].map(|value| match value.as_str() {
                    Some(text) => format!("{key}: {text}"),
                    None => format!("{key}: {value}"),
                });
                return Err(conflict(&object, expected, found));
            }
        }
        let edited =
            edit::set_values(&file.text, section, planned).map_err(|reason| refused(&object, reason))?;
        let changed = || conflict(&object, "the planned fields".to_owned(), BEING_WRITTEN.to_owned());
        replace_file(&file.path, &file.text, &edited, changed)
    }

    /// Returns the only DaemonSet with the changed name.
    fn find_daemon_set(&self, change: &ImageChange) -> Result<DaemonSet, ClusterError> {
        let (_, Targets { mut daemon_sets, .. }) = self.nodes_and_targets()?;
        daemon_sets.retain(|DaemonSet { facts, .. }| {
            facts.namespace == change.namespace && facts.name == change.daemon_set
        });
        match daemon_sets.len() {
            1 => Ok(daemon_sets.remove(0)),
            count => Err(refused(change, format!("found {count} DaemonSets with this name"))),
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
                // A mounted ConfigMap consists of links to hidden files in the same directory. An update replaces the target
                // between two steps of a lookup, so look again.
                let target = fs::canonicalize(entry.path()).or_else(|_| fs::canonicalize(entry.path()));
                let Some(target) = target.ok().filter(|target| target.starts_with(&self.root)) else {
                    tracing::debug!(path = %entry.path().display(), "skipping a symbolic link that leads nowhere or outside the directory");
                    continue;
                };
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

/// Returns a container with the image that a value of a chart sets; `None` if the value is no image.
fn read_chart_image(name: String, value: &Node) -> Option<(Container, ImageValue)> {
    if let Some(scalar) = value.scalar() {
        let (image, why_not_editable) = (scalar.text.clone(), why_not_editable(Some(value)));
        let container = Container { name, image, why_not_editable, tagged: false };
        return Some((container, ImageValue::Whole(Some(scalar.clone()))));
    }
    let (image, why_not_editable) = SplitImage::read(value)?;
    let container = Container { name, image: image.text(), why_not_editable, tagged: image.has_tag() };
    Some((container, ImageValue::Split(image)))
}

/// Returns the container with this name and its image. Returns `None` if no container, or more than one, has the name.
fn sole_container<'d>(daemon_set: &'d DaemonSet, name: &str) -> Option<(&'d Container, &'d ImageField)> {
    let containers = daemon_set.facts.containers.iter().zip(&daemon_set.images);
    let mut matching = containers.filter(|(container, _)| container.name == name);
    matching.next().filter(|_| matching.next().is_none())
}

fn refused(object: &impl Display, reason: impl Into<String>) -> ClusterError {
    ClusterError::Refused { object: object.to_string(), reason: reason.into() }
}

fn conflict(object: &impl Display, expected: String, found: String) -> ClusterError {
    ClusterError::Conflict { object: object.to_string(), expected, found }
}

#[async_trait::async_trait]
impl Cluster for Directory {
    fn describe(&self) -> String {
        format!("manifests in {}", self.displayed_path.display())
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
                images.mentioned_in(&String::from_utf8_lossy(&read_bytes(&path)?), &mut mentioned);
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
        match change {
            Change::DaemonSet(change) => {
                for change in change.image_changes() {
                    let directory = self.clone();
                    blocking(move || directory.set_image(&change)).await?;
                }
                Ok(())
            }
            Change::Resource(change) => {
                let (directory, change) = (self.clone(), change.clone());
                blocking(move || directory.set_fields(&change)).await
            }
            _ => {
                let reason = "only image fields can be set in a directory of manifests";
                Err(refused(&change.object(), reason))
            }
        }
    }
}

fn is_manifest_name(path: &Path) -> bool {
    let is_known = |ending: &OsStr| ["yaml", "yml", "json"].iter().any(|known| ending == *known);
    path.extension().is_some_and(is_known) || is_kustomization(path)
}

fn canonical(path: &Path) -> Result<PathBuf, ClusterError> {
    std::fs::canonicalize(path).map_err(|source| {
        let message = format!("cannot read the manifests in {}: {source}", path.display());
        io::Error::new(source.kind(), message).into()
    })
}

fn manifest_error(path: &Path, error: YamlError) -> ClusterError {
    let Position { line, column } = error.position;
    ClusterError::Manifest { path: path.to_path_buf(), line, column, reason: error.message }
}

/// Reads a manifest. A mistake in a file that defines nodes is a [`ClusterError`].
fn read_manifest(path: &Path) -> Result<Result<Manifest, YamlError>, ClusterError> {
    let bytes = read_bytes(path)?;
    let defines_nodes = defines_nodes(&bytes);
    match to_text(bytes).and_then(|text| manifest::read(path.to_path_buf(), text)) {
        Err(error) if defines_nodes => Err(manifest_error(path, error)),
        manifest => Ok(manifest),
    }
}

/// Whether the word `kind` is followed by `Node` or `NodeList`. The text need not be valid YAML.
fn defines_nodes(bytes: &[u8]) -> bool {
    let text = String::from_utf8_lossy(bytes);
    let mut words = text.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    let mut previous = "";
    words.any(|word| std::mem::replace(&mut previous, word) == "kind" && matches!(word, "Node" | "NodeList"))
}

pub(super) fn read_bytes(path: &Path) -> Result<Vec<u8>, ClusterError> {
    let mut bytes = Vec::new();
    // Check the number of bytes read and not the file's size, because the file may grow in between.
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let reason = format!("more than {MAX_FILE_BYTES} bytes");
        return Err(ClusterError::TooLarge(path.to_path_buf(), reason));
    }
    Ok(bytes)
}

fn to_text(bytes: Vec<u8>) -> Result<String, YamlError> {
    String::from_utf8(bytes).map_err(|error| {
        let valid = String::from_utf8_lossy(&error.as_bytes()[..error.utf8_error().valid_up_to()]);
        let last_line = valid.rsplit('\n').next().unwrap_or_default();
        let position =
            Position { line: 1 + valid.matches('\n').count(), column: 1 + last_line.chars().count() };
        YamlError { position, message: "the text is not UTF-8".to_owned() }
    })
}

fn read_text(path: &Path) -> Result<String, ClusterError> {
    to_text(read_bytes(path)?).map_err(|error| manifest_error(path, error))
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
    let current = file.metadata()?;
    if (current.uid(), current.gid()) != (metadata.uid(), metadata.gid()) {
        // Only root can change the owner. For other users the new file belongs to its writer, as after an edit in any editor.
        match fchown(file, Some(metadata.uid()), Some(metadata.gid())) {
            Err(error) if error.kind() != io::ErrorKind::PermissionDenied => return Err(error),
            Ok(()) | Err(_) => {}
        }
    }
    file.set_permissions(metadata.permissions())
}

#[cfg(test)]
mod tests;
