//! The copy of a DaemonSet for one kernel: its name, labels, manifest and annotations.

use std::{collections::BTreeMap, sync::Arc};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::{
    handover::{HANDED_OVER, short_hash},
    watch::is_same_image,
};
use crate::{
    image::FieldHasher,
    kernel::{KernelLabel, KernelTarget},
    plan::{
        ARCH_LABEL, COPY_KERNEL_LABEL, COPY_OF_LABEL, Container, DaemonSetFacts, HoldReason, Instance,
        KERNEL_LABEL, LiveDaemonSet, OS_ID_LABEL, OS_VERSION_LABEL, labels::COPY_RECORD_ANNOTATION,
    },
};

/// On a copy: exact kernel release that the copy's image is for.
const RELEASE: &str = "farrier.dev/kernel-release";
/// On a copy: hash of the applied object, so that an unchanged copy is not written again.
const APPLIED: &str = "farrier.dev/applied";
/// On a copy: time since which no node runs the copy's kernel.
const UNUSED_SINCE: &str = "farrier.dev/unused-since";

/// Maximum length of a label value, such as the DaemonSet's name in the labels of its pods.
const MAX_NAME: usize = 63;

/// Record of a copy's image.
#[serde_with::skip_serializing_none]
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct CopyRecord {
    /// Image of the copy, or its images ([`images_text`]).
    pub(super) image: String,
    /// Time at which the image was set.
    pub(super) at: Timestamp,
    /// Whether a pod with the image has become ready. Until then, only one node at a time tries the image.
    #[serde(default)]
    pub(super) good: bool,
    /// Previous good image.
    pub(super) previous: Option<String>,
    /// Image whose pods did not become ready; it is not set again.
    pub(super) failed: Option<FailedImage>,
    /// Farrier that set the image; empty in older records.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(super) by: String,
}

/// Image whose pods did not become ready in time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct FailedImage {
    pub(super) image: String,
    pub(super) why: String,
}

impl FailedImage {
    /// Returns the hold of the rollout.
    pub(super) fn hold(&self, kernel: &KernelTarget) -> HoldReason {
        HoldReason::CopyFailed {
            kernel: kernel.to_string(),
            image: self.image.clone(),
            why: self.why.clone(),
        }
    }
}

impl CopyRecord {
    /// Creates the record of an image that is set now.
    pub(super) fn new(image: String, previous: Option<String>, at: Timestamp, by: &Instance) -> Self {
        Self { image, at, good: false, previous, failed: None, by: by.to_string() }
    }

    /// Whether the copy has no working image.
    pub(super) fn is_failed(&self) -> bool {
        !self.good && self.failed.as_ref().is_some_and(|failed| failed.image == self.image)
    }
}

/// Returns the text that names the images of containers: the image that all of them have, or else `container=image` for
/// each, separated by spaces.
pub(super) fn images_text(images: &BTreeMap<&str, String>) -> String {
    let mut all = images.values();
    match all.next() {
        Some(first) if all.all(|image| image == first) => first.clone(),
        _ => images.iter().map(|(name, image)| format!("{name}={image}")).collect::<Vec<_>>().join(" "),
    }
}

/// Returns the image of a container in the text of [`images_text`].
pub(super) fn image_in<'t>(text: &'t str, container: &str) -> Option<&'t str> {
    if !text.contains('=') {
        return Some(text);
    }
    let mut pairs = text.split(' ').filter_map(|pair| pair.split_once('='));
    pairs.find(|(name, _)| *name == container).map(|(_, image)| image)
}

/// Copy that exists in the cluster.
#[derive(Clone, Debug)]
pub(in crate::plan) struct LiveCopy<'a> {
    pub(super) facts: &'a DaemonSetFacts,
    pub(in crate::plan) live: &'a LiveDaemonSet,
    pub(super) target: KernelTarget,
    pub(super) record: Option<CopyRecord>,
    /// Time since which no node runs the copy's kernel.
    pub(in crate::plan) unused_since: Option<Timestamp>,
}

/// Desired state of a copy.
#[derive(Clone, Debug)]
pub(super) struct DesiredCopy<'a> {
    pub(super) original: &'a DaemonSetFacts,
    pub(super) containers: &'a [&'a str],
    /// Handover label of the copy's nodes.
    pub(super) handover: &'a str,
    pub(super) name: &'a str,
    pub(super) target: &'a KernelTarget,
    pub(super) record: &'a CopyRecord,
    pub(super) unused_since: Option<Timestamp>,
}

