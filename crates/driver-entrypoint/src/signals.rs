//! Adapter: the signals that end a driver container, and being its first process.

use std::io;

use rustix::process::{WaitOptions, waitpid};
use signal_hook::{
    consts::{SIGCHLD, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM},
    iterator::Signals as Iterator,
    low_level::signal_name,
};

use crate::error::Error;

/// What the operators' containers end at.
const ENDING: [i32; 5] = [SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM];

/// How a container learns that it is to end.
pub(crate) trait Ending {
    /// Was it asked to end since this was last called? Does not wait.
    fn asked(&mut self) -> Option<&'static str>;
    /// Waits until it is asked to.
    fn wait(&mut self) -> &'static str;
    /// Ends a start between two steps, where it was asked to.
    fn go_on(&mut self) -> Result<(), Error> {
        let ended = |signal| Error::new(format!("{signal} came before the drivers were ready"), "");
        self.asked().map_or(Ok(()), |signal| Err(ended(signal)))
    }
}

/// The process's signals, from now on.
pub(crate) struct Signals(Iterator);

impl Signals {
    pub(crate) fn catch() -> io::Result<Self> {
        Iterator::new(ENDING.into_iter().chain([SIGCHLD])).map(Self)
    }
}

impl Ending for Signals {
    fn asked(&mut self) -> Option<&'static str> {
        self.0.pending().find_map(name)
    }

    fn wait(&mut self) -> &'static str {
        loop {
            // As the first process we inherit orphans; other children have been waited for by
            // the time that this is called.
            reap();
            if let Some(name) = self.0.wait().find_map(name) {
                return name;
            }
        }
    }
}

fn reap() {
    while let Ok(Some(_)) = waitpid(None, WaitOptions::NOHANG) {}
}

fn name(signal: i32) -> Option<&'static str> {
    ENDING.contains(&signal).then(|| signal_name(signal))?
}
