//! Predicts the names and images of the objects that a `kustomization.yaml` produces, without rendering it. If a patch may change
//! an image or the placement, that value is unknown, and the reason names the patch.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use farrier_core::plan::NodeAffinity;
use farrier_yaml::{Node, documents};
use fs_err as fs;

use super::{
    dir::read_bytes,
    image_field::{ImageField, ImageValue, ImagesEntry},
    manifest::{DaemonSet, Manifest, Resource, Targets, field, json, sequence, why_not_editable},
};

const FILE_NAMES: [&str; 3] = ["kustomization.yaml", "kustomization.yml", "Kustomization"];
/// Maximum number of references to files in all kustomizations. A reference copies the objects of its file, and counts once for
/// each.
pub(super) const MAX_REFERENCES: usize = 10_000;
/// Maximum number of kustomizations between an overlay and a manifest.
const MAX_DEPTH: usize = 16;
/// Transformers of Kustomize that change only metadata, and the fields that they name.
const METADATA_TRANSFORMERS: [&str; 3] =
    ["LabelTransformer", "AnnotationsTransformer", "NamespaceTransformer"];
/// Fields that decide which nodes a pod runs on.
const PLACEMENT: [&str; 5] = ["nodeSelector", "affinity", "tolerations", "nodeName", "hostNetwork"];

/// Fields of operators' resources that decide which nodes the driver is installed on.
const RESOURCE_PLACEMENT: [&str; 4] = ["nodeSelector", "nodeAffinity", "tolerations", "selector"];

pub(super) fn is_kustomization(path: &Path) -> bool {
    path.file_name().is_some_and(|name| FILE_NAMES.iter().any(|known| name == *known))
}

/// Manifests below a directory, and the files above the directory that its kustomizations refer to.
pub(super) struct Kustomizations<'a> {
    /// Parsed files.
    pub(super) files: &'a BTreeMap<PathBuf, Manifest>,
    /// Directory whose files may be written.
    pub(super) root: &'a Path,
    /// Directory whose files may be read.
    pub(super) boundary: &'a Path,
    /// Reads a file outside `root`.
    pub(super) read: &'a dyn Fn(&Path) -> Option<Manifest>,
    /// Files that kustomizations have referred to so far.
    pub(super) referenced: RefCell<BTreeSet<PathBuf>>,
    /// Remaining number of allowed references.
    pub(super) references_left: Cell<usize>,
}