/// Returns the name of the original DaemonSet, if this DaemonSet is a copy.
pub(super) fn original_of(live: &LiveDaemonSet) -> Option<String> {
    live.labels.get(COPY_OF_LABEL)?;
    let owners = live.manifest.pointer("/metadata/ownerReferences")?.as_array()?;
    let owner = owners.iter().find(|owner| owner["kind"] == "DaemonSet")?;
    owner["name"].as_str().map(str::to_owned)
}

/// Returns the value of the label that names a copy's original.
pub(super) fn copy_of_value(original: &DaemonSetFacts) -> String {
    let name = &original.name;
    if name.len() <= MAX_NAME {
        return name.clone();
    }
    shortened(name, &short_hash(&[name]))
}

impl DaemonSetFacts {
    /// Whether farrier created this DaemonSet for one kernel, as a copy of `original`.
    pub fn is_copy_of(&self, original: &Self) -> bool {
        let copy_of = self.live.as_ref().and_then(|live| live.labels.get(COPY_OF_LABEL));
        self.namespace == original.namespace && copy_of == Some(&copy_of_value(original))
    }
}

/// Returns the name of a new copy.
pub(super) fn copy_name(original: &DaemonSetFacts, target: &KernelTarget) -> Option<String> {
    let KernelTarget { os, os_version, release, arch } = target;
    let label = KernelLabel::of(release)?;
    let parts = [&original.name, os.as_str(), os_version.as_str(), label.as_str(), arch.as_str()];
    let sanitize = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let text: String = format!("{}-{label}", original.name).chars().map(sanitize).collect();
    Some(shortened(&text, &short_hash(&parts)))
}

fn shortened(text: &str, hash: &str) -> String {
    let end = text.len().min(MAX_NAME - hash.len() - 1);
    format!("{}-{hash}", text[..end].trim_end_matches(['-', '.', '_']))
}

/// Returns the parts of a target that determine the name of its copy. Two releases with the same kernel label share a
/// name.
pub(super) fn name_parts(target: &KernelTarget) -> impl PartialEq + use<'_> {
    let KernelTarget { os, os_version, release, arch } = target;
    (os, os_version, KernelLabel::of(release), arch)
}

/// Reads a DaemonSet that is labeled as a copy of `original`; `None` for any other DaemonSet, or if parsing fails.
fn read_copy<'a>(original: &DaemonSetFacts, facts: &'a DaemonSetFacts) -> Option<LiveCopy<'a>> {
    let live = facts.live.as_ref().filter(|_| facts.is_copy_of(original))?;
    let target = KernelTarget {
        os: facts.placement.node_selector.get(OS_ID_LABEL)?.parse().ok()?,
        os_version: facts.placement.node_selector.get(OS_VERSION_LABEL)?.parse().ok()?,
        release: live.annotations.get(RELEASE)?.parse().ok()?,
        arch: facts.placement.node_selector.get(ARCH_LABEL)?.parse().ok()?,
    };
    let record =
        live.annotations.get(COPY_RECORD_ANNOTATION).and_then(|text| serde_json::from_str(text).ok());
    let unused_since = live.annotations.get(UNUSED_SINCE).and_then(|text| text.parse().ok());
    Some(LiveCopy { facts, live, target, record, unused_since })
}

/// Returns all copies of a DaemonSet.
pub(in crate::plan) fn copies_of<'a>(
    original: &DaemonSetFacts,
    all: &'a [DaemonSetFacts],
) -> impl Iterator<Item = LiveCopy<'a>> {
    all.iter().filter_map(|facts| read_copy(original, facts))
}

/// Whether the manifest gives a copy a different image than before.
pub(super) fn changes_image(manifest: &Value, before: &DaemonSetFacts) -> bool {
    let record = manifest["metadata"]["annotations"][COPY_RECORD_ANNOTATION].as_str();
    let record: Option<CopyRecord> = record.and_then(|text| serde_json::from_str(text).ok());
    record.is_some_and(|record| {
        let is_same = |container: &&Container| {
            image_in(&record.image, &container.name)
                .is_some_and(|image| is_same_image(image, &container.image))
        };
        let unchanged = before.containers.iter().filter(is_same).count();
        unchanged < record.image.split(' ').count()
    })
}

