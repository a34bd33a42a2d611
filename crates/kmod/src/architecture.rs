//! Processor architectures.

use std::{fmt, str::FromStr};

use serde::{Deserialize, Serialize};

/// A processor architecture, in Kubernetes' (Go's) spelling.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
pub enum Architecture {
    /// x86_64.
    Amd64,
    /// aarch64.
    Arm64,
}

/// An architecture that farrier does not build for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("architecture {0:?} is not supported; amd64 and arm64 are")]
pub struct ArchitectureError(pub String);

impl Architecture {
    /// Kubernetes' and OCI's name: `amd64`, `arm64`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Amd64 => "amd64",
            Self::Arm64 => "arm64",
        }
    }

    /// The kernel's and GNU's name: `x86_64`, `aarch64`.
    pub fn gnu_name(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }
}

impl FromStr for Architecture {
    type Err = ArchitectureError;

    fn from_str(text: &str) -> Result<Self, ArchitectureError> {
        match text {
            "amd64" | "x86_64" => Ok(Self::Amd64),
            "arm64" | "aarch64" => Ok(Self::Arm64),
            other => Err(ArchitectureError(other.chars().take(80).collect())),
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_of_an_architecture_are_known() {
        assert_eq!("x86_64".parse(), Ok(Architecture::Amd64));
        assert_eq!("arm64".parse(), Ok(Architecture::Arm64));
        assert_eq!("aarch64".parse::<Architecture>().map(Architecture::as_str), Ok("arm64"));
        assert!("riscv64".parse::<Architecture>().is_err());
    }
}
