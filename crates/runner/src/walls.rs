//! Which walls stand. Both do, except in the program of the attack suite (feature `breakable`), which breaks one to show that the
//! other holds.

/// The walls around a build.
#[derive(Clone, Debug)]
pub struct Walls {
    /// Landlock.
    pub landlock: bool,
    /// The filter of system calls.
    pub filter: bool,
    /// A directory of the machine whose descriptor process 1 and each step get.
    #[cfg(feature = "breakable")]
    pub leak: Option<String>,
}

impl Default for Walls {
    fn default() -> Self {
        Self {
            landlock: true,
            filter: true,
            #[cfg(feature = "breakable")]
            leak: None,
        }
    }
}

#[cfg(not(feature = "breakable"))]
impl Walls {
    /// Reads the words behind the command: none is known.
    pub fn of(words: &[&str]) -> Option<Self> {
        words.is_empty().then(Self::default)
    }

    /// The same words.
    #[expect(clippy::unused_self, reason = "the other one does what it says")]
    pub fn words(&self) -> Vec<String> {
        Vec::new()
    }

    /// Leaks nothing.
    #[expect(clippy::unnecessary_wraps, clippy::unused_self, reason = "the other one does what it says")]
    pub fn leak(&self) -> std::io::Result<()> {
        Ok(())
    }

    /// The descriptor that is leaked: none.
    #[expect(clippy::unused_self, reason = "the other one does what it says")]
    pub fn leaked(&self) -> Option<std::os::fd::RawFd> {
        None
    }
}

/// Number of the descriptor.
#[cfg(feature = "breakable")]
const LEAKED: std::os::fd::RawFd = 100;

#[cfg(feature = "breakable")]
impl Walls {
    /// Reads `--without-landlock`, `--without-seccomp` and `--leak DIRECTORY`.
    pub fn of(words: &[&str]) -> Option<Self> {
        let mut walls = Self::default();
        let mut words = words.iter();
        while let Some(word) = words.next() {
            match *word {
                "--without-landlock" => walls.landlock = false,
                "--without-seccomp" => walls.filter = false,
                "--leak" => walls.leak = Some((*words.next()?).to_owned()),
                _ => return None,
            }
        }
        Some(walls)
    }

    /// The same words.
    pub fn words(&self) -> Vec<String> {
        let mut words = Vec::new();
        words.extend((!self.landlock).then(|| "--without-landlock".to_owned()));
        words.extend((!self.filter).then(|| "--without-seccomp".to_owned()));
        words.extend(self.leak.iter().flat_map(|leak| ["--leak".to_owned(), leak.clone()]));
        words
    }

    /// Leaves the directory open as descriptor 100, for every process of the build.
    pub fn leak(&self) -> std::io::Result<()> {
        use rustix::fs::{Mode, OFlags, open};
        let Some(leak) = &self.leak else { return Ok(()) };
        let directory = open(leak, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty())?;
        let leaked = nix::fcntl::fcntl(&directory, nix::fcntl::FcntlArg::F_DUPFD(LEAKED))?;
        if leaked == LEAKED { Ok(()) } else { Err(std::io::Error::other("the descriptor is taken")) }
    }

    /// The descriptor that is leaked.
    pub fn leaked(&self) -> Option<std::os::fd::RawFd> {
        self.leak.is_some().then_some(LEAKED)
    }
}
