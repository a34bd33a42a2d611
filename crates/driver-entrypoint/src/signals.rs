//! Adapter: the signals that end a driver container, and being its first process.

use std::io;

use rustix::process::{WaitOptions, waitpid};
use signal_hook::{
    consts::{SIGCHLD, SIGHUP, SIGINT, SIGPIPE, SIGQUIT, SIGTERM},
    iterator::Signals as Iterator,
};

/// What the operators' containers end at.
const ENDING: [i32; 5] = [SIGHUP, SIGINT, SIGQUIT, SIGPIPE, SIGTERM];

/// How a container learns that it is to end.
pub(crate) trait Ending {
    /// Was it asked to end since this was last called? Does not wait.
    fn asked(&mut self) -> Option<&'static str>;
    /// Waits until it is asked to.
    fn wait(&mut self) -> &'static str;
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
            // As the first process we inherit those that nobody waits for; other children have been waited for by
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
    match signal {
        SIGHUP => Some("SIGHUP"),
        SIGINT => Some("SIGINT"),
        SIGQUIT => Some("SIGQUIT"),
        SIGPIPE => Some("SIGPIPE"),
        SIGTERM => Some("SIGTERM"),
        _ => None,
    }
}
