//! Reads nodes and DaemonSets from the text of a manifest.

use std::{collections::BTreeMap, path::PathBuf, rc::Rc};

use farrier_core::plan::{
    Container, DaemonSetFacts, NodeFacts, Owner, Placement, Taint, has_pause_annotation, is_hardware_label,
};
use farrier_yaml::{Node, Value, YamlError, documents};
use granit_parser::ScalarStyle;

use super::{
    image_field::{ImageField, ImageValue, SourceFile},
    kustomize::is_kustomization,
};

/// Nodes and DaemonSets of a manifest. Objects of other kinds are ignored.
#[derive(Clone, Debug, Default)]
pub(super) struct Manifest {
    pub(super) file: Rc<SourceFile>,
    pub(super) nodes: Vec<NodeFacts>,
    pub(super) daemon_sets: Vec<DaemonSet>,
    /// DaemonSets that are not complete, for example patches.
    pub(super) skipped: Vec<YamlError>,
    /// Documents of a kustomization.
    pub(super) documents: Vec<Node>,
}

/// A DaemonSet and the positions of its containers' images.
#[derive(Clone, Debug)]
pub(super) struct DaemonSet {
    pub(super) facts: DaemonSetFacts,
    /// The image of each of `facts.containers`, in the same order.
    pub(super) images: Vec<ImageField>,
}

/// Reads a file. Only a mistake in the file's form, or in a node, is an error.
pub(super) fn read(path: PathBuf, text: String) -> Result<Manifest, YamlError> {
    let file = Rc::new(SourceFile { path, text });
    let documents = documents(&file.text)?;
    let mut manifest = Manifest { file, ..Manifest::default() };
    for document in &documents {
        add_object(document, None, &mut manifest)?;
    }
    if is_kustomization(&manifest.file.path) {
        manifest.documents = documents;
    }
    Ok(manifest)
}

/// Returns the nodes and DaemonSets in a text.
pub fn nodes_and_daemon_sets(text: &str) -> Result<(Vec<NodeFacts>, Vec<DaemonSetFacts>), YamlError> {
    let Manifest { nodes, daemon_sets, skipped, .. } = read(PathBuf::new(), text.to_owned())?;
    match skipped.into_iter().next() {
        Some(error) => Err(error),
        None => Ok((nodes, daemon_sets.into_iter().map(|found| found.facts).collect())),
    }
}

/// Adds an object. Documents that are not Kubernetes objects (values files, empty documents) are ignored.
fn add_object(yaml: &Node, kind_of_items: Option<&str>, manifest: &mut Manifest) -> Result<(), YamlError> {
    // The kind of a list names the kind of items that do not state their own.
    let scalar = |key: &str| Some(yaml.get(key)?.scalar()?.text.clone());
    let kind = match (yaml.get("kind"), kind_of_items) {
        (Some(_), _) => scalar("kind").unwrap_or_default(),
        (None, Some(kind)) => kind.to_owned(),
        (None, None) => return Ok(()),
    };
    let version = scalar("apiVersion").unwrap_or_default();
    let untyped = version.is_empty() && kind_of_items.is_some();
    if let Some(item_kind) = kind.strip_suffix("List") {
        let items = field(yaml, "items");
        for item in items.iter().filter_map(Node::items).flatten() {
            add_object(&item, Some(item_kind).filter(|kind| !kind.is_empty()), manifest)?;
        }
    } else if kind == "Node" && (version == "v1" || untyped) {
        manifest.nodes.push(node(yaml)?);
    } else if kind == "DaemonSet" && (version == "apps/v1" || untyped) {
        match daemon_set(yaml, &manifest.file) {
            Ok(found) => manifest.daemon_sets.push(found),
            Err(error) => manifest.skipped.push(error),
        }
    }
    Ok(())
}

fn node(yaml: &Node) -> Result<NodeFacts, YamlError> {
    let metadata = required(yaml, "metadata")?;
    let info = path(yaml, &["status", "nodeInfo"]);
    let info = |key: &str| info.as_ref().map_or(Ok(String::new()), |info| text(info, key));
    let labels = strings(&metadata, "labels")?;
    Ok(NodeFacts {
        name: required(&metadata, "name")?.string()?.to_owned(),
        has_hardware_labels: labels.keys().any(|label| is_hardware_label(label)),
        labels,
        annotations: farrier_annotations(&metadata)?,
        kernel_version: info("kernelVersion")?,
        architecture: info("architecture")?,
        os_image: info("osImage")?,
        unschedulable: path(yaml, &["spec", "unschedulable"]).is_some_and(|value| value.is_true()),
        operating_system: info("operatingSystem")?,
        taints: taints(yaml)?,
        ..NodeFacts::default()
    })
}

fn taints(yaml: &Node) -> Result<Vec<Taint>, YamlError> {
    let Some(spec) = field(yaml, "spec") else { return Ok(Vec::new()) };
    let taint = |item: &Node| {
        Ok(Taint { key: text(item, "key")?, value: text(item, "value")?, effect: text(item, "effect")? })
    };
    sequence(&spec, "taints")?.iter().map(taint).collect()
}

