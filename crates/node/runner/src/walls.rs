//! The walls around a build, which are always up: Landlock and the seccomp filter. The attack suite compiles `testing/walls.rs`
//! instead of this file (feature `breakable`). It takes down one wall to prove that the other one holds.

use std::{io, os::fd::RawFd};

/// The walls around a build.
#[derive(Clone, Debug)]
pub struct Walls {
    /// Whether Landlock restricts the build.
    pub landlock: bool,
    /// Whether the seccomp filter is installed.
    pub filter: bool,
}

impl Walls {
    /// Both walls. No command line takes one down.
    pub const BOTH: Self = Self { landlock: true, filter: true };

    /// Parses the options after a command. This program has none.
    pub fn from_options(options: &[&str]) -> Option<Self> {
        options.is_empty().then_some(Self::BOTH)
    }
}

/// Options that pass the walls on to process 1.
pub fn options(_: &Walls) -> [&'static str; 0] {
    []
}

/// Leaks no descriptor.
#[expect(clippy::unnecessary_wraps, reason = "the breakable variant opens a directory")]
pub fn leak(_: &Walls) -> io::Result<()> {
    Ok(())
}

/// Number of the leaked descriptor.
pub fn leaked(_: &Walls) -> Option<RawFd> {
    None
}