impl LiveCopy<'_> {
    /// Time at which the copy got its image, if the image is neither good nor failed yet.
    pub(in crate::plan) fn watched_since(&self) -> Option<Timestamp> {
        let record = self.record.as_ref().filter(|record| !record.good && !record.is_failed())?;
        Some(record.at)
    }

    /// Returns the copy's image that failed, if the copy has no working image.
    pub(super) fn failure(&self) -> Option<&FailedImage> {
        self.record.as_ref().filter(|record| record.is_failed())?.failed.as_ref()
    }

    /// Whether this original owns the copy, by UID. Kubernetes deletes the copies of a deleted DaemonSet of the same name.
    pub(super) fn belongs_to(&self, original: &LiveDaemonSet) -> bool {
        let owners = self.live.manifest.pointer("/metadata/ownerReferences").and_then(Value::as_array);
        owners.into_iter().flatten().any(|owner| owner["uid"] == original.version.uid.as_str())
    }

    /// Returns the image of these containers, or their images ([`images_text`]).
    pub(super) fn image(&self, containers: &[&str]) -> Option<String> {
        let mut images = BTreeMap::new();
        for container in containers {
            images.insert(*container, self.facts.image_of(container)?.to_owned());
        }
        Some(images_text(&images))
    }

    /// Whether these containers have the images of the text ([`images_text`]).
    pub(super) fn has_images(&self, containers: &[&str], text: &str) -> bool {
        containers.iter().all(|container| {
            let images = self.facts.image_of(container).zip(image_in(text, container));
            images.is_some_and(|(current, image)| is_same_image(current, image))
        })
    }

    /// Whether the copy has farrier's annotations of `manifest`. The hash among them covers the rest of the object.
    pub(super) fn matches(&self, manifest: &Value) -> bool {
        let desired = &manifest["metadata"]["annotations"];
        [RELEASE, APPLIED, UNUSED_SINCE, COPY_RECORD_ANNOTATION].into_iter().all(|key| {
            desired.get(key).and_then(Value::as_str) == self.live.annotations.get(key).map(String::as_str)
        })
    }
}

/// Returns the whole object to apply; `None` where the original is malformed.
pub(super) fn manifest(desired: &DesiredCopy<'_>) -> Option<Arc<Value>> {
    let DesiredCopy { original, containers, handover, name, target, record, unused_since } = desired;
    let live = original.live.as_ref()?;
    let kernel = KernelLabel::of(&target.release)?;
    let copy_labels = [(COPY_OF_LABEL, copy_of_value(original)), (COPY_KERNEL_LABEL, kernel.to_string())];

    let original_spec = live.manifest.get("spec")?.as_object()?;
    let mut spec = Map::new();
    for key in ["minReadySeconds", "revisionHistoryLimit", "selector", "template"] {
        if let Some(value) = original_spec.get(key) {
            spec.insert(key.to_owned(), value.clone());
        }
    }
    if let Some(strategy) = original_spec.get("updateStrategy") {
        spec.insert("updateStrategy".to_owned(), without_surge(strategy));
    }
    let selector = entry(&mut spec, "selector")?;
    let original_selector = selector.clone();
    insert_all(entry(selector, "matchLabels")?, &copy_labels);
    let template = entry(&mut spec, "template")?;
    let template_meta = entry(template, "metadata")?;
    template_meta.remove("creationTimestamp");
    insert_all(entry(template_meta, "labels")?, &copy_labels);
    let pod = entry(template, "spec")?;
    for container in *containers {
        set_image(pod, container, image_in(&record.image, container)?);
    }
    let selectors = [
        (KERNEL_LABEL, kernel.to_string()),
        (OS_ID_LABEL, target.os.to_string()),
        (OS_VERSION_LABEL, target.os_version.to_string()),
        (ARCH_LABEL, target.arch.to_string()),
        (*handover, HANDED_OVER.to_owned()),
    ];
    insert_all(entry(pod, "nodeSelector")?, &selectors);
    let affinity = entry(pod, "affinity")?;
    remove_fence(affinity, handover);
    repel_pods(affinity, &original_selector)?;

    let mut object = json!({
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {
            "namespace": original.namespace,
            "name": name,
            // Do not copy the original's own labels: a Helm release or an Argo application would take the copy for one
            // of its objects.
            "labels": {
                "app.kubernetes.io/managed-by": "farrier",
                COPY_OF_LABEL: copy_labels[0].1,
                COPY_KERNEL_LABEL: copy_labels[1].1,
            },
            "ownerReferences": [{
                "apiVersion": "apps/v1",
                "kind": "DaemonSet",
                "name": original.name,
                "uid": live.version.uid,
            }],
        },
        "spec": spec,
    });
    // Sort the keys at every level, whether or not serde_json was built to preserve their order.
    let mut canonical = object.clone();
    canonical.sort_all_objects();
    let mut hash = FieldHasher::new("farrier.dev/copy/1");
    hash.add("object", canonical.to_string());
    let mut annotations = json!({
        RELEASE: target.release.as_str(),
        APPLIED: hash.finish().to_string(),
        COPY_RECORD_ANNOTATION: serde_json::to_string(record).ok()?,
    });
    if let Some(since) = unused_since {
        annotations[UNUSED_SINCE] = since.to_string().into();
    }
    object["metadata"]["annotations"] = annotations;
    Some(Arc::new(object))
}

