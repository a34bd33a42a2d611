//! Reasons for a build, and for leaving an image field as it is. Each has a human-readable text (`Display`)
//! and a stable kebab-case identifier (the `reason` field of the JSON form).

use std::collections::BTreeMap;

use serde::Serialize;

use super::{
    NodeFacts, NodeReason, ObservedKind, Owner, PAUSED_ANNOTATION, RECORD_ANNOTATION,
    labels::COPY_RECORD_ANNOTATION, reach::MissingLabel,
};
use crate::{
    image::{ImageName, ImageReference, InputHash},
    kmod::Verdict,
    shell::shell_word,
    text,
};

/// Reason for building an image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum BuildReason {
    /// The registry does not have the tag.
    #[error("not in the registry")]
    NotPublished,
    /// The tag points to an image with other inputs (`theirs`, if it has an input hash), and the definition says
    /// `onConflict: overwrite`.
    #[error("{} (onConflict: overwrite)", changed_inputs(.theirs.as_ref()))]
    Overwrite { theirs: Option<InputHash> },
    /// The last attempt failed with a transient error.
    #[error("tried at {at:.0} and failed for a transient reason: {detail}")]
    RetryAfterFailure { at: jiff::Timestamp, detail: String },
}

/// Node that is not ready and contributes to a hold.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, derive_more::Display)]
#[display(
    "node {node} is not ready{}; repair it, delete it, or let ignoreNodes in site.yaml ignore it (notReadyFor)",
    since.map(|since| format!(" since {since:.0}")).unwrap_or_default()
)]
pub struct NotReadyNode {
    /// Name of the node.
    pub node: String,
    /// Time since which the node is not ready, if known.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub since: Option<jiff::Timestamp>,
}

impl NotReadyNode {
    /// Returns the node that became not ready first.
    pub(super) fn first<'a>(nodes: impl IntoIterator<Item = &'a NodeFacts>) -> Option<Self> {
        let not_ready = nodes.into_iter().filter(|node| node.not_ready);
        let first = not_ready.min_by_key(|node| (node.ready_changed, &node.name))?;
        Some(Self { node: first.name.clone(), since: first.ready_changed })
    }
}