impl Kustomizations<'_> {
    /// Returns the objects that the outermost kustomizations produce, and the objects that no kustomization refers to.
    pub(super) fn targets(&self) -> Targets {
        let mut all = Targets::default();
        // Apply all files first, because this finds the references.
        let applied: Vec<(&PathBuf, Targets)> =
            self.files.keys().map(|path| (path, self.apply(path, Targets::default(), 0))).collect();
        for (path, targets) in applied {
            if !self.referenced.borrow().contains(path) {
                all.extend(targets);
            }
        }
        let users = users_of(all.resources.iter().map(|resource| (resource.place(), resource.object())));
        for resource in &mut all.resources {
            let path = &resource.file.path;
            let reason = if path.starts_with(self.root) {
                why_shared(users.get(&resource.place()), &resource.object())
            } else {
                let path = path.display();
                Some(format!("{path} is outside of the rollout's path; name its directory in `path`"))
            };
            resource.facts.why_not_editable.extend(reason.map(|reason| (String::new(), reason)));
        }
        let users = users_of(all.daemon_sets.iter().flat_map(|daemon_set| {
            daemon_set.images.iter().map(move |image| (image.place(), daemon_set.object()))
        }));
        for daemon_set in &mut all.daemon_sets {
            let name = daemon_set.object();
            for (container, image) in daemon_set.facts.containers.iter_mut().zip(&daemon_set.images) {
                let reason = if image.file.path.starts_with(self.root) {
                    why_shared(users.get(&image.place()), &name)
                } else {
                    let (file, name) = (image.file.path.display(), split(&container.image).0);
                    Some(format!(
                        "{file} is outside of the rollout's path; add {name} to `images` of the kustomization there"
                    ))
                };
                container.why_not_editable = container.why_not_editable.take().or(reason);
            }
        }
        all
    }

    /// Adds the objects of a file, or of a directory with a kustomization, to `all`. The kustomization also transforms the
    /// objects already in `all`, as Kustomize requires of a component.
    fn apply(&self, path: &Path, mut all: Targets, depth: usize) -> Targets {
        let in_directory =
            |path: PathBuf| FILE_NAMES.iter().map(|name| path.join(name)).find(|path| path.is_file());
        let file =
            self.canonical(path).and_then(|path| if path.is_dir() { in_directory(path) } else { Some(path) });
        let Some(file) = file.filter(|_| depth < MAX_DEPTH && self.references_left.get() > 0) else {
            return all;
        };
        if depth > 0 {
            self.use_references(1);
            self.referenced.borrow_mut().insert(file.clone());
        }
        let Some(manifest) = self.files.get(&file).cloned().or_else(|| (self.read)(&file)) else {
            return all;
        };
        if depth > 0 {
            let copies = manifest.targets.daemon_sets.len() + manifest.targets.resources.len();
            self.use_references(copies.saturating_sub(1));
        }
        all.extend(manifest.targets.clone());
        let directory = file.parent().unwrap_or(&file);
        for kustomization in &manifest.documents {
            for name in ["resources", "bases"].iter().flat_map(|key| texts(kustomization, key)) {
                all.extend(self.apply(&directory.join(name), Targets::default(), depth + 1));
            }
            for name in texts(kustomization, "components") {
                all = self.apply(&directory.join(name), all, depth + 1);
            }
            transform(&mut all, &self.patches(directory, kustomization), kustomization, &manifest);
        }
        all
    }

    fn use_references(&self, count: usize) {
        self.references_left.set(self.references_left.get().saturating_sub(count));
    }

    /// Reads the entries of a kustomization that may change any field.
    fn patches(&self, directory: &Path, kustomization: &Node) -> Vec<Patch> {
        let keys = ["patches", "patchesJson6902", "patchesStrategicMerge", "replacements", "transformers"]
            .into_iter();
        let entries = keys.flat_map(|key| {
            let items = sequence(kustomization, key).unwrap_or_default();
            items.into_iter().map(move |item| (key, item))
        });
        entries.map(|(key, item)| self.patch(directory, key, &item)).collect()
    }

    fn patch(&self, directory: &Path, key: &str, item: &Node) -> Patch {
        let (inline, path) = match item.scalar().map(|scalar| scalar.text.clone()) {
            Some(text) if text.contains('\n') => (Some(text), None),
            path => (text(item, "patch"), path.or_else(|| text(item, "path"))),
        };
        let file = path.as_ref().and_then(|path| self.canonical(&directory.join(path)));
        self.referenced.borrow_mut().extend(file.clone());
        let from_file = || file.and_then(|file| read_bytes(&file).ok());
        let content = inline.or_else(|| Some(String::from_utf8_lossy(&from_file()?).into_owned()));
        let name = format!("an entry of `{key}`");
        let (name, content, targets) = match key {
            // Any other transformer can be any program.
            "transformers" => {
                let content = content.filter(|content| is_metadata_transformer(content));
                (name, content, Some(vec![Selector::default()]))
            }
            "replacements" => {
                let replacements = match path {
                    Some(_) => content.and_then(|content| documents(&content).ok()),
                    None => Some(vec![item.clone()]),
                };
                let targets = replacements.map(|replacements| replacement_targets(&replacements));
                let content = |targets: &Vec<Node>| {
                    targets.iter().map(|target| json(target, false).to_string()).collect::<String>()
                };
                let selectors = |targets: &Vec<Node>| {
                    let selected = targets.iter().filter_map(|target| field(target, "select"));
                    selected.map(|select| Selector::of(&select)).collect()
                };
                (name, targets.as_ref().map(content), targets.as_ref().map(selectors))
            }
            _ => {
                let name = format!("the patch {}", path.unwrap_or_else(|| "inline".to_owned()));
                (name, content, field(item, "target").map(|target| vec![Selector::of(&target)]))
            }
        };
        let words = content
            .map(|content| content.split(|c: char| !c.is_ascii_alphanumeric()).map(str::to_owned).collect());
        Patch { name, words, targets }
    }

    /// Returns the real path of a file or directory that may be read.
    fn canonical(&self, path: &Path) -> Option<PathBuf> {
        let is_readable =
            |path: &PathBuf| path.starts_with(self.boundary) && (path.is_file() || path.is_dir());
        fs::canonicalize(path).ok().filter(is_readable)
    }
}

