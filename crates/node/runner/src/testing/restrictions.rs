//! Restrictions that the attack suite can disable (feature `breakable`). Never part of a released runner.

use std::{io, os::fd::RawFd};

use rustix::fs::{Mode, OFlags, open};

/// Number of the leaked descriptor.
const LEAKED: RawFd = 100;

/// Restrictions of process 1 and the steps.
#[derive(Clone, Debug)]
pub struct Restrictions {
    /// Whether Landlock restricts the build.
    pub landlock: bool,
    /// Whether the seccomp filter is installed.
    pub filter: bool,
    /// Directory of the host whose descriptor process 1 and each step inherit.
    leak: Option<String>,
}

impl Restrictions {
    /// Both restrictions, and no leak.
    pub const BOTH: Self = Self { landlock: true, filter: true, leak: None };

    /// Parses `--without-landlock`, `--without-seccomp` and `--leak DIRECTORY`.
    pub fn parse(options: &[&str]) -> Option<Self> {
        let mut restrictions = Self::BOTH;
        let mut options = options.iter();
        while let Some(option) = options.next() {
            match *option {
                "--without-landlock" => restrictions.landlock = false,
                "--without-seccomp" => restrictions.filter = false,
                "--leak" => restrictions.leak = Some((*options.next()?).to_owned()),
                _ => return None,
            }
        }
        Some(restrictions)
    }
}

/// Options that pass the restrictions on to process 1.
pub fn options(restrictions: &Restrictions) -> Vec<String> {
    let mut options = Vec::new();
    options.extend((!restrictions.landlock).then(|| "--without-landlock".to_owned()));
    options.extend((!restrictions.filter).then(|| "--without-seccomp".to_owned()));
    options.extend(restrictions.leak.iter().flat_map(|leak| ["--leak".to_owned(), leak.clone()]));
    options
}

/// Opens the directory as descriptor 100, which every process of the build inherits.
pub fn leak(restrictions: &Restrictions) -> io::Result<()> {
    let Some(leak) = &restrictions.leak else { return Ok(()) };
    let directory = open(leak, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
    let leaked = nix::fcntl::fcntl(&directory, nix::fcntl::FcntlArg::F_DUPFD(LEAKED))?;
    if leaked == LEAKED { Ok(()) } else { Err(io::Error::other("the descriptor is taken")) }
}

/// Number of the leaked descriptor.
pub fn leaked(restrictions: &Restrictions) -> Option<RawFd> {
    restrictions.leak.is_some().then_some(LEAKED)
}