/// Returns the object under a key, creating it if missing; `None` where the value is not an object.
fn entry<'a>(map: &'a mut Map<String, Value>, key: &str) -> Option<&'a mut Map<String, Value>> {
    let value = map.entry(key).or_insert_with(|| Value::Object(Map::new()));
    if value.is_null() {
        *value = Value::Object(Map::new());
    }
    value.as_object_mut()
}

fn insert_all(map: &mut Map<String, Value>, pairs: &[(&str, String)]) {
    map.extend(pairs.iter().map(|(key, value)| ((*key).to_owned(), value.as_str().into())));
}

fn set_image(pod: &mut Map<String, Value>, container: &str, image: &str) {
    for list in ["initContainers", "containers"] {
        let containers = pod.get_mut(list).and_then(Value::as_array_mut);
        for spec in containers.into_iter().flatten().filter(|spec| spec["name"] == container) {
            spec["image"] = image.into();
        }
    }
}

/// Replaces `maxSurge` by `maxUnavailable`. The copies' pods repel each other, so a new pod could never be scheduled
/// beside the old one on the same node.
fn without_surge(strategy: &Value) -> Value {
    let mut strategy = strategy.clone();
    if let Some(rolling) = strategy.get_mut("rollingUpdate").and_then(Value::as_object_mut) {
        let surge = rolling.remove("maxSurge").filter(|surge| *surge != json!(0) && *surge != json!("0%"));
        if let Some(surge) = surge {
            rolling.insert("maxUnavailable".to_owned(), surge);
        }
    }
    strategy
}

/// Removes the fence, the requirement that keeps the original off handed-over nodes, from a copy's affinity.
fn remove_fence(affinity: &mut Map<String, Value>, handover: &str) {
    const REQUIRED: &str = "requiredDuringSchedulingIgnoredDuringExecution";
    let Some(node) = affinity.get_mut("nodeAffinity").and_then(Value::as_object_mut) else { return };
    let terms = node.get_mut(REQUIRED).and_then(|required| required.get_mut("nodeSelectorTerms"));
    let Some(terms) = terms.and_then(Value::as_array_mut) else { return };
    let mut is_unrestricted = false;
    for term in terms.iter_mut().filter_map(Value::as_object_mut) {
        let Some(expressions) = term.get_mut("matchExpressions").and_then(Value::as_array_mut) else {
            continue;
        };
        let count = expressions.len();
        expressions.retain(|entry| entry["key"] != handover || entry["operator"] != "DoesNotExist");
        let removed = expressions.len() < count;
        term.retain(|_, list| list.as_array().is_none_or(|list| !list.is_empty()));
        is_unrestricted |= removed && term.is_empty();
    }
    // A term with nothing but the fence means that the original had no affinity.
    if is_unrestricted {
        node.remove(REQUIRED);
    }
    if node.is_empty() {
        affinity.remove("nodeAffinity");
    }
}

/// Adds a pod anti-affinity, so that no node has two driver pods: the scheduler waits until the old pod is gone. The
/// scheduler also honors the anti-affinity of running pods, so the original's pods wait for the copies' pods in the
/// same way. `original_selector` selects the pods of the original and of all copies; an empty selector would select
/// every pod of the namespace.
fn repel_pods(affinity: &mut Map<String, Value>, original_selector: &Map<String, Value>) -> Option<()> {
    let pods = entry(affinity, "podAntiAffinity")?;
    let required = pods
        .entry("requiredDuringSchedulingIgnoredDuringExecution")
        .or_insert_with(|| Value::Array(Vec::new()));
    required.as_array_mut()?.push(json!({
        "labelSelector": original_selector,
        "topologyKey": "kubernetes.io/hostname",
    }));
    Some(())
}

#[cfg(test)]
#[path = "copy/tests.rs"]
mod tests;
