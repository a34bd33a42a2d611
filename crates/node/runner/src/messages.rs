//! Messages to farrier, written to standard output or kept in a file until farrier fetches them.
//!
//! Standard input and output are used in place, because a duplicate would be one more descriptor for a step to inherit.

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
    out: Mutex<Out>,
    more: Condvar,
}

#[derive(Default)]
struct Out {
    file: Option<File>,
    written: Written,
}

/// Progress of the sent messages.
#[derive(Clone, Copy, Default)]
pub struct Written {
    /// Number of bytes sent, in complete frames.
    pub length: u64,
    /// Whether the last message was sent.
    pub is_complete: bool,
}

impl Messages {
    /// Creates a channel that keeps its messages in a file. Output of steps also goes to standard output, for people who
    /// read the pod's log.
    pub fn in_file(file: File) -> Self {
        let out = Out { file: Some(file), ..Out::default() };
        Self { out: Mutex::new(out), more: Condvar::new() }
    }

    /// Sends one message.
    pub fn send(&self, message: &Message) -> io::Result<()> {
        let mut out = self.lock();
        let frame = frame(message)?;
        match &mut out.file {
            Some(file) => file.write_all(&frame)?,
            None => StandardOutput.write_all(&frame)?,
        }
        out.written.length += frame.len() as u64;
        out.written.is_complete = matches!(message, Message::End(_));
        if out.file.is_some()
            && let Message::Output(text) = message
        {
            // Ignore errors: the reader of the log may have disconnected.
            let _ = StandardOutput.write_all(text);
        }
        self.more.notify_all();
        Ok(())
    }

    /// Waits until more than `length` bytes or the last message were sent, at most for `timeout`.
    pub fn wait_for_more(&self, length: u64, timeout: Duration) -> Written {
        let is_unchanged = |out: &mut Out| out.written.length <= length && !out.written.is_complete;
        let waited = self.more.wait_timeout_while(self.lock(), timeout, is_unchanged);
        waited.unwrap_or_else(PoisonError::into_inner).0.written
    }

    fn lock(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
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

/// Unbuffered standard input: another program continues to read where this one stops.
pub struct StandardInput;

impl Read for StandardInput {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::read(stdin(), &mut *bytes))?)
    }
}

/// Prefixes an error with the attempted action, and appends its causes.
pub fn failed(action: &str, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    let mut text = format!("{action}: {error}");
    let mut cause = error.source();
    while let Some(inner) = cause {
        text = format!("{text}: {inner}");
        cause = inner.source();
    }
    io::Error::new(error.kind(), text)
}
