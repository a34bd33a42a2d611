//! Files of a player: the programs that attack and that are attacked, in one directory that every user can access.

use std::path::{Path, PathBuf};

/// A directory of programs.
pub struct Kit(PathBuf);

impl Kit {
    pub fn at(place: &Path) -> Self {
        Self(place.to_owned())
    }

    fn program(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub fn attack(&self) -> PathBuf {
        self.program("attack")
    }

    pub fn busybox(&self) -> PathBuf {
        self.program("busybox")
    }

    /// The released runner.
    pub fn runner(&self) -> PathBuf {
        self.program("farrier-runner")
    }

    /// The runner whose barriers can be disabled.
    pub fn breakable(&self) -> PathBuf {
        self.program("farrier-runner-breakable")
    }

    /// This test program.
    pub fn player(&self) -> PathBuf {
        self.program("escape")
    }

    /// Content of the canaries.
    pub fn secret(&self) -> PathBuf {
        self.program("secret")
    }
}
