//! Pure: why something is, or is not, built or rolled out: for people (`Display`) and for programs (the
//! `reason` field of the JSON form, stable words in kebab case).

use std::collections::BTreeMap;

use serde::Serialize;

use super::{NodeReason, Owner, PAUSED_ANNOTATION, RECORD_ANNOTATION, Seen};
use crate::{
    image::{ImageName, ImageReference, InputHash},
    kmod::Verdict,
};

/// Why an image is built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum BuildReason {
    /// The tag is not there.
    #[error("not in the registry")]
    NotPublished,
    /// The tag is there with other inputs (`theirs`, if it has an input hash), and the definition says `onConflict: overwrite`.
    #[error("{} (onConflict: overwrite)", changed_inputs(.theirs.as_ref()))]
    Overwrite { theirs: Option<InputHash> },
    /// The last try failed for a reason that passes.
    #[error("tried at {at:.0} and failed for a transient reason: {detail}")]
    RetryAfterFailure { at: jiff::Timestamp, detail: String },
}

/// Why an image field is left as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum HoldReason {
    /// The cluster or directory has no such DaemonSet.
    #[error("there is no such DaemonSet")]
    NotFound,
    /// It has several of that name.
    #[error("there are {count} DaemonSets of this name")]
    Ambiguous { count: usize },
    /// The manifests could not be read.
    #[error("manifests cannot be read: {detail}")]
    Unreadable { detail: String },
    /// The DaemonSet has no such container, or two of them.
    #[error("the DaemonSet has not exactly one such container; it has {}", .found.join(", "))]
    NoContainer { found: Vec<String> },
    /// The container's image cannot be set where it is written.
    #[error("its image cannot be set: {detail}")]
    Fixed { detail: String },
    /// Two rollouts of the definitions would write the same field.
    #[error("several rollouts name this container: {}", joined(.images))]
    ClaimedTwice { images: Vec<ImageName> },
    /// Two rollouts of the definitions would upgrade the same DaemonSet in order.
    #[error("several rollouts of this DaemonSet have `upgrade`, and one may: {}", joined(.images))]
    OrderedTwice { images: Vec<ImageName> },
    /// An operator owns the DaemonSet and would put its own image back.
    #[error("{} {} owns the DaemonSet and would undo the change; {remedy}", .owner.kind, .owner.name)]
    Owned { owner: Owner, remedy: String },
    /// The DaemonSet's affinity is not understood, so neither is which nodes it reaches.
    #[error("its node affinity is not understood: {detail}")]
    Affinity { detail: String },
    /// No node is reached, so there is no kernel to choose the image for.
    #[error("it reaches no node")]
    NoNodes,
    /// The kernel of `count` reached nodes is not known; `node` is the first of them.
    #[error("kernel of node {node}{} unknown: {why}", and_more(*.count))]
    UnknownNode { node: String, count: usize, why: NodeReason },
    /// The reached nodes run different kernels, each on so many of them, and one image is for one kernel.
    #[error("its nodes run different kernels: {}", joined(.kernels.iter().map(|(kernel, nodes)| format!("{kernel} on {nodes}"))))]
    MixedKernels { kernels: BTreeMap<String, usize> },
    /// There will be no image for that kernel in this pass.
    #[error("no image for {kernel}: {detail}")]
    NoImage { kernel: String, detail: String },
    /// The image is there, but its check report does not say that its modules load.
    #[error("{}", not_passed(.image, *.verdict))]
    NotPassed { image: ImageReference, verdict: Option<Verdict> },
    /// The image is there, but it is not known whether its modules load, and the definition says
    /// `check.unknown: deny`.
    #[error("the check of {image} says unknown, which its definition does not accept (check.unknown: deny)")]
    UnknownDenied { image: ImageReference },
    /// The image is there, but was made for another kernel release.
    #[error("{image} {}", made_for(.found.as_deref()))]
    OtherKernel { image: ImageReference, found: Option<String> },
    /// The cluster's answer was not for farrier's eyes.
    #[error("{what} cannot be seen: {detail}")]
    Unseen { what: Seen, detail: String },
    /// Its controller replaces pods by itself, in whatever order.
    #[error(
        "`upgrade` needs updateStrategy.type OnDelete in the DaemonSet; RollingUpdate replaces pods by itself"
    )]
    NotOnDelete,
    /// The object is being deleted.
    #[error("it is being deleted")]
    Deleting,
    /// farrier's record in the object cannot be read, so what happened before is not known.
    #[error(
        "its annotation {RECORD_ANNOTATION} cannot be read: {detail}; remove the annotation to start anew"
    )]
    BadRecord { detail: String },
    /// Another writer changed farrier's value back, and would again.
    #[error(
        "another writer changed it back {times} times, so it is left; find out who writes it, then remove the annotation {RECORD_ANNOTATION}"
    )]
    ChangedBack { times: u32 },
    /// The first pods with this image did not get ready, and what was there before was put back.
    #[error(
        "the pods did not get ready with the image of {at:.0}, and the one before it was put back: {why}; it waits for another image, or for the annotation {RECORD_ANNOTATION} to be removed"
    )]
    RolloutFailed { at: jiff::Timestamp, why: String },
    /// `farrier rollback` put back what was there before this image.
    #[error(
        "farrier rollback took back what was set at {at:.0}; it waits for another image, or for the annotation {RECORD_ANNOTATION} to be removed"
    )]
    RolledBack { at: jiff::Timestamp },
    /// The cluster has no such operator's resource.
    #[error("there is no such resource")]
    NoResource,
    /// The resource says that its operator installs no driver.
    #[error("the operator's driver is switched off: {detail}")]
    DriverOff { detail: String },
    /// None of the image's tags has the form in which the operator computes it.
    #[error(
        "the operator would look for a tag that ends in {looked_for}, which {image} does not; add {pattern:?} to `tags`"
    )]
    TagForm { image: ImageReference, looked_for: String, pattern: &'static str },
    /// The resource has one version, and the images have several: kernel targets by version.
    #[error("the resource has one version, and its kernels need several: {}", joined(.versions.iter().map(|(version, kernels)| format!("{version} for {}", kernels.join(" and ")))))]
    MixedVersions { versions: BTreeMap<String, Vec<String>> },
    /// A field of the resource is not what precompiled drivers need, and can never be changed.
    #[error(
        "its {field} is not {needed} and can never be changed; make a new resource with {field}: {needed} and delete this one"
    )]
    Immutable { field: &'static str, needed: bool },
    /// The operator is replacing drivers on `count` nodes, one by one; `node` is the first of them.
    #[error("its operator is replacing drivers: node {node} is in state {state:?}{}", under_way(*.count))]
    UpgradeInProgress { node: String, state: String, count: usize },
    /// Images go to a layout directory, from which no node can pull.
    #[error("nodes cannot pull from a layout directory")]
    NotPullable,
    /// It was rewritten several times within a minute; said by the loop, which waits until things calm down.
    #[error(
        "it was rewritten several times within a minute, by a node that flaps or another writer; it waits until things calm down"
    )]
    TooOften,
    /// The API server does not evict a pod now; said by the loop, which asks again.
    #[error("it waits for a PodDisruptionBudget: {detail}")]
    Disruption { detail: String },
    /// This farrier does not write in the DaemonSet's namespace.
    #[error(
        "farrier does not write in namespace {namespace}; add it to --write-namespaces (Helm: rbac.writeNamespaces), with the rights there"
    )]
    NotWritable { namespace: String },
    /// The strategy needs a running cluster.
    #[error("this strategy needs a running cluster, not a directory of manifests")]
    OnlyLive,
    /// Another writer takes away again what keeps the DaemonSet off nodes that are handed over.
    #[error(
        "its node affinity was changed back {times} times; let whoever writes it keep the requirement on farrier.dev/driver..., or leave spec.template.spec.affinity to farrier"
    )]
    FenceUndone { times: u32 },
    /// The pods of a kernel's DaemonSet did not get ready.
    #[error("{image} did not work for {kernel}: {why}; it is not tried again until there is another image")]
    CopyFailed { kernel: String, image: String, why: String },
    /// No key that the policy accepts has signed the image, which is named by digest.
    #[error("{image} is not signed as policy.requireSigned asks: {why}")]
    NotSigned { image: ImageReference, why: String },
    /// There is no one image for all the kernels.
    #[error("there is no one image for all kernels: {detail}")]
    NoUnion { detail: String },
    /// A person took the rollout back.
    #[error("it was rolled back; remove its annotation farrier.dev/per-kernel to have it rolled out again")]
    CopiesRolledBack,
    /// A person paused it.
    #[error("it is paused; it goes on when its annotation {PAUSED_ANNOTATION} is removed, or is \"false\"")]
    Paused,
    /// Its Git repository has the image, and the cluster does not have it yet.
    #[error("the repository has the image, and the cluster has not taken it over yet: {found}")]
    NotSynced { found: String },
    /// A branch with the change waits for its pull request.
    #[error("branch {branch} has the change and waits to be merged")]
    Proposed { branch: String },
    /// Another image of its chain cannot be rolled out, and they go out together or not at all.
    #[error("its chain goes out together, and {image} is on hold: {why}")]
    Chain { image: ImageName, why: String },
}

