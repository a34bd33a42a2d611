//! Pure: what the kernel's own loader would say about a module.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::Serialize;

/// What the kernel's own loader would say. Ordered: the worst of several is the greatest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
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
        match self {
            Self::Loads => "loads",
            Self::Unknown => "unknown",
            Self::Refused => "refused",
        }
    }
}

impl FromStr for Verdict {
    type Err = VerdictError;

    fn from_str(text: &str) -> Result<Self, VerdictError> {
        [Self::Loads, Self::Unknown, Self::Refused]
            .into_iter()
            .find(|verdict| verdict.as_str() == text)
            .ok_or_else(|| VerdictError(text.chars().take(80).collect()))
    }
}

/// A text that is no verdict.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a verdict (loads, unknown, refused)")]
pub struct VerdictError(pub String);

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}