/// Reason for leaving an image field as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum HoldReason {
    /// The cluster or directory has no such DaemonSet.
    #[error("there is no such DaemonSet{}", did_you_mean(.nearest.as_deref()))]
    NotFound {
        #[serde(skip_serializing_if = "Option::is_none")]
        nearest: Option<String>,
    },
    /// The manifests have no such object, and some of them were skipped.
    #[error("there is no such object; skipped: {}{}", .skipped.join(", "), text::and_more(*.more))]
    NotInManifests { skipped: Vec<String>, more: usize },
    /// There are several objects of that name.
    #[error("there are {count} objects of this name")]
    Ambiguous { count: usize },
    /// The manifests could not be read.
    #[error("manifests cannot be read: {detail}")]
    Unreadable { detail: String },
    /// The DaemonSet has no such container, or two of them.
    #[error("the DaemonSet has {} container {container:?}; it has: {}", if .found.contains(.container) { "more than one" } else { "no" }, .found.join(", "))]
    NoContainer { container: String, found: Vec<String> },
    /// The image cannot be set where it is written, or would not be used there.
    #[error("its image cannot be set: {detail}")]
    Fixed { detail: String },
    /// Two rollouts of the definitions would write the same field.
    #[error("several rollouts name this container: {}", joined(.images))]
    ClaimedTwice { images: Vec<ImageName> },
    /// Two rollouts of the definitions would upgrade the same DaemonSet node by node.
    #[error("several rollouts of this DaemonSet have `upgrade`, but only one may: {}", joined(.images))]
    OrderedTwice { images: Vec<ImageName> },
    /// An operator owns the DaemonSet and would revert the image.
    #[error("{} {} owns the DaemonSet and would undo the change; {remedy}", .owner.kind, .owner.name)]
    Owned { owner: Owner, remedy: String },
    /// The DaemonSet's affinity is not understood, so the nodes that it reaches are unknown.
    #[error("its node affinity is not supported: {detail}")]
    Affinity { detail: String },
    /// The rollout reaches no node, so there is no kernel to choose the image for.
    #[error("it reaches no node")]
    NoNodes,
    /// The kernel of `count` reached nodes is unknown; `node` is the first of them.
    #[error(
        "{} of node {node}{}{} unknown: {why}{}", why.unknown_fact(), since_ready(*.ready_since), and_more(*.count), unknown_node_remedy(node, why, .not_ready.as_ref())
    )]
    UnknownNode {
        node: String,
        count: usize,
        why: NodeReason,
        #[serde(skip_serializing_if = "Option::is_none")]
        ready_since: Option<jiff::Timestamp>,
        #[serde(skip_serializing_if = "Option::is_none")]
        not_ready: Option<NotReadyNode>,
    },
    /// `count` nodes lack labels of NFD, or of the GPU Operator, and run a kernel that the image is not for. Once the nodes are
    /// labeled, the rollout may reach them. `node` is the first of the nodes, and lacks `label`.
    #[error(
        "node {node}{}{} has no label {} and runs {kernel}{}, which the image is not for: the rollout may reach the node once {} has labeled the node; add the label, or add the node to ignoreNodes in site.yaml{}", since_ready(*.ready_since), and_more(*.count), label.as_str(), on_system(.os_image), label.writer(), also(.not_ready.as_ref())
    )]
    Unlabeled {
        node: String,
        label: MissingLabel,
        count: usize,
        kernel: String,
        #[serde(skip_serializing_if = "String::is_empty")]
        os_image: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        ready_since: Option<jiff::Timestamp>,
        #[serde(skip_serializing_if = "Option::is_none")]
        not_ready: Option<NotReadyNode>,
    },
    /// The reached nodes run different kernels, and one image is for one kernel. `kernels` has the number of nodes per
    /// kernel.
    #[error("its nodes run different kernels: {}{}; {SEVERAL_KERNELS}", joined(.kernels.iter().map(|(kernel, nodes)| format!("{kernel} on {nodes}"))), also(.not_ready.as_ref()))]
    MixedKernels {
        kernels: BTreeMap<String, usize>,
        #[serde(skip_serializing_if = "Option::is_none")]
        not_ready: Option<NotReadyNode>,
    },
    /// There will be no image for the kernel in this reconcile.
    #[error("no image for {kernel}: {detail}")]
    NoImage { kernel: String, detail: String },
    /// The image exists, but its check report does not say that its modules load.
    #[error("{}", not_passed(.image, *.verdict))]
    NotPassed { image: ImageReference, verdict: Option<Verdict> },
    /// The image exists, but its verdict is `unknown`, and the definition says `check.unknown: deny`.
    #[error("the check of {image} says unknown, which its definition does not accept (check.unknown: deny)")]
    UnknownDenied { image: ImageReference },
    /// The image exists, but was made for another kernel release.
    #[error("{image} {}", made_for(.found.as_deref()))]
    OtherKernel { image: ImageReference, found: Option<String> },
    /// farrier lacks access to these objects.
    #[error("{what} cannot be seen: {detail}")]
    Unseen { what: ObservedKind, detail: String },
    /// The DaemonSet controller itself replaces pods, in any order.
    #[error(
        "`upgrade` needs updateStrategy.type OnDelete in the DaemonSet; RollingUpdate replaces pods by itself"
    )]
    NotOnDelete,
    /// The object is being deleted.
    #[error("it is being deleted")]
    Deleting,
    /// farrier's record in the object cannot be parsed, so the history is unknown.
    #[error("its annotation {RECORD_ANNOTATION} cannot be read: {detail}; remove the annotation to reset it")]
    BadRecord { detail: String },
    /// Another writer reverted farrier's value, and would do so again.
    #[error(
        "another writer reverted the field {times} times, so farrier stopped writing the field; find that writer (a GitOps tool, Helm, an operator, an admission webhook), then remove the annotation {RECORD_ANNOTATION}, or restart farrier where there is no annotation, as in a file or a repository"
    )]
    ChangedBack { times: u32 },
    /// The API server accepted a write and did not keep the field. Set by the loop, which writes again an hour later.
    #[error(
        "the API server did not keep the {field} that farrier set, so an admission webhook changes it: exempt the DaemonSet from the webhook (`kubectl get mutatingwebhookconfigurations`); farrier tries again after an hour or a restart"
    )]
    NotKept { field: String },
    /// Another instance of farrier set the field to another value, and would do so again.
    #[error(
        "{name}, another farrier instance in this cluster, set the field to another value: remove the rollout from the definitions of one instance; to take over the field, remove the annotation {RECORD_ANNOTATION}"
    )]
    OtherInstance { name: String },
    /// Another instance of farrier set the images of the copies, and would do so again.
    #[error(
        "{name}, another farrier instance in this cluster, owns the copies, such as DaemonSet {copy}: remove the rollout from the definitions of one instance; to take over the copies, remove the annotation {COPY_RECORD_ANNOTATION} from each"
    )]
    OtherInstanceCopies { name: String, copy: String },
    /// The first pods with this image did not become ready, and the previous value was restored.
    #[error(
        "the pods did not become ready with the image set at {at:.0}, and the previous image was restored: {why}; farrier waits for another image, or for the removal of the annotation {RECORD_ANNOTATION}"
    )]
    RolloutFailed { at: jiff::Timestamp, why: String },
    /// The first pods with this image did not become ready, and the previous image is for another kernel.
    #[error(
        "the pods did not become ready with the image set at {at:.0}: {why}; the previous image was not restored, because it has no modules for {kernel}; correct the cause, or publish another image"
    )]
    NotRestored { at: jiff::Timestamp, why: String, kernel: String },
    /// `farrier rollback` restored the value from before this image.
    #[error(
        "farrier rollback reverted what was set at {at:.0}; farrier waits for another image, or for the removal of the annotation {RECORD_ANNOTATION}"
    )]
    RolledBack { at: jiff::Timestamp },
    /// The cluster has no such operator's resource.
    #[error("there is no such resource{}", did_you_mean(.nearest.as_deref()))]
    NoResource {
        #[serde(skip_serializing_if = "Option::is_none")]
        nearest: Option<String>,
    },
    /// The resource says that its operator installs no driver.
    #[error("the operator's driver is disabled: {detail}")]
    DriverOff { detail: String },
    /// The operator refuses precompiled drivers together with another component of the resource.
    #[error(
        "the GPU Operator refuses precompiled drivers while {field} is true; add the component to the driver image, and disable the component in the resource"
    )]
    RefusedTogether { field: &'static str },
    /// None of the image's tags has the form that the operator computes.
    #[error(
        "the operator would look for a tag that ends in {looked_for}, which {image} does not; add {pattern:?} to `tags`"
    )]
    TagForm { image: ImageReference, looked_for: String, pattern: &'static str },
    /// The resource has one version, but the kernels need several: kernel targets by version.
    #[error("the resource has one version, and its kernels need several: {}", joined(.versions.iter().map(|(version, kernels)| format!("{version} for {}", kernels.join(" and ")))))]
    MixedVersions { versions: BTreeMap<String, Vec<String>> },
    /// The GPU Operator gives all nodes of a ClusterPolicy the tag of one operating system, and the nodes with GPUs have several.
    #[error(
        "the GPU Operator looks for the tag of one operating system, whichever node it sees first, and the nodes with GPUs have {}; use NVIDIADriver resources (spec.driver.useNvidiaDriverCRD: true)", joined(.systems)
    )]
    MixedSystems { systems: Vec<String> },
    /// A field of the resource does not fit precompiled drivers, and is immutable.
    #[error(
        "{field} is not {needed} and is immutable; create a new resource with {field}: {needed} and delete the old resource"
    )]
    Immutable { field: &'static str, needed: bool },
    /// The operator is replacing drivers on `count` nodes, one by one; `node` is the first of them.
    #[error("its operator is replacing drivers: node {node} is in state {state:?}{}", under_way(*.count))]
    UpgradeInProgress { node: String, state: String, count: usize },
    /// Images go to a layout directory, from which no node can pull.
    #[error("nodes cannot pull from a layout directory")]
    NotPullable,
    /// The target was rewritten several times within a minute. Set by the loop, which waits for the writes to cease.
    #[error(
        "the target was rewritten several times within a minute, because of a flapping node or another writer; farrier waits until the writes stop"
    )]
    TooOften,
    /// The API server currently refuses to evict a pod. Set by the loop, which retries.
    #[error("it waits for a PodDisruptionBudget: {detail}")]
    Disruption { detail: String },
    /// This farrier does not write in the DaemonSet's namespace.
    #[error(
        "farrier does not write in namespace {namespace}; add it to --write-namespaces (Helm: rbac.writeNamespaces), and grant the rights there"
    )]
    NotWritable { namespace: String },
    /// The strategy, or `upgrade`, needs a running cluster.
    #[error(
        "per-kernel, union and `upgrade` need a running cluster; in a directory of manifests, use one DaemonSet and rollout for each kernel"
    )]
    OnlyLive,
    /// Another writer removes the requirement that keeps the original DaemonSet off handed-over nodes.
    #[error(
        "its node affinity was reverted {times} times; make the other writer keep the requirement on farrier.dev/driver..., or leave spec.template.spec.affinity to farrier"
    )]
    FenceUndone { times: u32 },
    /// The pods of a kernel's DaemonSet did not become ready.
    #[error("{image} did not work for {kernel}: {why}; it is not retried until there is another image")]
    CopyFailed { kernel: String, image: String, why: String },
    /// A kernel's DaemonSet lost its owner, as after `kubectl delete --cascade=orphan` of the original DaemonSet.
    #[error(
        "DaemonSet {copy} is a copy that lost its owner, so farrier does not update it; delete DaemonSet {copy}, and farrier creates another copy"
    )]
    CopyWithoutOwner { copy: String },
    /// No key that the policy accepts has signed the image, which is named by digest.
    #[error("{image} does not satisfy policy.requireSigned: {why}")]
    NotSigned { image: ImageReference, why: String },
    /// There is no single image for all the kernels.
    #[error("there is no single image for all kernels: {detail}")]
    NoUnion { detail: String },
    /// A person rolled back the `per-kernel` rollout.
    #[error("it was rolled back; remove its annotation farrier.dev/per-kernel to roll it out again")]
    CopiesRolledBack,
    /// A person paused the rollout.
    #[error("it is paused; to resume, remove its annotation {PAUSED_ANNOTATION} or set it to \"false\"")]
    Paused,
    /// The Git repository has the image, but the cluster does not have it yet.
    #[error("the repository has the image, but the cluster has not applied it yet: {found}")]
    NotSynced { found: String },
    /// The live DaemonSet reaches other nodes than the one in the manifest. Each field names the nodes that only one of
    /// them reaches.
    #[error(
        "the object in the cluster does not reach the same nodes as its manifest, so the image for them is unknown: only the cluster's reaches {cluster}, only the manifest's reaches {manifest}; let the manifest select the nodes that the cluster's object selects"
    )]
    ReachDiffers { cluster: String, manifest: String },
    /// A branch with the change waits for its pull request.
    #[error("branch {branch} has the change and waits to be merged")]
    Proposed { branch: String },
    /// Another image of the chain cannot be rolled out, and the images of a chain are rolled out together or not at
    /// all.
    #[error("images of a chain are rolled out together, and {image} is on hold: {why}")]
    Chain { image: ImageName, why: String },
}

