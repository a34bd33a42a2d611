//! Pure: why something is, or is not, built or rolled out: for people (`Display`) and for programs (the
//! `reason` field of the JSON form, stable words in kebab case).

use std::{collections::BTreeMap, fmt};

use serde::Serialize;

use super::{NodeReason, Owner, RECORD_ANNOTATION, Seen};
use crate::image::{ImageName, ImageReference, InputHash};

/// Why an image is built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum BuildReason {
    /// The tag is not there.
    NotPublished,
    /// The tag is there with other inputs, and the definition says `onConflict: overwrite`.
    Overwrite {
        /// What is replaced: its input hash, if it has one.
        theirs: Option<InputHash>,
    },
    /// The last try failed for a reason that passes.
    RetryAfterFailure {
        /// When.
        at: jiff::Timestamp,
        /// How.
        detail: String,
    },
}

impl fmt::Display for BuildReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotPublished => f.write_str("not in the registry"),
            Self::Overwrite { theirs: Some(theirs) } => {
                write!(f, "inputs changed since {} (onConflict: overwrite)", theirs.short())
            }
            Self::Overwrite { theirs: None } => {
                f.write_str("the tag holds an image of unknown inputs (onConflict: overwrite)")
            }
            Self::RetryAfterFailure { at, detail } => {
                write!(f, "tried at {at:.0} and failed for a transient reason: {detail}")
            }
        }
    }
}

/// Why an image field is left as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum HoldReason {
    /// The cluster or directory has no such DaemonSet.
    NotFound,
    /// It has several of that name.
    Ambiguous {
        /// How many.
        count: usize,
    },
    /// The manifests could not be read.
    Unreadable {
        /// Why not.
        detail: String,
    },
    /// The DaemonSet has no such container, or two of them.
    NoContainer {
        /// The containers that it has.
        found: Vec<String>,
    },
    /// The container's image cannot be set where it is written.
    Fixed {
        /// Why not.
        detail: String,
    },
    /// Two rollouts of the definitions would write the same field.
    ClaimedTwice {
        /// The images whose rollouts these are.
        images: Vec<ImageName>,
    },
    /// An operator owns the DaemonSet and would put its own image back.
    Owned {
        /// The owner.
        owner: Owner,
        /// What to set instead.
        remedy: String,
    },
    /// The DaemonSet's affinity is not understood, so neither is which nodes it reaches.
    Affinity {
        /// What is not understood.
        detail: String,
    },
    /// No node is reached, so there is no kernel to choose the image for.
    NoNodes,
    /// A reached node's kernel is not known.
    UnknownNode {
        /// The first such node.
        node: String,
        /// How many there are.
        count: usize,
        /// Why its kernel is not known.
        why: NodeReason,
    },
    /// The reached nodes run different kernels, and one image is for one kernel.
    MixedKernels {
        /// Number of nodes by kernel target.
        kernels: BTreeMap<String, usize>,
    },
    /// There will be no image for that kernel in this pass.
    NoImage {
        /// The kernel target.
        kernel: String,
        /// Why not.
        detail: String,
    },
    /// The image is there, but its check report does not say that its modules load.
    NotPassed {
        /// The image.
        image: ImageReference,
        /// The verdict, if it has one.
        verdict: Option<crate::kmod::Verdict>,
    },
    /// The image is there, but it is not known whether its modules load, and the definition says
    /// `check.unknown: deny`.
    UnknownDenied {
        /// The image.
        image: ImageReference,
    },
    /// The image is there, but was made for another kernel release.
    OtherKernel {
        /// The image.
        image: ImageReference,
        /// The release that it says it is for.
        found: Option<String>,
    },
    /// The cluster's answer was not for farrier's eyes.
    Unseen {
        /// What cannot be seen.
        what: Seen,
        /// Why not, with what to do.
        detail: String,
    },
    /// The object is being deleted.
    Deleting,
    /// farrier's record in the object cannot be read, so what happened before is not known.
    BadRecord {
        /// What is wrong with it.
        detail: String,
    },
    /// Somebody else changed farrier's value back, and would again.
    ChangedBack {
        /// How often.
        times: u32,
    },
    /// The first pods with this image did not get ready, and what was there before was put back.
    RolloutFailed {
        /// When the image was set.
        at: jiff::Timestamp,
        /// Where, and what the pod said.
        why: String,
    },
    /// `farrier rollback` put back what was there before this image.
    RolledBack {
        /// When the image had been set.
        at: jiff::Timestamp,
    },
    /// The cluster has no such operator's resource.
    NoResource,
    /// The resource says that its operator installs no driver.
    DriverOff {
        /// The field that says so, and how.
        detail: String,
    },
    /// None of the image's tags has the form in which the operator computes it.
    TagForm {
        /// The tag that there is.
        image: ImageReference,
        /// What the operator would look for.
        looked_for: String,
        /// A pattern for `tags` that gives it.
        pattern: &'static str,
    },
    /// The resource has one version, and the images have several.
    MixedVersions {
        /// Kernel targets by version.
        versions: BTreeMap<String, Vec<String>>,
    },
    /// A field of the resource is not what precompiled drivers need, and can never be changed.
    Immutable {
        /// The field.
        field: &'static str,
        /// What it needs to be.
        needed: bool,
    },
    /// The operator is replacing drivers on nodes, one by one.
    UpgradeInProgress {
        /// The first such node.
        node: String,
        /// Its state.
        state: String,
        /// How many there are.
        count: usize,
    },
    /// Images go to a layout directory, from which no node can pull.
    NotPullable,
    /// It was rewritten several times within a minute; said by the loop, which waits until things calm down.
    TooOften,
    /// The strategy needs a running cluster.
    OnlyLive,
    /// Somebody else takes away again what keeps the DaemonSet off nodes that are handed over.
    FenceUndone {
        /// How often.
        times: u32,
    },
    /// The pods of a kernel's DaemonSet did not get ready.
    CopyFailed {
        /// The kernel target.
        kernel: String,
        /// The image.
        image: String,
        /// The node, and what its pod said.
        why: String,
    },
    /// No key that the policy accepts has signed the image.
    NotSigned {
        /// The image, by digest.
        image: ImageReference,
        /// What is wrong.
        why: String,
    },
    /// There is no one image for all the kernels.
    NoUnion {
        /// Why not.
        detail: String,
    },
    /// A person took the rollout back.
    CopiesRolledBack,
    /// Another image of its chain cannot be rolled out, and they go out together or not at all.
    Chain {
        /// The other image.
        image: ImageName,
        /// Why it cannot.
        why: String,
    },
}

