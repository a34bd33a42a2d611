//! Signals that end a driver container, and its duties as PID 1.

use std::io;

use rustix::process::{WaitOptions, waitpid};
use signal_hook::{
    consts::{SIGCHLD, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM},
    iterator::Signals as SignalIterator,
    low_level::signal_name,
};

use crate::error::Error;

/// Signals that end the operators' containers.
const STOP_SIGNALS: [i32; 5] = [SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM];

/// Source of requests to end the container.
pub(crate) trait Signals {
    /// Returns a signal that arrived since the last call; does not wait.
    fn received(&mut self) -> Option<&'static str>;
    /// Waits for a signal.
    fn wait(&mut self) -> &'static str;
    /// Fails if a signal has arrived, to end a start between two steps.
    fn check(&mut self) -> Result<(), Error> {
        self.received().map_or(Ok(()), |signal| Err(Error::Interrupted(signal)))
    }
}

/// The process's signals, caught from creation on.
pub(crate) struct ProcessSignals(SignalIterator);

impl ProcessSignals {
    pub(crate) fn catch() -> io::Result<Self> {
        SignalIterator::new(STOP_SIGNALS.into_iter().chain([SIGCHLD])).map(Self)
    }
}

impl Signals for ProcessSignals {
    fn received(&mut self) -> Option<&'static str> {
        self.0.pending().find_map(stop_signal_name)
    }

    fn wait(&mut self) -> &'static str {
        loop {
            // As PID 1 this process inherits orphans. Its own children have been waited for before this call.
            while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {}
            if let Some(name) = self.0.wait().find_map(stop_signal_name) {
                return name;
            }
        }
    }
}

fn stop_signal_name(signal: i32) -> Option<&'static str> {
    STOP_SIGNALS.contains(&signal).then(|| signal_name(signal))?
}