impl HoldReason {
    /// The object that a rollout or a command names does not exist, and none has a similar name.
    pub const NOT_FOUND: Self = Self::NotFound { nearest: None };

    /// Whether the target is broken. Targets that the strategy does not fit, or that merely wait, are not.
    pub fn is_failure(&self) -> bool {
        !matches!(
            self,
            Self::Owned { .. }
                | Self::Affinity { .. }
                | Self::NoNodes
                | Self::UnknownNode { .. }
                | Self::Unlabeled { .. }
                | Self::MixedKernels { .. }
                | Self::NoImage { .. }
                | Self::Deleting
                | Self::RolledBack { .. }
                | Self::DriverOff { .. }
                | Self::UpgradeInProgress { .. }
                | Self::CopiesRolledBack
                | Self::Paused
                | Self::Chain { .. }
                | Self::TooOften
                | Self::Disruption { .. }
                | Self::NotPullable
                | Self::NotSynced { .. }
                | Self::ReachDiffers { .. }
                | Self::Proposed { .. }
        )
    }

    /// Returns the remedy, unless the text names it.
    pub fn hint(&self) -> Option<&'static str> {
        match self {
            Self::NotFound { .. } => Some(
                "create the DaemonSet, and its namespace where that is missing; or correct `rollout` in the definition",
            ),
            Self::NoResource { .. } => Some("create the resource, or correct `rollout` in the definition"),
            _ => None,
        }
    }

    /// Whether the set value did not last, and the rollout waits for a person or for another image.
    pub fn is_given_up(&self) -> bool {
        matches!(
            self,
            Self::RolledBack { .. }
                | Self::CopiesRolledBack
                | Self::RolloutFailed { .. }
                | Self::ChangedBack { .. }
        )
    }

    /// Whether the object that the rollout names does not exist.
    pub(super) fn is_absence(&self) -> bool {
        matches!(self, Self::NotFound { .. } | Self::NotInManifests { .. } | Self::NoResource { .. })
    }
}

