//! Walls that the attack suite can take down (feature `breakable`). Never part of a released runner.

use std::{io, os::fd::RawFd};

use rustix::fs::{Mode, OFlags, open};

/// Number of the leaked descriptor.
const LEAKED: RawFd = 100;

/// The walls around a build.
#[derive(Clone, Debug)]
pub struct Walls {
    /// Whether Landlock restricts the build.
    pub landlock: bool,
    /// Whether the seccomp filter is installed.
    pub filter: bool,
    /// Directory of the host whose descriptor process 1 and each step inherit.
    leak: Option<String>,
}

impl Walls {
    /// Both walls, and no leak.
    pub const BOTH: Self = Self { landlock: true, filter: true, leak: None };

    /// Parses `--without-landlock`, `--without-seccomp` and `--leak DIRECTORY`.
    pub fn from_options(options: &[&str]) -> Option<Self> {
        let mut walls = Self::BOTH;
        let mut options = options.iter();
        while let Some(option) = options.next() {
            match *option {
                "--without-landlock" => walls.landlock = false,
                "--without-seccomp" => walls.filter = false,
                "--leak" => walls.leak = Some((*options.next()?).to_owned()),
                _ => return None,
            }
        }
        Some(walls)
    }
}

/// Options that pass the walls on to process 1.
pub fn options(walls: &Walls) -> Vec<String> {
    let mut options = Vec::new();
    options.extend((!walls.landlock).then(|| "--without-landlock".to_owned()));
    options.extend((!walls.filter).then(|| "--without-seccomp".to_owned()));
    options.extend(walls.leak.iter().flat_map(|leak| ["--leak".to_owned(), leak.clone()]));
    options
}

/// Opens the directory as descriptor 100, which every process of the build inherits.
pub fn leak(walls: &Walls) -> io::Result<()> {
    let Some(leak) = &walls.leak else { return Ok(()) };
    let directory = open(leak, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
    let leaked = nix::fcntl::fcntl(&directory, nix::fcntl::FcntlArg::F_DUPFD(LEAKED))?;
    if leaked == LEAKED { Ok(()) } else { Err(io::Error::other("the descriptor is taken")) }
}

/// Number of the leaked descriptor.
pub fn leaked(walls: &Walls) -> Option<RawFd> {
    walls.leak.is_some().then_some(LEAKED)
}
