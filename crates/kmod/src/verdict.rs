//! Pure: what the kernel's own loader would say about a module.

use schemars::JsonSchema;
use serde::Serialize;
use strum::{Display, EnumString, IntoStaticStr};

/// What the kernel's own loader would say. Ordered: the worst of several is the greatest.
#[derive(Serialize, JsonSchema, Display, EnumString, IntoStaticStr)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase", parse_err_ty = VerdictError, parse_err_fn = VerdictError::new)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Verdict {
    /// Nothing speaks against it.
    #[default]
    Loads,
    /// The header set cannot tell. Unknown is not fine.
    Unknown,
    /// The kernel would refuse it.
    Refused,
}

impl Verdict {
    /// The word of the vocabulary: `loads`, `unknown`, `refused`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// A text that is no verdict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a verdict (loads, unknown, refused)")]
pub struct VerdictError(pub String);

impl VerdictError {
    fn new(text: &str) -> Self {
        Self(text.chars().take(80).collect())
    }
}
