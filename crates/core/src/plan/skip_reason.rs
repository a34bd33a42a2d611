//! Pure: why an image is not built for a kernel target, for people and for programs as in the other reasons.

use std::{fmt, sync::Arc};

use serde::{Serialize, Serializer};

use crate::image::{ImageName, ImageReference, InputHash};

/// Why an image is not built for a kernel target. None of these changes by trying again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum SkipReason {
    /// The image's `kernels` range does not hold the kernel's version.
    KernelOutOfRange {
        /// The range.
        range: String,
    },
    /// No kernel family matches the target.
    NoFamily,
    /// The image's version, sources, patches or base could not be found out.
    Unresolved {
        /// Why not.
        detail: String,
    },
    /// The family's toolchain could not be found out.
    Toolchain {
        /// The family.
        family: String,
        /// Why not.
        detail: String,
    },
    /// Whether the kernel's headers are those that users bring, and which, could not be found out.
    Headers {
        /// Why not.
        detail: String,
    },
    /// The template's name is not among the definitions.
    NoTemplate {
        /// The name.
        template: String,
    },
    /// The template cannot be rendered for this target.
    Template {
        /// Template, line, variable.
        detail: String,
    },
    /// A tag pattern gives no tag for this target.
    Tag {
        /// Pattern and result.
        detail: String,
    },
    /// The image has no tag patterns, so nothing could find it again.
    NoTags,
    /// The image's name gives no repository at the configured place.
    Repository {
        /// The name.
        detail: String,
    },
    /// A definition that cannot be written down (a path that is not UTF-8).
    Definition {
        /// Which part.
        detail: String,
    },
    /// Other targets have the same tag: one would overwrite the other.
    TagCollision {
        /// The name that several targets have.
        reference: ImageReference,
        /// The other targets.
        others: Vec<String>,
    },
    /// What it is compiled against is not there and will not be.
    Need {
        /// The need's name.
        need: ImageName,
        /// Why not.
        #[serde(serialize_with = "explained")]
        why: NeedReason,
    },
}

/// Why an image cannot be compiled against another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", rename_all_fields = "camelCase", tag = "reason")]
pub enum NeedReason {
    /// No driver image has this name.
    Undefined,
    /// Images need one another in a circle.
    Circle,
    /// The needed image cannot be built for the target.
    Skipped {
        /// Why not.
        #[serde(serialize_with = "explained")]
        why: Box<SkipReason>,
    },
    /// The needed image's tag holds an image of other inputs.
    Conflict {
        /// The tag.
        reference: ImageReference,
        /// Input hash of the image under the tag; absent for an image that farrier did not make.
        theirs: Option<InputHash>,
    },
    /// The needed image failed before with the same inputs.
    Failed {
        /// How.
        detail: String,
    },
    /// The needed image is published and says nothing of exposed headers.
    NothingExposed {
        /// Its name.
        reference: ImageReference,
    },
    /// The needed image is not published yet.
    NotPublished {
        /// Its name.
        reference: ImageReference,
    },
    /// The tree that the user brings is not known.
    Tree {
        /// Why not.
        detail: String,
    },
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

impl fmt::Display for NeedReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Undefined => f.write_str("there is no such driver image"),
            Self::Circle => f.write_str("images need one another in a circle"),
            Self::Skipped { why } => write!(f, "it is not built for this kernel: {why}"),
            Self::Conflict { reference, theirs: None } => write!(
                f,
                "{reference} was published by something else and exposes no headers; \
                 change its version or tag pattern, delete the tag, or set onConflict: overwrite"
            ),
            Self::Conflict { reference, theirs: Some(theirs) } => {
                write!(f, "{reference} holds an image of other inputs ({})", theirs.short())
            }
            Self::Failed { detail } => write!(f, "it failed before with the same inputs: {detail}"),
            Self::NothingExposed { reference } => {
                write!(
                    f,
                    "{reference} has these inputs and exposes no headers; delete the tag to have it built again"
                )
            }
            Self::NotPublished { reference } => {
                write!(f, "{reference} is not published; build and push it first")
            }
            Self::Tree { detail } => f.write_str(detail),
        }
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

impl fmt::Display for SkipReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KernelOutOfRange { range } => write!(f, "the image is for kernels {range}"),
            Self::NoFamily => f.write_str("no kernel family matches"),
            Self::Unresolved { detail }
            | Self::Template { detail }
            | Self::Tag { detail }
            | Self::Repository { detail }
            | Self::Definition { detail } => f.write_str(detail),
            Self::Toolchain { family, detail } => write!(f, "toolchain of family {family}: {detail}"),
            Self::Headers { detail } => write!(f, "headers: {detail}"),
            Self::NoTemplate { template } => write!(f, "there is no template {template:?}"),
            Self::NoTags => f.write_str("the image has no tags"),
            Self::Need { need, why } => write!(f, "it needs {need}: {why}"),
            Self::TagCollision { reference, others } => {
                let others = others.join(" and ");
                write!(
                    f,
                    "tag collision: {reference} would also be {others}; give `tags` what tells them apart"
                )
            }
        }
    }
}

/// A shared value, written out.
pub(super) fn shared<S: Serializer>(value: &Arc<impl Serialize>, serializer: S) -> Result<S::Ok, S::Error> {
    value.as_ref().serialize(serializer)
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
