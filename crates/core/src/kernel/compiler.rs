//! Identifies the compiler that built a kernel, from the kernel's configuration.

use std::str::FromStr;

/// Kind of a compiler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, strum::Display, strum::EnumString)]
#[strum(serialize_all = "lowercase")]
pub enum CompilerKind {
    /// GNU C.
    Gcc,
    /// LLVM's clang.
    Clang,
}

/// A compiler by kind and major version, as `CONFIG_CC_VERSION_TEXT` names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, derive_more::Display)]
#[display("{kind} {major}")]
pub struct Compiler {
    /// Kind of the compiler.
    pub kind: CompilerKind,
    /// Major version. For gcc before 5 the minor version also matters, but farrier treats every 4.8 as one compiler.
    pub major: u32,
}

/// Parse error: a `CONFIG_CC_VERSION_TEXT` does not name a known compiler.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("compiler text {0:?} names neither gcc nor clang with a version")]
pub struct CompilerTextError(pub String);

impl Compiler {
    /// Parses a name with a major version: `gcc-12`, or the displayed form `gcc 12`.
    pub fn from_name(name: &str) -> Option<Self> {
        let (kind, major) = name.split_once(['-', ' '])?;
        Some(Self { kind: kind.parse().ok()?, major: major.parse().ok()? })
    }
}

impl FromStr for Compiler {
    type Err = CompilerTextError;

    /// Parses the first line of `cc --version`, e.g. `gcc-12 (Debian 12.2.0-14+deb12u1) 12.2.0`, `gcc (GCC) 11.4.1 20231218 (Red
    /// Hat 11.4.1-3)`, `x86_64-linux-gnu-gcc-13 (Ubuntu 13.2.0-23ubuntu4) 13.2.0`, `Ubuntu clang version 18.1.3 (1ubuntu1)`.
    fn from_str(text: &str) -> Result<Self, CompilerTextError> {
        parse_clang(text)
            .or_else(|| parse_gcc(text))
            .ok_or_else(|| CompilerTextError(text.chars().take(200).collect()))
    }
}

/// clang prints its vendor first: `<vendor> clang version <version>`.
fn parse_clang(text: &str) -> Option<Compiler> {
    let (before, after) = text.split_once("clang version ")?;
    (before.is_empty() || before.ends_with(' '))
        .then(|| parse_major(after))?
        .map(|major| Compiler { kind: CompilerKind::Clang, major })
}

/// gcc prints `<program> (<vendor's text>) <version> [<date> ...]`. The vendor's text may contain another version and nested
/// parentheses.
fn parse_gcc(text: &str) -> Option<Compiler> {
    let text = text.trim();
    let text = text.strip_prefix("ccache ").unwrap_or(text).trim_start();
    let (program, version) = text.split_once(char::is_whitespace)?;
    let program = program.rsplit('/').next().unwrap_or(program);
    // Buildroot and Yocto rename the compiler to make room for a wrapper.
    let program = [".br_real", ".real"].iter().find_map(|end| program.strip_suffix(end)).unwrap_or(program);
    let name = program.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.').trim_end_matches('-');
    if name != "cc" && name != "gcc" && !name.ends_with("-gcc") {
        return None;
    }
    let version = after_parentheses(version.trim_start()).trim_start();
    let version = version.strip_prefix("version ").unwrap_or(version);
    parse_major(version).map(|major| Compiler { kind: CompilerKind::Gcc, major })
}

/// Returns the text after a leading balanced group of parentheses, or the whole text if it does not start with a group.
fn after_parentheses(text: &str) -> &str {
    let mut depth = 0_usize;
    for (index, c) in text.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        if depth == 0 {
            return if c == ')' { &text[index + 1..] } else { text };
        }
    }
    ""
}

fn parse_major(version: &str) -> Option<u32> {
    let end = version.find(|c: char| !c.is_ascii_digit()).unwrap_or(version.len());
    version[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn texts_of_the_distributions_are_understood() {
        for (text, expected) in [
            ("gcc (GCC) 4.8.5 20150623 (Red Hat 4.8.5-44)", "gcc 4"),
            ("gcc (GCC) 11.4.1 20231218 (Red Hat 11.4.1-3)", "gcc 11"),
            ("gcc-12 (Debian 12.2.0-14+deb12u1) 12.2.0", "gcc 12"),
            ("x86_64-linux-gnu-gcc-13 (Ubuntu 13.2.0-23ubuntu4) 13.2.0", "gcc 13"),
            ("aarch64-linux-gnu-gcc-12 (Debian 12.2.0-14) 12.2.0", "gcc 12"),
            ("x86_64-redhat-linux-gcc (GCC) 8.5.0 20210514 (Red Hat 8.5.0-22)", "gcc 8"),
            ("gcc (SUSE Linux) 7.5.0", "gcc 7"),
            ("aarch64-buildroot-linux-gnu-gcc.br_real (Buildroot 2022.08) 11.3.0", "gcc 11"),
            ("gcc.real (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", "gcc 11"),
            ("ccache gcc (GCC) 13.2.0", "gcc 13"),
            ("gcc (Acme (nightly) 3.0) 14.1.0", "gcc 14"),
            ("gcc version 12.2.0 (Debian 12.2.0-14)", "gcc 12"),
            ("/usr/bin/gcc-12 (Debian 12.2.0-14) 12.2.0", "gcc 12"),
            ("cc (Debian 12.2.0-14) 12.2.0", "gcc 12"),
            ("Ubuntu clang version 18.1.3 (1ubuntu1)", "clang 18"),
            ("clang version 17.0.6", "clang 17"),
            ("Android (10087095, +pgo) clang version 17.0.2 (https://example.org/llvm d9f8)", "clang 17"),
        ] {
            let compiler = text.parse::<Compiler>().unwrap();
            assert_eq!(compiler.to_string(), expected, "{text}");
            assert_eq!(Compiler::from_name(expected), Some(compiler));
            assert_eq!(Compiler::from_name(&expected.replace(' ', "-")), Some(compiler));
        }
    }

    #[test]
    fn other_texts_are_refused() {
        for text in
            ["", "gcc", "gcc (GCC", "gcc (GCC)", "rustc 1.80.0", "icc (ICC) 2021.1", "clang version x"]
        {
            assert!(text.parse::<Compiler>().is_err(), "{text:?} was accepted");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "(gcc|clang version)?[ ()0-9a-z.é-]{0,40}") {
            let _ = text.parse::<Compiler>();
        }
    }
}
