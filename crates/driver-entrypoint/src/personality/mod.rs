//! What a driver container is. Each personality has a start, which ends with a ready file; a wait for a signal; and a
//! stop.

use std::{fmt, process::ExitCode};

use crate::{
    fault::Fault, kernel::Linux, lock::LockError, log::Log, modules::error::ModuleError, node::Node,
    paths::Paths, signals::Signals,
};

pub(crate) mod generic;
pub(crate) mod mofed;
pub(crate) mod nv_peer_mem;
pub(crate) mod nvidia;
mod peer_memory;
mod watch;

/// Why a driver container ends before it is asked to.
#[derive(Debug)]
pub(crate) enum Error {
    Module(ModuleError),
    Fault(Fault),
    Lock(LockError),
    /// The node is not in a state in which the drivers may be touched.
    Precondition {
        message: String,
        hint: String,
    },
    /// Asked to end before it was ready.
    Ended {
        signal: &'static str,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Module(error) => error.fmt(f),
            Self::Fault(fault) => fault.fmt(f),
            Self::Lock(error) => error.fmt(f),
            Self::Precondition { message, .. } => f.write_str(message),
            Self::Ended { signal } => write!(f, "{signal} came before the drivers were ready"),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// What to do about it; empty where there is nothing.
    pub(crate) fn hint(&self) -> &str {
        match self {
            Self::Module(error) => error.hint(),
            Self::Fault(fault) => fault.hint(),
            Self::Lock(error) => error.hint(),
            Self::Precondition { hint, .. } => hint,
            Self::Ended { .. } => "",
        }
    }
}

impl From<ModuleError> for Error {
    fn from(error: ModuleError) -> Self {
        Self::Module(error)
    }
}

impl From<Fault> for Error {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<LockError> for Error {
    fn from(error: LockError) -> Self {
        Self::Lock(error)
    }
}

/// Runs a personality on the real node, and says how it ended: 0, or 1 after an error in the log.
pub(crate) fn run(work: impl FnOnce(&Node<'_>, &mut Signals) -> Result<(), Error>) -> ExitCode {
    let node = Node { paths: Paths::new("/"), kernel: &Linux, log: Log::stderr() };
    let mut signals = match Signals::catch() {
        Ok(signals) => signals,
        Err(error) => {
            node.log.error(format!("catch signals: {error}"));
            return ExitCode::FAILURE;
        }
    };
    match work(&node, &mut signals) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            node.log.error(&error);
            if !error.hint().is_empty() {
                node.log.error(format!("what to do: {}", error.hint()));
            }
            ExitCode::FAILURE
        }
    }
}
