//! Reads nodes, DaemonSets and operators' resources from the text of a manifest.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    rc::Rc,
};

use farrier_core::{
    image::OperatorResource,
    plan::{
        Container, DaemonSetFacts, NodeAffinity, NodeFacts, Owner, Placement, ResourceFacts, Taint,
        has_pause_annotation, is_hardware_label,
    },
};
use farrier_yaml::{Node, Position, Value, YamlError, documents};
use granit_parser::ScalarStyle;

use super::{
    image_field::{ImageField, ImageValue, SourceFile},
    kustomize::is_kustomization,
};

/// Nodes and rollout targets of a manifest. Objects of other kinds are ignored.
#[derive(Clone, Debug, Default)]
pub(super) struct Manifest {
    pub(super) file: Rc<SourceFile>,
    pub(super) nodes: Vec<NodeFacts>,
    pub(super) targets: Targets,
    /// Objects that are not complete, for example patches.
    pub(super) skipped: Vec<YamlError>,
    /// Documents of a kustomization.
    pub(super) documents: Vec<Node>,
}

/// Rollout targets.
#[derive(Clone, Debug, Default)]
pub(super) struct Targets {
    pub(super) daemon_sets: Vec<DaemonSet>,
    pub(super) resources: Vec<Resource>,
}

impl Targets {
    pub(super) fn extend(&mut self, other: Self) {
        self.daemon_sets.extend(other.daemon_sets);
        self.resources.extend(other.resources);
    }
}

/// An operator's resource, and the section of its driver.
#[derive(Clone, Debug)]
pub(super) struct Resource {
    pub(super) facts: ResourceFacts,
    pub(super) file: Rc<SourceFile>,
    pub(super) section: Option<Node>,
}

impl Resource {
    pub(super) fn object(&self) -> String {
        format!("{} {}", self.facts.kind, self.facts.name)
    }

    /// Returns file, line and column of the section.
    pub(super) fn place(&self) -> Option<(PathBuf, usize, usize)> {
        let Position { line, column } = self.section.as_ref()?.position;
        Some((self.file.path.clone(), line, column))
    }
}

/// A DaemonSet and the positions of its containers' images.
#[derive(Clone, Debug)]
pub(super) struct DaemonSet {
    pub(super) facts: DaemonSetFacts,
    /// The image of each of `facts.containers`, in the same order.
    pub(super) images: Vec<ImageField>,
}

impl DaemonSet {
    pub(super) fn object(&self) -> String {
        format!("DaemonSet {}/{}", self.facts.namespace, self.facts.name)
    }
}

