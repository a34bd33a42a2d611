//! Pure: the compiler that a kernel was built with, from its configuration.

use std::{fmt, str::FromStr};

/// Which compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CompilerKind {
    /// GNU C.
    Gcc,
    /// LLVM's clang.
    Clang,
}

/// A compiler by kind and major version, as `CONFIG_CC_VERSION_TEXT` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Compiler {
    /// Which compiler.
    pub kind: CompilerKind,
    /// Its major version (gcc before 5 is told apart by minor too, but every 4.8 is one compiler here).
    pub major: u32,
}

/// A `CONFIG_CC_VERSION_TEXT` that names no known compiler.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("compiler text {0:?} names neither gcc nor clang with a version")]
pub struct CompilerTextError(pub String);

impl FromStr for Compiler {
    type Err = CompilerTextError;

    /// Reads e.g. `gcc-12 (Debian 12.2.0-14+deb12u1) 12.2.0`, `gcc (GCC) 11.4.1 20231218 (Red Hat 11.4.1-3)`,
    /// `x86_64-linux-gnu-gcc-13 (Ubuntu 13.2.0-23ubuntu4) 13.2.0`, `Ubuntu clang version 18.1.3 (1ubuntu1)`.
    fn from_str(text: &str) -> Result<Self, CompilerTextError> {
        let _ = text;
        todo!("kernel")
    }
}

impl fmt::Display for Compiler {
    /// `gcc 12`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            CompilerKind::Gcc => "gcc",
            CompilerKind::Clang => "clang",
        };
        write!(f, "{kind} {}", self.major)
    }
}
