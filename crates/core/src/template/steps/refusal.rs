//! Errors of Dockerfiles and lines that cannot be read as steps.

pub(super) use super::super::lexer::{Refusal, mistake};

/// Reason why a Dockerfile cannot be read as steps. The caller adds the name of the Dockerfile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StepsError {
    /// A syntax error in every image builder. Lines count from 1.
    #[error("line {line}: {reason}")]
    Mistake { line: u32, reason: String },
    /// A build in place does not support the instruction. The reason says what to write instead.
    #[error("line {line}: {reason}; use engine docker")]
    Unsupported { line: u32, reason: String },
}

impl Refusal {
    pub(super) fn at(self, line: u32) -> StepsError {
        match self {
            Self::Mistake(reason) => StepsError::Mistake { line, reason },
            Self::Unsupported(reason) => StepsError::Unsupported { line, reason },
        }
    }
}

pub(super) fn unsupported(reason: impl Into<String>) -> Refusal {
    Refusal::Unsupported(reason.into())
}

/// Converts a line index to a line number.
pub(super) fn line_number(index: usize) -> u32 {
    u32::try_from(index).map_or(u32::MAX, |index| index.saturating_add(1))
}
