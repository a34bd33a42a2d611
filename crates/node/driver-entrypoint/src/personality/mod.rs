//! Personalities of driver containers. Each has a start that ends with writing a ready file, a wait for a signal, and a
//! stop.

use std::process::ExitCode;

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

/// Runs a personality on the real node. The exit code is 0, or 1 after an error, which is logged.
pub(crate) fn run(work: impl FnOnce(&Node<'_>, &mut ProcessSignals) -> Result<(), Error>) -> ExitCode {
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
