//! Processor architectures.

use serde::{Deserialize, Serialize};
use strum::{Display, EnumString, IntoStaticStr};

/// Processor architecture, in the spelling of Kubernetes and Go.
#[derive(
    Serialize, Deserialize, schemars::JsonSchema, Display, EnumString, IntoStaticStr, strum::VariantArray,
)]
#[serde(rename_all = "lowercase")]
#[strum(parse_err_ty = ArchitectureError, parse_err_fn = ArchitectureError::new)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Architecture {
    /// x86_64.
    #[strum(to_string = "amd64", serialize = "x86_64")]
    Amd64,
    /// aarch64.
    #[strum(to_string = "arm64", serialize = "aarch64")]
    Arm64,
}

/// Error for an architecture that farrier does not build for.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("architecture {0:?} is not supported; amd64 and arm64 are")]
pub struct ArchitectureError(pub String);

impl Architecture {
    /// Name in Kubernetes and OCI: `amd64`, `arm64`.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Name in the kernel and GNU: `x86_64`, `aarch64`.
    pub fn gnu_name(self) -> &'static str {
        match self {
            Self::Amd64 => "x86_64",
            Self::Arm64 => "aarch64",
        }
    }
}

impl ArchitectureError {
    fn new(text: &str) -> Self {
        Self(text.chars().take(80).collect())
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
