//! The restrictions of process 1 and the steps (docs/security.md), which are always enabled: Landlock and the seccomp
//! filter. The attack suite compiles `testing/restrictions.rs` instead of this file (feature `breakable`), to show what the
//! namespaces alone keep from a step.

use std::{io, os::fd::RawFd};

/// Restrictions of process 1 and the steps.
#[derive(Clone, Debug)]
pub struct Restrictions {
    /// Whether Landlock restricts the build.
    pub landlock: bool,
    /// Whether the seccomp filter is installed.
    pub filter: bool,
}

impl Restrictions {
    /// Both restrictions. No option disables one.
    pub const BOTH: Self = Self { landlock: true, filter: true };

    /// Parses the options after a command. This program has none.
    pub fn parse(options: &[&str]) -> Option<Self> {
        options.is_empty().then_some(Self::BOTH)
    }
}

/// Options that pass the restrictions on to process 1.
pub fn options(_: &Restrictions) -> [&'static str; 0] {
    []
}

/// Leaks no descriptor.
#[expect(clippy::unnecessary_wraps, reason = "the breakable variant opens a directory")]
pub fn leak(_: &Restrictions) -> io::Result<()> {
    Ok(())
}

/// Number of the leaked descriptor.
pub fn leaked(_: &Restrictions) -> Option<RawFd> {
    None
}
