//! Position of a container's image in manifests: one value, an entry of a kustomization's `images`, or several chart values.

use std::{cmp::Reverse, path::PathBuf, rc::Rc};

use farrier_yaml::{Node, Scalar};

use super::{
    edit,
    kustomize::split,
    manifest::{field, why_not_editable},
};

/// Path of a file, and its text when farrier read it.
#[derive(Debug, Default)]
pub(super) struct SourceFile {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// Position of an image.
#[derive(Clone, Debug)]
pub(super) struct ImageField {
    pub(super) file: Rc<SourceFile>,
    pub(super) value: ImageValue,
}

#[derive(Clone, Debug)]
pub(super) enum ImageValue {
    /// One value; `None` if the value is missing or not a scalar.
    Whole(Option<Scalar>),
    Entry(ImagesEntry),
    /// Values of a chart.
    Split(SplitImage),
}

/// An entry of a kustomization's `images`.
#[derive(Clone, Debug)]
pub(super) struct ImagesEntry {
    /// The repository of the resulting image.
    pub(super) repository: String,
    /// Value of `newName`.
    pub(super) new_name: Option<Scalar>,
    /// Key and value of `digest`, or of `newTag` without a digest.
    pub(super) version: Option<(Scalar, Scalar)>,
    /// Value of `newTag` if the entry also has a digest.
    pub(super) new_tag: Option<Scalar>,
}

/// An image in several values of a chart.
#[derive(Clone, Debug)]
pub(super) struct SplitImage {
    registry: Option<Scalar>,
    repository: Scalar,
    tag: Option<Scalar>,
    digest: Option<Scalar>,
}

impl SplitImage {
    /// Reads a mapping with `repository` and optional `registry`, `tag` and `digest`. Also returns the reason if farrier cannot
    /// edit the values.
    pub(super) fn read(mapping: &Node) -> Option<(Self, Option<String>)> {
        let values = ["registry", "repository", "tag", "digest"].map(|key| field(mapping, key));
        let reason = values.iter().flatten().find_map(|value| why_not_editable(Some(value)));
        let [registry, repository, tag, digest] =
            values.map(|value| value.as_ref().and_then(Node::scalar).cloned());
        let split = Self { registry, repository: repository?, tag, digest };
        Some((split.clone(), reason.or_else(|| split.why_no_digest())))
    }

    /// Returns the reason if the values have no position for a digest.
    fn why_no_digest(&self) -> Option<String> {
        let has_field = self.digest.is_some() || self.tag.as_ref().is_some_and(|tag| tag.text.contains('@'));
        (!has_field).then(|| {
            "its mapping has no field for a digest: add `digest: \"\"` if the chart reads it, or write `tag` as TAG@sha256:DIGEST"
                .to_owned()
        })
    }

    /// Returns the image reference that the values form.
    pub(super) fn text(&self) -> String {
        let part = |prefix: &str, scalar: &Option<Scalar>, suffix: &str| {
            let text = scalar.as_ref().map_or("", |scalar| &scalar.text);
            if text.is_empty() { String::new() } else { format!("{prefix}{text}{suffix}") }
        };
        let [registry, tag, digest] =
            [part("", &self.registry, "/"), part(":", &self.tag, ""), part("@", &self.digest, "")];
        format!("{registry}{}{tag}{digest}", self.repository.text)
    }

    /// Whether farrier must write the tag beside the digest.
    pub(super) fn has_tag(&self) -> bool {
        self.tag.is_some()
    }

