//! Programs that a container runs for the author of its image.

use std::{io, os::unix::process::CommandExt as _, process::Command, time::Duration};

use rustix::process::{Pid, Signal, kill_process_group};

use crate::{error::Error, node::Node, signals::Signals};

/// Interval at which the container looks whether the program has ended.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Runs a program; its output goes to the container's log. If the container is asked to end, the program and its children are
/// killed.
pub(crate) fn run(
    node: &Node<'_>,
    program: &str,
    arguments: &[String],
    signals: &mut dyn Signals,
) -> Result<(), Error> {
    let run_error = |error: io::Error| {
        Error::new(format!("run {program}: {error}"), "the image must contain it at this path")
    };
    let mut child = Command::new(program).args(arguments).process_group(0).spawn().map_err(run_error)?;
    let status = loop {
        if let Some(status) = child.try_wait().map_err(run_error)? {
            break status;
        }
        if let Err(error) = signals.check() {
            let killed = kill_process_group(Pid::from_child(&child), Signal::KILL);
            killed.map_err(io::Error::from).and_then(|()| child.wait()).map_err(run_error)?;
            return Err(error);
        }
        node.kernel.pause(POLL_INTERVAL);
    };
    if status.success() {
        node.log.step(format!("{program} succeeded"));
        return Ok(());
    }
    Err(Error::new(format!("{program} failed: {status}"), "its output is in this log"))
}