/// Reads a file. Invalid YAML and an invalid node are errors. Other invalid objects are skipped.
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
    let Manifest { nodes, targets: Targets { daemon_sets, .. }, skipped, .. } =
        read(PathBuf::new(), text.to_owned())?;
    match skipped.into_iter().next() {
        Some(error) => Err(error),
        None => Ok((nodes, daemon_sets.into_iter().map(|daemon_set| daemon_set.facts).collect())),
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
            Ok(daemon_set) => manifest.targets.daemon_sets.push(daemon_set),
            Err(error) => manifest.skipped.push(error),
        }
    } else if let Some(operator) = OperatorResource::TARGETS
        .into_iter()
        .chain([OperatorResource::GpuCluster])
        .find(|operator| operator.kind() == kind)
        && (version == format!("{}/{}", operator.group(), operator.version()) || untyped)
    {
        match resource(operator, yaml, &manifest.file) {
            Ok(resource) => manifest.targets.resources.push(resource),
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
                why_not_editable: why_not_editable(image.as_ref()),
                tagged: false,
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

fn resource(kind: OperatorResource, yaml: &Node, file: &Rc<SourceFile>) -> Result<Resource, YamlError> {
    let (metadata, spec) = (required(yaml, "metadata")?, required(yaml, "spec")?);
    let name = required(&metadata, "name")?.string()?.to_owned();
    let namespace = text(&metadata, "namespace")?;
    let namespace = if namespace.is_empty() { "default" } else { &namespace };
    let section = path(&spec, kind.driver_path());
    let is_kmm = kind == OperatorResource::Module;
    // KMM itself replaces the variables in the images of a Module.
    let why_value_not_editable =
        |value: &Node| if is_kmm { why_not_in_place(value) } else { why_not_editable(Some(value)) };
    let not_editable_entry = |(key, value): &(Node, Node)| {
        let images = value.items().into_iter().flatten().filter_map(|item| field(&item, "containerImage"));
        let reason =
            [value.clone()].into_iter().chain(images).find_map(|value| why_value_not_editable(&value));
        Some((key.scalar()?.text.clone(), reason?))
    };
    let entries = section.as_ref().and_then(Node::entries).into_iter().flatten();
    let facts = ResourceFacts {
        kind,
        name: if is_kmm { format!("{namespace}/{name}") } else { name },
        version: None,
        why_not_editable: entries.filter_map(not_editable_entry).collect(),
        annotations: farrier_annotations(&metadata)?,
        owned: BTreeSet::new(),
        created: None,
        operator_error: None,
        spec: json(&spec, true).into(),
    };
    Ok(Resource { facts, file: file.clone(), section })
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
    let reason =
        "the value is filled in by another tool; name the file and the path of its value in `values`";
    let filled = image.scalar().is_some_and(|scalar| has_placeholder(&scalar.text));
    why_not_in_place(image).or_else(|| filled.then(|| format!("{reason} (line {})", image.position.line)))
}

/// Whether another tool fills in a part of the text: Helm, Flux, or `vars` of Kustomize.
fn has_placeholder(text: &str) -> bool {
    ["{{", "${", "$("].iter().any(|start| text.contains(start))
}

/// Returns the reason why the text of a value cannot be replaced, if there is one.
fn why_not_in_place(image: &Node) -> Option<String> {
    let scalar = image.scalar()?;
    let reason = if image.shared {
        "the value is an anchor, an alias or part of a merge, so other fields may share the value"
    } else if matches!(scalar.style, ScalarStyle::Literal | ScalarStyle::Folded) {
        "the value is a block scalar"
    } else if !scalar.tag.is_empty() {
        "the value has a tag"
    } else {
        return None;
    };
    Some(format!("{reason} (line {})", image.position.line))
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
    let rules = fields.iter().filter_map(|key| Some(((*key).to_owned(), json(&field(pod, key)?, false))));
    let rules: serde_json::Value = rules.collect();
    let node_selector = strings(pod, "nodeSelector")?;
    let mut placement = Placement {
        host_network: field(pod, "hostNetwork").is_some_and(|value| value.is_true()),
        ..Placement::of_pod(&rules)
    };
    if has_placeholder(&rules.to_string()) || node_selector.values().any(|value| has_placeholder(value)) {
        placement.affinity = NodeAffinity::Unsupported(
            "another tool fills in a value of its placement: create the DaemonSet in the cluster first"
                .to_owned(),
        );
    }
    Ok(Placement { node_selector, ..placement })
}

/// Returns a value as JSON. Scalars become strings. If `typed`, plain `true` and `false` become booleans.
pub(super) fn json(yaml: &Node, typed: bool) -> serde_json::Value {
    match yaml.value() {
        Value::Scalar(scalar) if typed && scalar.style == ScalarStyle::Plain && scalar.text == "true" => {
            true.into()
        }
        Value::Scalar(scalar) if typed && scalar.style == ScalarStyle::Plain && scalar.text == "false" => {
            false.into()
        }
        Value::Scalar(scalar) => scalar.text.clone().into(),
        Value::List(items) => items.iter().map(|item| json(item, typed)).collect(),
        Value::Map(entries) => {
            let entries = entries.iter().filter(|(_, value)| !value.is_null());
            let entries =
                entries.filter_map(|(key, value)| Some((key.scalar()?.text.clone(), json(value, typed))));
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
