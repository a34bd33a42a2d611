//! Pure: why an image is not built for a kernel target, for people and for programs as in the other reasons.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::image::{ImageName, ImageReference, InputHash};

/// Why an image is not built for a kernel target. None of these changes by trying again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum SkipReason {
    /// The image's `kernels` range does not hold the kernel's version.
    #[error("the image is for kernels {range}")]
    KernelOutOfRange { range: String },
    /// No kernel family matches the target.
    #[error("no kernel family matches")]
    NoFamily,
    /// The image's version, sources, patches or base could not be found out.
    #[error("{detail}")]
    Unresolved { detail: String },
    /// The family's toolchain could not be found out.
    #[error("toolchain of family {family}: {detail}")]
    Toolchain { family: String, detail: String },
    /// The kernel's headers cannot be had, or whether they are those that users bring, and which, could not be found out.
    #[error("headers: {detail}")]
    Headers { detail: String },
    /// There are no headers for the kernel: what to do, and whether a kernel family knows the distribution.
    #[error("{detail}")]
    NoHeaders { detail: String },
    /// The family names an image or an address by what is not known of the kernel's nodes: a label, a tag of an ImageStream.
    #[error("{detail}")]
    UnknownSystem { detail: String },
    /// The toolchain has no compiler that the kernel was built with: which it has.
    #[error("{detail}")]
    NoCompiler { detail: String },
    /// Its modules cannot be compiled on this machine, which is of another architecture: why, and what to do.
    #[error("{detail}")]
    ForeignArchitecture { detail: String },
    /// The engine is to make the whole image, and no daemon is there that does.
    #[error(
        "the engine makes this image whole (output: image), which Docker and Podman do, and none of them is used or answers: give farrier a \
         daemon (--engine docker), or write a template whose modules farrier takes (output: payload)"
    )]
    NoDaemon,
    /// What the registry's store has of an input is not signed with a key of this site: which input, why, and what to do.
    #[error("{detail}")]
    Untrusted { detail: String },
    /// The site signs, and modules of others would be signed without a word that allows it.
    #[error("{detail}")]
    Unvouched { detail: String },
    /// The template's name is not among the definitions.
    #[error("there is no template {template:?}")]
    NoTemplate { template: String },
    /// The template cannot be rendered for this target: template, line, variable.
    #[error("{detail}")]
    Template { detail: String },
    /// A tag pattern gives no tag for this target: the pattern and what it gave.
    #[error("{detail}")]
    Tag { detail: String },
    /// The image has no tag patterns, so nothing could find it again.
    #[error("the image has no tags")]
    NoTags,
    /// The image's name gives no repository at the configured place.
    #[error("{detail}")]
    Repository { detail: String },
    /// A definition that cannot be written down (a path that is not UTF-8).
    #[error("{detail}")]
    Definition { detail: String },
    /// Other targets have the same tag: one would overwrite the other.
    #[error("tag collision: {reference} would also be {}; give `tags` what tells them apart", .others.join(" and "))]
    TagCollision { reference: ImageReference, others: Vec<String> },
    /// What it is compiled against is not there and will not be.
    #[error("it needs {need}: {why}")]
    Need {
        /// The need's name.
        need: ImageName,
        /// Why not.
        #[serde(serialize_with = "explained")]
        why: NeedReason,
    },
}

/// Why an image cannot be compiled against another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
#[expect(missing_docs, reason = "the messages say what the fields are")]
pub enum NeedReason {
    /// No driver image has this name.
    #[error("there is no such driver image")]
    Undefined,
    /// Images need one another in a circle.
    #[error("images need one another in a circle")]
    Circle,
    /// The needed image cannot be built for the target.
    #[error("it is not built for this kernel: {why}")]
    Skipped {
        /// Why not.
        #[serde(serialize_with = "explained")]
        why: Box<SkipReason>,
    },
    /// The needed image's tag holds an image of other inputs: `theirs`, absent for an image that farrier did not make.
    #[error("{reference} {}", held(.theirs.as_ref()))]
    Conflict { reference: ImageReference, theirs: Option<InputHash> },
    /// The needed image failed before with the same inputs.
    #[error("it failed before with the same inputs: {detail}")]
    Failed { detail: String },
    /// The needed image is published and says nothing of exposed headers.
    #[error("{reference} has these inputs and exposes no headers; delete the tag to have it built again")]
    NothingExposed { reference: ImageReference },
    /// The needed image is not published yet.
    #[error("{reference} is not published; build and push it first")]
    NotPublished { reference: ImageReference },
    /// The tree that the user brings is not known.
    #[error("{detail}")]
    Tree { detail: String },
}

impl NeedReason {
    /// Does it come from what was built or published before, and not from the definitions alone?
    pub(super) fn is_of_a_build(&self) -> bool {
        match self {
            Self::Conflict { .. } | Self::Failed { .. } => true,
            Self::Skipped { why } => matches!(&**why, SkipReason::Need { why, .. } if why.is_of_a_build()),
            _ => false,
        }
    }

    fn is_finding(&self) -> bool {
        matches!(self, Self::Skipped { why } if why.is_finding())
    }
}

impl SkipReason {
    /// Does it only say that the definitions are not meant for this kernel?
    pub fn is_finding(&self) -> bool {
        match self {
            Self::KernelOutOfRange { .. } | Self::NoFamily => true,
            Self::Need { need: _, why } => why.is_finding(),
            _ => false,
        }
    }
}

fn held(theirs: Option<&InputHash>) -> String {
    let foreign = "was published by something else and exposes no headers; change its version or tag pattern, delete the \
                   tag, or set onConflict: overwrite";
    theirs.map_or(foreign.to_owned(), |theirs| format!("holds an image of other inputs ({})", theirs.short()))
}

/// A reason's own fields, and the sentence for people as `message`.
pub(super) fn explained<R: Serialize + fmt::Display, S: Serializer>(
    reason: &R,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct Explained<'a, R> {
        #[serde(flatten)]
        reason: &'a R,
        message: String,
    }
    Explained { reason, message: reason.to_string() }.serialize(serializer)
}

/// The same of a reason that there may be.
#[expect(clippy::ref_option, reason = "serde hands over the field as it is")]
pub(super) fn maybe_explained<R: Serialize + fmt::Display, S: Serializer>(
    reason: &Option<R>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match reason {
        Some(reason) => explained(reason, serializer),
        None => serializer.serialize_none(),
    }
}
