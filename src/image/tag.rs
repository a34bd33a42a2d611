//! Pure: the tags of a driver image for one kernel target.

use super::Tag;
use crate::kernel::KernelTarget;

/// What tag patterns may name.
#[derive(Clone, Debug)]
pub struct TagInputs<'a> {
    /// The driver's version; characters that a tag may not hold become `_`.
    pub version: &'a str,
    /// The kernel target.
    pub target: &'a KernelTarget,
}

/// Why a tag pattern gives no tag.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TagError {
    /// An unknown variable, or a pattern that is not Handlebars.
    #[error("tag pattern {pattern:?}: {reason}")]
    Pattern {
        /// The pattern.
        pattern: String,
        /// Handlebars' words.
        reason: String,
    },
    /// The result is no tag, or too long.
    #[error(
        "tag pattern {pattern:?} gives {text:?}, which is not a tag (1 to 128 of `A-Za-z0-9_.-`, not starting with `.` or `-`)"
    )]
    Form {
        /// The pattern.
        pattern: String,
        /// What it gave.
        text: String,
    },
    /// The kernel release has no label form, and the pattern asks for it.
    #[error("kernel release {0:?} has no label form (more than 63 characters)")]
    NoLabel(String),
}

/// Renders the patterns, in order, each result once.
pub fn render_tags(patterns: &[String], inputs: &TagInputs<'_>) -> Result<Vec<Tag>, TagError> {
    let _ = (patterns, inputs);
    todo!("image")
}