impl HoldReason {
    /// Is the target broken, rather than of a shape that the strategy is not for or waits for?
    pub fn is_failure(&self) -> bool {
        !matches!(
            self,
            Self::Owned { .. }
                | Self::Affinity { .. }
                | Self::NoNodes
                | Self::UnknownNode { .. }
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
                | Self::Proposed { .. }
        )
    }

    /// Does it wait for a person, or for another image, after what was set did not stay?
    pub fn is_given_up(&self) -> bool {
        matches!(
            self,
            Self::RolledBack { .. }
                | Self::CopiesRolledBack
                | Self::RolloutFailed { .. }
                | Self::ChangedBack { .. }
        )
    }

    /// Is what the rollout names not there at all?
    pub(super) fn is_absence(&self) -> bool {
        matches!(self, Self::NotFound | Self::NoResource)
    }
}

/// With commas between them.
fn joined<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    items.into_iter().map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

/// What follows the name of the first of `count` nodes.
pub(super) fn and_more(count: usize) -> String {
    if count > 1 { format!(" and {} more", count - 1) } else { String::new() }
}

fn under_way(count: usize) -> String {
    if count > 1 { format!(", and {} more are under way", count - 1) } else { String::new() }
}

fn changed_inputs(theirs: Option<&InputHash>) -> String {
    theirs.map_or("the tag holds an image of unknown inputs".to_owned(), |theirs| {
        format!("inputs changed since {}", theirs.short())
    })
}

fn not_passed(image: &ImageReference, verdict: Option<Verdict>) -> String {
    verdict.map_or(format!("{image} has no check report"), |verdict| {
        format!("the check of {image} says {verdict}")
    })
}

fn made_for(found: Option<&str>) -> String {
    found.map_or("does not say for which kernel it is".to_owned(), |found| {
        format!("was made for kernel {found:?}")
    })
}