/// Returns the names of the objects that the value at each place sets. A missing value has no place.
fn users_of<P: Ord>(
    uses: impl Iterator<Item = (Option<P>, String)>,
) -> BTreeMap<Option<P>, BTreeSet<String>> {
    let mut names = BTreeMap::<_, BTreeSet<String>>::new();
    for (place, name) in uses.filter(|(place, _)| place.is_some()) {
        names.entry(place).or_default().insert(name);
    }
    names
}

/// Returns the reason not to edit the value of an object: the value also sets another object, whose nodes may need another image.
fn why_shared(users: Option<&BTreeSet<String>>, name: &str) -> Option<String> {
    let other = users?.iter().find(|user| *user != name)?;
    Some(format!("its value also sets {other}: give each of the two a separate value"))
}

/// Applies a kustomization to objects.
fn transform(all: &mut Targets, patches: &[Patch], kustomization: &Node, source: &Manifest) {
    let entries = sequence(kustomization, "images").unwrap_or_default();
    let [prefix, suffix] =
        ["namePrefix", "nameSuffix"].map(|key| text(kustomization, key).unwrap_or_default());
    let new_namespace = text(kustomization, "namespace");
    for Resource { facts, .. } in &mut all.resources {
        for patch in patches.iter().filter(|patch| patch.may_be_for(facts.kind.kind(), &facts.name)) {
            let reason = format!(
                "{} may change the resource, and farrier does not apply patches: set the field only in the manifest",
                patch.name
            );
            // Each word may be a field's name. If a word names a placement field, no field is editable: the empty name means all.
            let names_placement = RESOURCE_PLACEMENT.iter().any(|field| patch.may_name(field));
            let fields = patch.words.iter().flatten().cloned().chain(names_placement.then(String::new));
            facts.why_not_editable.extend(fields.map(|field| (field, reason.clone())));
        }
        let (namespace, name) = facts.split_name();
        let namespace = Some(namespace).filter(|namespace| !namespace.is_empty());
        let namespace =
            namespace.map(|namespace| format!("{}/", new_namespace.as_deref().unwrap_or(namespace)));
        facts.name = format!("{}{prefix}{name}{suffix}", namespace.unwrap_or_default());
    }
    for DaemonSet { facts, images } in &mut all.daemon_sets {
        for patch in patches.iter().filter(|patch| patch.may_be_for("DaemonSet", &facts.name)) {
            let name = &patch.name;
            if PLACEMENT.iter().any(|field| patch.may_name(field)) {
                facts.placement.affinity = NodeAffinity::Unsupported(format!(
                    "{name} may change its nodes, and farrier does not apply patches: create the DaemonSet in the cluster first"
                ));
            }
            for container in facts.containers.iter_mut().filter(|_| patch.may_name("image")) {
                container.why_not_editable =
                    Some(format!("{name} may set the image: set the image only in `images`"));
                // Clear the unknown image, so that no entry of `images` matches.
                container.image.clear();
            }
        }
        facts.namespace = new_namespace.clone().unwrap_or_else(|| facts.namespace.clone());
        facts.name = format!("{prefix}{}{suffix}", facts.name);
        for entry in &entries {
            for (container, image) in facts.containers.iter_mut().zip(images.iter_mut()) {
                if let Some((name, value)) = overridden(&container.image, entry) {
                    let mut values =
                        ["newName", "newTag", "digest"].iter().filter_map(|key| field(entry, key));
                    container.why_not_editable = values.find_map(|value| why_not_editable(Some(&value)));
                    container.image = name;
                    *image = ImageField { file: source.file.clone(), value };
                }
            }
        }
    }
}