    fn edits(&self, image: &str) -> Result<Vec<(&Scalar, String)>, String> {
        if let Some(reason) = self.why_no_digest() {
            return Err(reason);
        }
        let (name, digest) = split_digest(image)?;
        let (repository, tag) = split(name);
        let (registry, path) = repository.split_once('/').unwrap_or(("", repository));
        let repository = if self.registry.is_some() { path } else { repository };
        let tag = tag.trim_start_matches(':');
        let tag = if self.digest.is_some() { tag.to_owned() } else { format!("{tag}@{digest}") };
        let values = [
            (self.registry.as_ref(), registry.to_owned()),
            (Some(&self.repository), repository.to_owned()),
            (self.tag.as_ref(), tag),
            (self.digest.as_ref(), digest.to_owned()),
        ];
        Ok(values.into_iter().filter_map(|(scalar, value)| Some((scalar?, value))).collect())
    }
}

fn split_digest(image: &str) -> Result<(&str, &str), &'static str> {
    image.split_once('@').ok_or("only an image by digest can be written to this field")
}

impl ImageField {
    /// Returns the file and the byte offset of the value that farrier edits.
    pub(super) fn place(&self) -> Option<(PathBuf, usize)> {
        let scalar = match &self.value {
            ImageValue::Whole(scalar) => scalar.as_ref(),
            ImageValue::Entry(entry) => entry.version.as_ref().map(|(_, value)| value),
            ImageValue::Split(values) => Some(&values.repository),
        };
        Some((self.file.path.clone(), scalar?.bytes.start))
    }

    /// Returns the text of the file with another image.
    pub(super) fn replaced(&self, image: &str) -> Result<String, String> {
        let mut edits = self.edits(image)?;
        // Edit from the end, so that the remaining positions stay valid.
        edits.sort_by_key(|(scalar, _)| Reverse(scalar.bytes.start));
        let text = self.file.text.clone();
        edits.into_iter().try_fold(text, |text, (scalar, value)| edit::replace(&text, scalar, &value))
    }

    fn edits(&self, image: &str) -> Result<Vec<(&Scalar, String)>, String> {
        let (entry, version) = match &self.value {
            ImageValue::Whole(scalar) => {
                let scalar = scalar.as_ref().ok_or("the container has no image field")?;
                return Ok(vec![(scalar, image.to_owned())]);
            }
            ImageValue::Split(values) => return values.edits(image),
            ImageValue::Entry(entry) => (entry, entry.version.as_ref()),
        };
        let (name, digest) = split_digest(image)?;
        let (name, tag) = split(name);
        let (key, value) = version.ok_or_else(|| format!("add `digest: {digest}` to the entry"))?;
        let mut edits = vec![(value, digest.to_owned())];
        if key.text != "digest" {
            edits.push((key, "digest".to_owned()));
        }
        edits.extend(entry.new_tag.as_ref().map(|scalar| (scalar, tag.trim_start_matches(':').to_owned())));
        if name != entry.repository {
            let new_name = entry.new_name.as_ref();
            let new_name = new_name.ok_or_else(|| format!("add `newName: {name}` to the entry"))?;
            edits.push((new_name, name.to_owned()));
        }
        Ok(edits)
    }
}

/// Returns the values at a path such as `driver.image` or `spec.source.helm.parameters[name=driver.image].value`.
pub(super) fn values_at(mut nodes: Vec<Node>, path: &str) -> Vec<Node> {
    let mut remaining = path;
    while !remaining.is_empty() {
        let end;
        if let Some(inner) = remaining.strip_prefix('[') {
            let Some((key, text)) = inner.split_once(']').and_then(|(item, _)| item.split_once('=')) else {
                return Vec::new();
            };
            end = key.len() + text.len() + "[=]".len();
            let has_text = |value: Node| value.scalar().is_some_and(|scalar| scalar.text == text);
            let items = nodes.iter().filter_map(Node::items).flatten();
            nodes = items.filter(|item| field(item, key).is_some_and(has_text)).collect();
        } else {
            end = remaining.find(['.', '[']).unwrap_or(remaining.len());
            nodes = nodes.iter().filter_map(|node| field(node, &remaining[..end])).collect();
        }
        remaining = remaining[end..].strip_prefix('.').unwrap_or(&remaining[end..]);
    }
    nodes
}