/// Remedy for nodes with different kernels.
const SEVERAL_KERNELS: &str = "use `strategy: per-kernel` or `union`, which need a running cluster, or one DaemonSet and rollout for each kernel";

fn did_you_mean(nearest: Option<&str>) -> String {
    let Some(nearest) = nearest else { return String::new() };
    let without_namespace = if nearest.starts_with("default/") {
        " A manifest without a namespace counts as `default`: name the namespace in the manifest"
    } else {
        ""
    };
    format!("; did you mean {nearest}?{without_namespace}")
}

/// Formats a node that is not ready, to append to another text.
fn also(not_ready: Option<&NotReadyNode>) -> String {
    not_ready.map(|node| format!("; {node}")).unwrap_or_default()
}

/// Formats the time since which a node is ready, to append to its name.
fn since_ready(since: Option<jiff::Timestamp>) -> String {
    since.map(|since| format!(", ready since {since:.0},")).unwrap_or_default()
}

/// Formats the operating system of a node, to append to its kernel.
fn on_system(os_image: &str) -> String {
    if os_image.is_empty() { String::new() } else { format!(" on {os_image}") }
}

/// Formats the remedy for a node with an unknown kernel, to append to another text.
fn unknown_node_remedy(node: &str, why: &NodeReason, not_ready: Option<&NotReadyNode>) -> String {
    let is_node_fault = matches!(why, NodeReason::Malformed { .. } | NodeReason::DefinedTwice);
    let (subject, name) = (if is_node_fault { "the node" } else { "its labels" }, shell_word(node));
    let remedy =
        format!("; correct {subject} (`farrier why node/{name}`), or let ignoreNodes in site.yaml ignore it");
    not_ready.map_or(remedy, |node| also(Some(node)))
}

/// Joins the items with commas.
fn joined<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

/// Formats how many of `count` nodes follow the first one, to append to its name.
pub(super) fn and_more(count: usize) -> String {
    text::and_more(count.saturating_sub(1))
}

fn under_way(count: usize) -> String {
    if count > 1 { format!(", and {} more are under way", count - 1) } else { String::new() }
}

fn changed_inputs(theirs: Option<&InputHash>) -> String {
    theirs.map_or("the tag holds an image built from unknown inputs".to_owned(), |theirs| {
        format!("inputs changed since {}", theirs.short())
    })
}

fn not_passed(image: &ImageReference, verdict: Option<Verdict>) -> String {
    verdict.map_or(format!("{image} has no check report"), |verdict| {
        format!("the check of {image} says {verdict}")
    })
}

fn made_for(found: Option<&str>) -> String {
    found.map_or("does not declare its kernel".to_owned(), |found| format!("was built for kernel {found:?}"))
}
