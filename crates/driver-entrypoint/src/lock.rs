//! Adapter: the lock that lets one driver container of a kind work on a node. The kernel gives it back when the
//! process is gone, however it went.

use std::{
    fmt,
    fs::{self, File, OpenOptions},
    io::{self, Read, Seek, Write},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};

use crate::{fault::Fault, node::Node};

/// Held as long as this lives.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Why there is no lock.
#[derive(Debug)]
pub(crate) enum LockError {
    /// Another process has it.
    Held { path: String, by: String },
    /// The file cannot be had.
    Fault(Fault),
}

impl fmt::Display for LockError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Held { path, by } => {
                write!(f, "the driver container is already running on this node: {path} is locked by {by}")
            }
            Self::Fault(fault) => fault.fmt(f),
        }
    }
}

impl std::error::Error for LockError {}

impl LockError {
    /// What to do about it.
    pub(crate) fn hint(&self) -> &'static str {
        match self {
            Self::Held { .. } => "wait until the other pod has ended; this one is started again by then",
            Self::Fault(fault) => fault.hint(),
        }
    }
}

impl Lock {
    /// Takes the lock, and writes our process id into it (what `/run/nvidia/nvidia-driver.pid` holds, too).
    pub(crate) fn take(node: &Node<'_>, path: &str) -> Result<Self, LockError> {
        let place = node.paths.at(path);
        let fault = Fault::on(node, "lock", &place);
        let fault = |error: io::Error| LockError::Fault(fault(error));
        if let Some(directory) = place.parent() {
            fs::create_dir_all(directory).map_err(fault)?;
        }
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(&place);
        let mut file = options.map_err(fault)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(Errno::WOULDBLOCK) => {
                return Err(LockError::Held { path: path.to_owned(), by: holder(node, &mut file) });
            }
            Err(errno) => return Err(fault(errno.into())),
        }
        let write = |file: &mut File| {
            file.set_len(0)?;
            file.rewind()?;
            writeln!(file, "{}", std::process::id())
        };
        write(&mut file).map_err(fault)?;
        Ok(Self { _file: file })
    }
}

/// The holder wrote its process id, as its own container counts them.
fn holder(node: &Node<'_>, file: &mut File) -> String {
    let mut text = String::new();
    let read = file.read_to_string(&mut text);
    let Some(id) = read.ok().and_then(|_| text.trim().parse::<u32>().ok()) else {
        return "another process".to_owned();
    };
    match fs::read_to_string(node.paths.at(&format!("/proc/{id}/comm"))) {
        Ok(command) if id != std::process::id() => format!("process {id} ({})", command.trim()),
        _ => format!("process {id} of another container"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn one_at_a_time_and_the_other_is_told_who() {
        let bench = Bench::new();
        let node = bench.node();
        let lock = Lock::take(&node, "/run/x/.lock").unwrap();
        let error = Lock::take(&node, "/run/x/.lock").unwrap_err();
        let ours = std::process::id();
        assert_eq!(
            error.to_string(),
            format!(
                "the driver container is already running on this node: /run/x/.lock is locked by process {ours} of \
                 another container"
            )
        );
        drop(lock);
        Lock::take(&node, "/run/x/.lock").unwrap();
    }
}