impl HoldReason {
    /// Is the target broken, rather than of a shape that the strategy is not for or waits for?
    pub fn is_failure(&self) -> bool {
        match self {
            Self::NotFound
            | Self::Ambiguous { .. }
            | Self::Unreadable { .. }
            | Self::NoContainer { .. }
            | Self::Fixed { .. }
            | Self::ClaimedTwice { .. }
            | Self::NotPassed { .. }
            | Self::UnknownDenied { .. }
            | Self::NotSigned { .. }
            | Self::OtherKernel { .. }
            | Self::Unseen { .. }
            | Self::BadRecord { .. }
            | Self::ChangedBack { .. }
            | Self::RolloutFailed { .. }
            | Self::NoResource
            | Self::TagForm { .. }
            | Self::MixedVersions { .. }
            | Self::Immutable { .. }
            | Self::OnlyLive
            | Self::FenceUndone { .. }
            | Self::CopyFailed { .. }
            | Self::NoUnion { .. } => true,
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
            | Self::Chain { .. }
            | Self::TooOften
            | Self::NotPullable => false,
        }
    }

    /// Is what the rollout names not there at all?
    pub(super) fn is_absence(&self) -> bool {
        matches!(self, Self::NotFound | Self::NoResource)
    }
}

impl fmt::Display for HoldReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound => f.write_str("there is no such DaemonSet"),
            Self::Ambiguous { count } => write!(f, "there are {count} DaemonSets of this name"),
            Self::Unreadable { detail } => write!(f, "manifests cannot be read: {detail}"),
            Self::NoContainer { found } => {
                write!(f, "the DaemonSet has not exactly one such container; it has {}", found.join(", "))
            }
            Self::Fixed { detail } => write!(f, "its image cannot be set: {detail}"),
            Self::ClaimedTwice { images } => {
                let images: Vec<_> = images.iter().map(ImageName::as_str).collect();
                write!(f, "several rollouts name this container: {}", images.join(", "))
            }
            Self::Owned { owner: Owner { kind, name }, remedy } => {
                write!(f, "{kind} {name} owns the DaemonSet and would undo the change; {remedy}")
            }
            Self::Affinity { detail } => write!(f, "its node affinity is not understood: {detail}"),
            Self::NoNodes => f.write_str("it reaches no node"),
            Self::UnknownNode { node, count: 1, why } => write!(f, "kernel of node {node} unknown: {why}"),
            Self::UnknownNode { node, count, why } => {
                write!(f, "kernel of node {node} and {} more unknown: {why}", count - 1)
            }
            Self::MixedKernels { kernels } => {
                f.write_str("its nodes run different kernels: ")?;
                for (number, (kernel, nodes)) in kernels.iter().enumerate() {
                    let comma = if number == 0 { "" } else { ", " };
                    write!(f, "{comma}{kernel} on {nodes}")?;
                }
                Ok(())
            }
            Self::NoImage { kernel, detail } => write!(f, "no image for {kernel}: {detail}"),
            Self::NotPassed { image, verdict: Some(verdict) } => {
                write!(f, "the check of {image} says {verdict}")
            }
            Self::NotPassed { image, verdict: None } => write!(f, "{image} has no check report"),
            Self::UnknownDenied { image } => {
                write!(
                    f,
                    "the check of {image} says unknown, which its definition does not accept (check.unknown: deny)"
                )
            }
            Self::NotSigned { image, why } => {
                write!(f, "{image} is not signed as policy.requireSigned asks: {why}")
            }
            Self::OtherKernel { image, found: Some(found) } => {
                write!(f, "{image} was made for kernel {found:?}")
            }
            Self::OtherKernel { image, found: None } => {
                write!(f, "{image} does not say for which kernel it is")
            }
            Self::Unseen { what, detail } => write!(f, "{what} cannot be seen: {detail}"),
            Self::Deleting => f.write_str("it is being deleted"),
            Self::BadRecord { detail } => write!(
                f,
                "its annotation {RECORD_ANNOTATION} cannot be read: {detail}; remove the annotation to start anew"
            ),
            Self::ChangedBack { times } => write!(
                f,
                "another writer changed it back {times} times, so it is left; \
                 find out who writes it, then remove the annotation {RECORD_ANNOTATION}"
            ),
            Self::RolloutFailed { at, why } => write!(
                f,
                "the pods did not get ready with the image of {at:.0}, and the one before it was put back: {why}; \
                 it waits for another image, or for the annotation {RECORD_ANNOTATION} to be removed"
            ),
            Self::RolledBack { at } => write!(
                f,
                "farrier rollback took back what was set at {at:.0}; \
                 it waits for another image, or for the annotation {RECORD_ANNOTATION} to be removed"
            ),
            Self::NoResource => f.write_str("there is no such resource"),
            Self::DriverOff { detail } => write!(f, "the operator's driver is switched off: {detail}"),
            Self::TagForm { image, looked_for, pattern } => write!(
                f,
                "the operator would look for a tag that ends in {looked_for}, which {image} does not; \
                 add {pattern:?} to `tags`"
            ),
            Self::MixedVersions { versions } => {
                f.write_str("the resource has one version, and its kernels need several: ")?;
                for (number, (version, kernels)) in versions.iter().enumerate() {
                    let comma = if number == 0 { "" } else { ", " };
                    write!(f, "{comma}{version} for {}", kernels.join(" and "))?;
                }
                Ok(())
            }
            Self::Immutable { field, needed } => write!(
                f,
                "its {field} is not {needed} and can never be changed; \
                 make a new resource with {field}: {needed} and delete this one"
            ),
            Self::UpgradeInProgress { node, state, count } => {
                write!(f, "its operator is replacing drivers: node {node} is in state {state:?}")?;
                if *count > 1 { write!(f, ", and {} more are under way", count - 1) } else { Ok(()) }
            }
            Self::NotPullable => f.write_str("nodes cannot pull from a layout directory"),
            Self::TooOften => f.write_str(
                "it was rewritten several times within a minute, by a node that flaps or another writer; it waits until \
                 things calm down",
            ),
            Self::OnlyLive => f.write_str("this strategy needs a running cluster, not a directory of manifests"),
            Self::FenceUndone { times } => write!(
                f,
                "its node affinity was changed back {times} times; let whoever writes it keep the requirement on \
                 farrier.dev/driver..., or leave spec.template.spec.affinity to farrier"
            ),
            Self::CopyFailed { kernel, image, why } => write!(
                f,
                "{image} did not work for {kernel}: {why}; it is not tried again until there is another image"
            ),
            Self::NoUnion { detail } => write!(f, "there is no one image for all kernels: {detail}"),
            Self::Chain { image, why } => {
                write!(f, "its chain goes out together, and {image} is on hold: {why}")
            }
            Self::CopiesRolledBack => f.write_str(
                "it was rolled back; remove its annotation farrier.dev/per-kernel to have it rolled out again",
            ),
        }
    }
}
