//! What a driver container is. Each personality has a start, which ends with a ready file; a wait for a signal; and a
//! stop.

use std::process::ExitCode;

use crate::{
    error::Error,
    kernel::Linux,
    log::Log,
    node::{Node, Paths},
    signals::Signals,
};

pub(crate) mod generic;
pub(crate) mod mofed;
pub(crate) mod nvidia;

/// Runs a personality on the real node, and says how it ended: 0, or 1 after an error in the log.
pub(crate) fn run(work: impl FnOnce(&Node<'_>, &mut Signals) -> Result<(), Error>) -> ExitCode {
    let node = Node { paths: Paths::new("/"), kernel: &Linux, log: Log::stderr() };
    let signals = Signals::catch().map_err(Error::on("catch", "signals"));
    match signals.and_then(|mut signals| work(&node, &mut signals)) {
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
