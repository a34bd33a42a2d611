//! Messages to farrier, written to standard output or kept in a file until farrier fetches them.
//!
//! Standard input and output are used without duplicating their descriptors, because a step could inherit a duplicate.

use std::{
    error::Error as _,
    fs::File,
    io::{self, Read, Write},
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use runner::wire::{Message, frame};
use rustix::{
    io::retry_on_intr,
    stdio::{stdin, stdout},
};

/// Channel to farrier. Messages from several threads do not interleave.
#[derive(Default)]
pub struct Messages {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    file: Option<File>,
    progress: Progress,
}

/// Progress of the messages to farrier.
#[derive(Clone, Copy, Default)]
pub struct Progress {
    /// Number of bytes sent, in complete frames.
    pub length: u64,
    /// Whether the last message was sent.
    pub is_complete: bool,
}

impl Messages {
    /// Creates a channel that keeps its messages in a file. Also writes the output of steps to standard output, for users who
    /// read the pod's log.
    pub fn in_file(file: File) -> Self {
        let state = State { file: Some(file), ..State::default() };
        Self { state: Mutex::new(state), changed: Condvar::new() }
    }

    /// Sends one message.
    pub fn send(&self, message: &Message) -> io::Result<()> {
        let mut state = self.lock();
        let frame = frame(message)?;
        match &mut state.file {
            Some(file) => file.write_all(&frame)?,
            None => StandardOutput.write_all(&frame)?,
        }
        state.progress.length += frame.len() as u64;
        state.progress.is_complete = matches!(message, Message::End(_));
        if state.file.is_some()
            && let Message::Output(text) = message
        {
            // Ignore errors, because the reader of the log may have disconnected.
            let _ = StandardOutput.write_all(text);
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Waits until more than `length` bytes or the last message were sent, but not longer than `timeout`.
    pub fn wait_for_more(&self, length: u64, timeout: Duration) -> Progress {
        let is_unchanged = |state: &mut State| state.progress.length <= length && !state.progress.is_complete;
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, is_unchanged);
        waited.unwrap_or_else(PoisonError::into_inner).0.progress
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Unbuffered standard output.
pub struct StandardOutput;

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::write(stdout(), bytes))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Unbuffered standard input, so that another program can continue to read where this program stops.
pub struct StandardInput;

impl Read for StandardInput {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::read(stdin(), &mut *bytes))?)
    }
}

/// Adds context to errors.
pub trait Context<T> {
    /// Prefixes an error with the attempted action, and appends its causes.
    fn context(self, action: &str) -> io::Result<T>;
}

impl<T, E: Into<io::Error>> Context<T> for Result<T, E> {
    fn context(self, action: &str) -> io::Result<T> {
        self.map_err(|error| {
            let error: io::Error = error.into();
            let mut text = format!("{action}: {error}");
            let mut cause = error.source();
            while let Some(inner) = cause {
                text = format!("{text}: {inner}");
                cause = inner.source();
            }
            io::Error::new(error.kind(), text)
        })
    }
}
