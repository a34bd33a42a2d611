//! Why a Dockerfile, or one of its lines, has no steps.

use super::super::lexer::WordError;

/// Why a Dockerfile has no steps. Whoever shows it says whose Dockerfile it is.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepsError {
    /// It is not Docker's form, whatever the engine.
    #[error("line {line}: {reason}")]
    Mistake {
        /// From 1.
        line: u32,
        /// What is wrong.
        reason: String,
    },
    /// A build in place does not do it.
    #[error("line {line}: {reason}; use engine docker")]
    Unsupported {
        /// From 1.
        line: u32,
        /// What is not done, and what to write instead.
        reason: String,
    },
}

/// Why an instruction is not read; its line is known to the caller.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    Mistake(String),
    Unsupported(String),
}

impl Refusal {
    pub(super) fn at(self, line: u32) -> StepsError {
        match self {
            Self::Mistake(reason) => StepsError::Mistake { line, reason },
            Self::Unsupported(reason) => StepsError::Unsupported { line, reason },
        }
    }
}

impl From<WordError> for Refusal {
    fn from(error: WordError) -> Self {
        match error {
            WordError::Mistake(reason) => Self::Mistake(reason),
            WordError::Unsupported(reason) => Self::Unsupported(reason),
        }
    }
}

pub(super) fn mistake<T>(reason: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::Mistake(reason.into()))
}

pub(super) fn unsupported<T>(reason: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal::Unsupported(reason.into()))
}

/// A line's number, from its place.
pub(super) fn number(place: usize) -> u32 {
    u32::try_from(place).map_or(u32::MAX, |place| place.saturating_add(1))
}