fn daemon_set(yaml: &Node, file: &Rc<SourceFile>) -> Result<DaemonSet, YamlError> {
    let metadata = required(yaml, "metadata")?;
    let pod = required(&required(&required(yaml, "spec")?, "template")?, "spec")?;
    required(&pod, "containers")?;
    let namespace = text(&metadata, "namespace")?;
    let mut containers = Vec::new();
    let mut images = Vec::new();
    for list in ["initContainers", "containers"] {
        for item in sequence(&pod, list)? {
            let image = field(&item, "image");
            containers.push(Container {
                name: required(&item, "name")?.string()?.to_owned(),
                image: image.as_ref().map_or(Ok(""), Node::string)?.to_owned(),
                fixed: why_not_editable(image.as_ref()),
            });
            let value = ImageValue::Whole(image.as_ref().and_then(Node::scalar).cloned());
            images.push(ImageField { file: file.clone(), value });
        }
    }
    let facts = DaemonSetFacts {
        namespace: if namespace.is_empty() { "default".to_owned() } else { namespace },
        name: required(&metadata, "name")?.string()?.to_owned(),
        containers,
        placement: placement(&pod)?,
        owner: owner(&metadata)?,
        paused: has_pause_annotation(&farrier_annotations(&metadata)?),
        live: None,
    };
    Ok(DaemonSet { facts, images })
}

/// Returns the annotations that farrier reads or writes.
fn farrier_annotations(metadata: &Node) -> Result<BTreeMap<String, String>, YamlError> {
    let mut annotations = strings(metadata, "annotations")?;
    annotations.retain(|key, _| key.starts_with("farrier.dev/"));
    Ok(annotations)
}

/// Returns the reason why an image value cannot be edited in place, if there is one.
pub(super) fn why_not_editable(image: Option<&Node>) -> Option<String> {
    let Some(image) = image else { return Some("the container has no image field".to_owned()) };
    let scalar = image.scalar()?;
    let reason = if image.shared {
        "the value is an anchor, an alias or part of a merge, so other fields may share the value"
    } else if matches!(scalar.style, ScalarStyle::Literal | ScalarStyle::Folded) {
        "the value is a block scalar"
    } else if !scalar.tag.is_empty() {
        "the value has a tag"
    } else if ["{{", "${", "$("].iter().any(|start| scalar.text.contains(start)) {
        "the value is filled in by another tool; name the file and the path of its value in `values`"
    } else {
        return None;
    };
    Some(format!("{reason} (line {})", image.at.line))
}

fn owner(metadata: &Node) -> Result<Option<Owner>, YamlError> {
    for reference in sequence(metadata, "ownerReferences")? {
        if reference.get("controller").is_some_and(|controller| controller.is_true()) {
            return Ok(Some(Owner { kind: text(&reference, "kind")?, name: text(&reference, "name")? }));
        }
    }
    Ok(None)
}

/// Returns the placement rules of a pod template: on which nodes its pods run.
fn placement(pod: &Node) -> Result<Placement, YamlError> {
    let fields = ["nodeName", "affinity", "tolerations"];
    let rules = fields.iter().filter_map(|key| Some(((*key).to_owned(), json(&field(pod, key)?))));
    Ok(Placement {
        node_selector: strings(pod, "nodeSelector")?,
        host_network: field(pod, "hostNetwork").is_some_and(|value| value.is_true()),
        ..Placement::of_pod(&rules.collect())
    })
}

/// Returns a value as JSON. Scalars become strings.
fn json(yaml: &Node) -> serde_json::Value {
    match yaml.value() {
        Value::Scalar(scalar) => scalar.text.clone().into(),
        Value::List(items) => items.iter().map(json).collect(),
        Value::Map(entries) => {
            let entries = entries.iter().filter(|(_, value)| !value.is_null());
            let entries = entries.filter_map(|(key, value)| Some((key.scalar()?.text.clone(), json(value))));
            entries.collect::<serde_json::Map<_, _>>().into()
        }
        Value::Null | Value::Removed => serde_json::Value::Null,
    }
}

/// Returns the value of a key, unless it is missing or null.
pub(super) fn field(yaml: &Node, key: &str) -> Option<Node> {
    yaml.get(key).filter(|value| !value.is_null())
}

fn required(yaml: &Node, key: &str) -> Result<Node, YamlError> {
    field(yaml, key).ok_or_else(|| yaml.error(format!("field {key:?} is missing")))
}

/// Follows a path of keys; `None` if a value is missing or null.
fn path(yaml: &Node, keys: &[&str]) -> Option<Node> {
    keys.iter().try_fold(yaml.clone(), |yaml, key| field(&yaml, key))
}

/// Returns a string; empty if missing.
fn text(yaml: &Node, key: &str) -> Result<String, YamlError> {
    field(yaml, key).map_or(Ok(String::new()), |value| value.string().map(str::to_owned))
}

/// Returns a list; empty if missing.
pub(super) fn sequence(yaml: &Node, key: &str) -> Result<Vec<Node>, YamlError> {
    let Some(value) = field(yaml, key) else { return Ok(Vec::new()) };
    let items = value.items().ok_or_else(|| value.error(format!("field {key:?} is not a list")))?;
    Ok(items.collect())
}

/// Returns a mapping of strings; empty if missing.
fn strings(yaml: &Node, key: &str) -> Result<BTreeMap<String, String>, YamlError> {
    let Some(value) = field(yaml, key) else { return Ok(BTreeMap::new()) };
    let entries =
        value.entries().ok_or_else(|| value.error(format!("field {key:?} is not a mapping of strings")))?;
    entries.iter().map(|(key, value)| Ok((key.string()?.to_owned(), value.string()?.to_owned()))).collect()
}
