//! Personalities of driver containers. Each has a start that ends with writing a ready file, a wait for a signal, and a
//! stop.

use std::{fs, process::ExitCode};

use crate::{
    error::Error,
    kernel::Linux,
    log::Log,
    node::{Node, Paths},
    signals::ProcessSignals,
};

pub(crate) mod generic;
pub(crate) mod mofed;
pub(crate) mod nvidia;

/// File that the kubelet bind-mounts into each container (`terminationMessagePath`).
const TERMINATION_MESSAGE: &str = "/dev/termination-log";

/// Runs a personality on the real node. After an error, the exit code is 1; the log and the container's termination message have
/// the error.
pub(crate) fn run(work: impl FnOnce(&Node<'_>, &mut ProcessSignals) -> Result<(), Error>) -> ExitCode {
    run_with_message(|node, signals| {
        work(node, signals).inspect_err(|error| write_termination_message(node, error))
    })
}

/// Like [`run`], for a command with a termination message of its own.
pub(crate) fn run_with_message(
    work: impl FnOnce(&Node<'_>, &mut ProcessSignals) -> Result<(), Error>,
) -> ExitCode {
    let node = Node { paths: Paths::new("/"), kernel: &Linux, log: Log::stderr() };
    let signals = ProcessSignals::catch().map_err(Error::on("catch", "signals"));
    match signals.and_then(|mut signals| work(&node, &mut signals)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            node.log.error(&error);
            if !error.hint().is_empty() {
                node.log.error(format!("hint: {}", error.hint()));
            }
            ExitCode::FAILURE
        }
    }
}

/// Writes the error where the kubelet reads it, so that the pod's status and farrier show it.
fn write_termination_message(node: &Node<'_>, error: &Error) {
    let path = node.paths.at(TERMINATION_MESSAGE);
    if fs::metadata(&path).is_ok_and(|data| data.is_file() && data.len() == 0) {
        let written = fs::write(path, format!("{error}\n"));
        node.log.warn_of(written.map_err(Error::on("write", TERMINATION_MESSAGE)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    #[test]
    fn the_error_is_the_termination_message_unless_there_is_one() {
        let bench = Bench::new();
        let error = Error::new("the node is cut off", "hint");
        write_termination_message(&bench.node(), &error);
        assert_eq!(bench.read(TERMINATION_MESSAGE), None, "outside a pod");
        for (before, after) in [("", "the node is cut off\n"), ("holders\n", "holders\n")] {
            bench.write(TERMINATION_MESSAGE, before);
            write_termination_message(&bench.node(), &error);
            assert_eq!(bench.read(TERMINATION_MESSAGE).as_deref(), Some(after));
        }
    }
}