/// Returns the image that replaces `image` according to an entry of `images`, and the position of the new image; `None` if the
/// entry matches other images.
fn overridden(image: &str, entry: &Node) -> Option<(String, ImageValue)> {
    let (name, version) = split(image);
    if text(entry, "name")? != name {
        return None;
    }
    let repository = text(entry, "newName").unwrap_or_else(|| name.to_owned());
    let scalar_field = |name: &str| {
        let mut fields =
            entry.entries()?.iter().filter_map(|(key, value)| Some((key.scalar()?, value.scalar()?)));
        fields.find(|(key, _)| key.text == name).map(|(key, value)| (key.clone(), value.clone()))
    };
    let (digest, tag) = (scalar_field("digest"), scalar_field("newTag"));
    let image = if tag.is_none() && digest.is_none() {
        format!("{repository}{version}")
    } else {
        let tag = tag.as_ref().map(|(_, value)| format!(":{}", value.text)).unwrap_or_default();
        let digest = digest.as_ref().map(|(_, value)| format!("@{}", value.text)).unwrap_or_default();
        format!("{repository}{tag}{digest}")
    };
    let new_name = field(entry, "newName").and_then(|name| name.scalar().cloned());
    let new_tag = tag.as_ref().filter(|_| digest.is_some()).map(|(_, value)| value.clone());
    let entry = ImagesEntry { repository, new_name, version: digest.or(tag), new_tag };
    Some((image, ImageValue::Entry(entry)))
}

/// Splits an image into its name, and the tag or digest with its separator.
pub(super) fn split(image: &str) -> (&str, &str) {
    let name = image.split('@').next().unwrap_or_default();
    let path = name.rfind('/').map_or(0, |slash| slash + 1);
    let end = name[path..].find(':').map_or(name.len(), |colon| path + colon);
    image.split_at(end)
}

/// An entry of a kustomization that may change any field.
struct Patch {
    /// Name for messages.
    name: String,
    /// Words of the patch's text; `None` if the text is unknown. The text is not parsed, so each word may be a field, a kind or
    /// a value.
    words: Option<BTreeSet<String>>,
    /// Objects that the patch names apart from its text, if it does.
    targets: Option<Vec<Selector>>,
}

impl Patch {
    /// Whether the patch may be for an object.
    fn may_be_for(&self, kind: &str, name: &str) -> bool {
        match &self.targets {
            Some(targets) => targets.iter().any(|target| target.may_match(kind, name)),
            None => !self.may_name("kind") || self.may_name(kind),
        }
    }

    fn may_name(&self, word: &str) -> bool {
        self.words.as_ref().is_none_or(|words| words.contains(word))
    }
}

/// Patterns of kinds and names. A missing pattern matches everything.
#[derive(Default)]
struct Selector {
    kind: Option<String>,
    name: Option<String>,
}

impl Selector {
    fn of(target: &Node) -> Self {
        Self { kind: text(target, "kind"), name: text(target, "name") }
    }

    /// Whether an object may match. Kustomize also compares the names that the object had before its prefixes and suffixes.
    fn may_match(&self, kind: &str, name: &str) -> bool {
        may_match(self.kind.as_ref(), |pattern| pattern == kind)
            && may_match(self.name.as_ref(), |pattern| name.contains(pattern))
    }
}

/// Whether a pattern may match. Kustomize takes it for a regular expression; here, anything but alternatives matches.
fn may_match(pattern: Option<&String>, is_match: impl Fn(&str) -> bool) -> bool {
    let is_plain = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    pattern.is_none_or(|pattern| {
        let mut alternatives = pattern.trim_matches(['(', ')']).split('|');
        alternatives.any(|alternative| !is_plain(alternative) || is_match(alternative))
    })
}

/// Returns the targets of replacements. A file has one replacement, or a list of them.
fn replacement_targets(documents: &[Node]) -> Vec<Node> {
    let items = documents.iter().filter_map(Node::items).flatten();
    let replacements = documents.iter().cloned().chain(items);
    replacements.flat_map(|replacement| sequence(&replacement, "targets").unwrap_or_default()).collect()
}

fn is_metadata_transformer(content: &str) -> bool {
    let is_known = |document: &Node| {
        text(document, "apiVersion").as_deref() == Some("builtin")
            && text(document, "kind").is_some_and(|kind| METADATA_TRANSFORMERS.contains(&kind.as_str()))
    };
    documents(content).is_ok_and(|documents| documents.iter().all(is_known))
}

fn texts(yaml: &Node, key: &str) -> Vec<String> {
    let items = sequence(yaml, key).unwrap_or_default();
    items.iter().filter_map(|item| Some(item.scalar()?.text.clone())).collect()
}

fn text(yaml: &Node, key: &str) -> Option<String> {
    Some(field(yaml, key)?.scalar()?.text.clone()).filter(|text| !text.is_empty())
}
