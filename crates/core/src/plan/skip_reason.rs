//! Reasons for not building an image for a kernel target, each with a human-readable text and a stable identifier.

use std::fmt;

use serde::{Serialize, Serializer};

use crate::image::{ImageName, ImageReference, InputHash};

/// Reason for not building an image for a kernel target. Building again does not help unless an input changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum SkipReason {
    /// The image's `kernels` range does not include the kernel's version.
    #[error("the image is for kernels {range}")]
    KernelOutOfRange { range: String },
    /// No kernel family matches the target.
    #[error("no kernel family matches")]
    NoFamily,
    /// The image's version, sources, patches or base could not be resolved.
    #[error("{detail}")]
    Unresolved { detail: String },
    /// The family's toolchain could not be resolved.
    #[error("toolchain of family {family}: {detail}")]
    Toolchain { family: String, detail: String },
    /// The kernel's headers cannot be obtained, or the lookup of user-provided headers failed.
    #[error("headers: {detail}")]
    Headers { detail: String },
    /// There are no headers for the kernel. The text has the remedy, and says whether a kernel family knows the distribution.
    #[error("{detail}")]
    NoHeaders { detail: String },
    /// The family's toolchain or headers have a placeholder whose value is unknown for this kernel: a node label or an image digest.
    #[error("{detail}")]
    UnknownSystem { detail: String },
    /// The toolchain lacks the compiler that the kernel was built with. The text lists the toolchain's compilers.
    #[error("{detail}")]
    NoCompiler { detail: String },
    /// The modules cannot be compiled on this machine, which has another architecture. The text has the reason and the remedy.
    #[error("{detail}")]
    ForeignArchitecture { detail: String },
    /// The engine has to build the whole image, and no daemon is available for that.
    #[error(
        "the engine has to build the whole image (output: image), which requires Docker or Podman, but neither \
         is configured and running: give farrier a daemon (--engine docker), or write a template for \
         output: payload"
    )]
    NoDaemon,
    /// No trusted key signed an input in the registry's store. The text has the input, the reason and the remedy.
    #[error("{detail}")]
    Untrusted { detail: String },
    /// The site signs images or modules, but a source has third-party modules that no trusted key and no setting vouches for.
    #[error("{detail}")]
    Unvouched { detail: String },
    /// No template of the definitions has this name.
    #[error("there is no template {template:?}")]
    NoTemplate { template: String },
    /// The template cannot be rendered for this target. The text names template, line and variable.
    #[error("{detail}")]
    Template { detail: String },
    /// A tag pattern gives no valid tag for this target. The text has the pattern and the invalid tag.
    #[error("{detail}")]
    Tag { detail: String },
    /// The image has no tag patterns, so farrier could not find it again.
    #[error("the image has no tags")]
    NoTags,
    /// The image's name gives no valid repository at the configured location.
    #[error("{detail}")]
    Repository { detail: String },
    /// A definition cannot be serialized (a path that is not UTF-8).
    #[error("{detail}")]
    Definition { detail: String },
    /// Other targets have the same tag, so one image would overwrite the other.
    #[error("tag collision: {reference} is also the tag for {}; add a variable that distinguishes the kernels to `tags`", .others.join(" and "))]
    TagCollision { reference: ImageReference, others: Vec<String> },
    /// A need is not available and will not be.
    #[error("needs {need}: {why}")]
    Need {
        /// Name of the need.
        need: ImageName,
        /// Reason why the need is not available.
        #[serde(serialize_with = "serialize_reason")]
        why: NeedReason,
    },
}

/// Reason why an image cannot be compiled against another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, thiserror::Error)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum NeedReason {
    /// No driver image has this name.
    #[error("there is no such driver image")]
    Undefined,
    /// Images need each other in a cycle.
    #[error("images need each other in a cycle")]
    Circle,
    /// The needed image cannot be built for the target.
    #[error("not built for this kernel: {why}")]
    Skipped {
        /// Reason why the needed image is skipped.
        #[serde(serialize_with = "serialize_reason")]
        why: Box<SkipReason>,
    },
    /// The needed image's tag points to an image with other inputs: `theirs`, absent for an image that farrier did not
    /// build.
    #[error("{reference} {}", conflict_text(.theirs.as_ref()))]
    Conflict { reference: ImageReference, theirs: Option<InputHash> },
    /// An earlier build of the needed image with the same inputs failed.
    #[error("an earlier build with the same inputs failed: {detail}")]
    Failed { detail: String },
    /// The needed image is published without exposed headers.
    #[error("{reference} has the planned inputs but exposes no headers; delete the tag to rebuild it")]
    NothingExposed { reference: ImageReference },
    /// The needed image is not published yet.
    #[error("{reference} is not published; build and push it first")]
    NotPublished { reference: ImageReference },
    /// The tree that the user provides could not be resolved.
    #[error("{detail}")]
    Tree { detail: String },
}

impl NeedReason {
    /// Whether the reason comes from earlier builds or publications, and not from the definitions alone.
    pub(super) fn is_build_failure(&self) -> bool {
        match self {
            Self::Conflict { .. } | Self::Failed { .. } => true,
            Self::Skipped { why } => matches!(&**why, SkipReason::Need { why, .. } if why.is_build_failure()),
            _ => false,
        }
    }

    fn is_not_applicable(&self) -> bool {
        matches!(self, Self::Skipped { why } if why.is_not_applicable())
    }
}

impl SkipReason {
    /// Whether the reason is only that the definitions are not meant for this kernel.
    pub fn is_not_applicable(&self) -> bool {
        match self {
            Self::KernelOutOfRange { .. } | Self::NoFamily => true,
            Self::Need { need: _, why } => why.is_not_applicable(),
            _ => false,
        }
    }

    /// Whether a lookup of an input may have failed.
    pub(super) fn is_lookup_failure(&self) -> bool {
        match self {
            Self::Headers { .. }
            | Self::Unresolved { .. }
            | Self::Toolchain { .. }
            | Self::Need { need: _, why: NeedReason::Tree { .. } } => true,
            Self::Need { need: _, why: NeedReason::Skipped { why } } => why.is_lookup_failure(),
            _ => false,
        }
    }
}

fn conflict_text(theirs: Option<&InputHash>) -> String {
    let foreign = "was not published by farrier and exposes no headers; change its version or tag pattern, \
         delete the tag, or set onConflict: overwrite";
    theirs.map_or(foreign.to_owned(), |theirs| {
        format!("holds an image built from other inputs ({})", theirs.short())
    })
}

/// Serializes a reason's fields, and its human-readable text as `message`.
pub(super) fn serialize_reason<R: Serialize + fmt::Display, S: Serializer>(
    reason: &R,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    #[derive(Serialize)]
    struct WithMessage<'a, R> {
        #[serde(flatten)]
        reason: &'a R,
        message: String,
    }
    WithMessage { reason, message: reason.to_string() }.serialize(serializer)
}

/// Serializes an optional reason as [`serialize_reason`] does.
#[expect(clippy::ref_option, reason = "serde passes a reference to the field")]
pub(super) fn serialize_optional_reason<R: Serialize + fmt::Display, S: Serializer>(
    reason: &Option<R>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match reason {
        Some(reason) => serialize_reason(reason, serializer),
        None => serializer.serialize_none(),
    }
}
