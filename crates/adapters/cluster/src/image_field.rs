//! Where the image of a container is written: as one value, or in an entry of a kustomization's `images`.

use std::{cmp::Reverse, path::PathBuf, rc::Rc};

use farrier_yaml::{Node, Scalar};

use super::{edit, manifest::field};

/// A file, as it was read.
#[derive(Debug, Default)]
pub(super) struct SourceFile {
    pub(super) path: PathBuf,
    pub(super) text: String,
}

/// The place of an image.
#[derive(Clone, Debug)]
pub(super) struct ImageField {
    pub(super) file: Rc<SourceFile>,
    pub(super) value: ImageValue,
}

#[derive(Clone, Debug)]
pub(super) enum ImageValue {
    /// One value; `None` where it is not a scalar.
    Whole(Option<Scalar>),
    /// An entry of `images`: the repository that it gives, `newName`, and the key and value of `digest` or `newTag`.
    Entry { repository: String, name: Option<Scalar>, version: Option<(Scalar, Scalar)> },
}

impl ImageField {
    /// Returns the text of the file with another image.
    pub(super) fn replaced(&self, image: &str) -> Result<String, String> {
        let mut edits = self.edits(image)?;
        // From the end, so that the positions of the others stay right.
        edits.sort_by_key(|(scalar, _)| Reverse(scalar.bytes.start));
        let text = self.file.text.clone();
        edits.into_iter().try_fold(text, |text, (scalar, value)| edit::replace(&text, scalar, value))
    }

    fn edits<'a>(&'a self, image: &'a str) -> Result<Vec<(&'a Scalar, &'a str)>, String> {
        let (repository, written, version) = match &self.value {
            ImageValue::Whole(scalar) => {
                return Ok(vec![(scalar.as_ref().ok_or("the container has no image field")?, image)]);
            }
            ImageValue::Entry { repository, name, version } => (repository, name, version),
        };
        let (name, digest) =
            image.split_once('@').ok_or("only an image with a digest can be written there")?;
        let (key, value) = version.as_ref().ok_or_else(|| format!("add `digest: {digest}` to the entry"))?;
        let mut edits = vec![(value, digest)];
        if key.text != "digest" {
            edits.push((key, "digest"));
        }
        if name != repository {
            edits
                .push((written.as_ref().ok_or_else(|| format!("add `newName: {name}` to the entry"))?, name));
        }
        Ok(edits)
    }
}

/// Returns the value at a path such as `driver.image` or `spec.source.helm.parameters[name=driver.image].value`.
pub(super) fn value_at(document: &Node, path: &str) -> Option<Node> {
    let mut node = document.clone();
    let mut rest = path;
    while !rest.is_empty() {
        let end;
        if let Some(inner) = rest.strip_prefix('[') {
            end = rest.find(']')? + 1;
            let (key, wanted) = inner[..end - 2].split_once('=')?;
            let is_wanted = |found: Node| found.scalar().is_some_and(|found| found.text == wanted);
            let found = node.items()?.find(|item| field(item, key).is_some_and(is_wanted));
            node = found?;
        } else {
            end = rest.find(['.', '[']).unwrap_or(rest.len());
            node = field(&node, &rest[..end])?;
        }
        rest = rest[end..].strip_prefix('.').unwrap_or(&rest[end..]);
    }
    Some(node)
}
