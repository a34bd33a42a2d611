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
        let refused = || CompilerTextError(text.chars().take(200).collect());
        let kind = if text.contains("clang version") {
            CompilerKind::Clang
        } else if text.split(['(', ' ']).next().is_some_and(|program| program.contains("gcc")) {
            CompilerKind::Gcc
        } else {
            return Err(refused());
        };
        // Distributions write their own package version in parentheses; the compiler's stands after them.
        let outside = without_parentheses(text);
        let is_version = |word: &&str| word.starts_with(|c: char| c.is_ascii_digit()) && word.contains('.');
        let version = outside.split_whitespace().find(is_version).ok_or_else(refused)?;
        let major = version.split('.').next().and_then(|major| major.parse().ok()).ok_or_else(refused)?;
        Ok(Self { kind, major })
    }
}

/// The text outside of all parentheses, nested ones included.
fn without_parentheses(text: &str) -> String {
    let mut depth = 0_u32;
    let keep = |c: char| match c {
        '(' => {
            depth += 1;
            ' '
        }
        ')' => {
            depth = depth.saturating_sub(1);
            ' '
        }
        c if depth == 0 => c,
        _ => ' ',
    };
    text.chars().map(keep).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_the_distributions_are_read() {
        for (text, expected) in [
            ("gcc-12 (Debian 12.2.0-14+deb12u1) 12.2.0", "gcc 12"),
            ("x86_64-linux-gnu-gcc-13 (Ubuntu 13.2.0-23ubuntu4) 13.2.0", "gcc 13"),
            ("gcc (GCC) 11.4.1 20231218 (Red Hat 11.4.1-3)", "gcc 11"),
            ("gcc (GCC) 4.8.5 20150623 (Red Hat 4.8.5-44)", "gcc 4"),
            ("gcc (SUSE Linux) 7.5.0", "gcc 7"),
            ("aarch64-linux-gnu-gcc-12 (Debian 12.2.0-14) 12.2.0", "gcc 12"),
            ("Ubuntu clang version 18.1.3 (1ubuntu1)", "clang 18"),
            ("clang version 17.0.6", "clang 17"),
        ] {
            assert_eq!(text.parse::<Compiler>().unwrap().to_string(), expected, "{text}");
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in ["", "gcc", "icc (ICC) 19.0", "gcc (Debian 12.2.0)", "tcc version 0.9.27", "gcc-12 (Debian"] {
            assert!(text.parse::<Compiler>().is_err(), "{text}");
        }
    }
}
