//! Messages to farrier: on standard output, or kept until they are fetched.
//!
//! Standard input and output are used in place: a copy of either would be one more descriptor for a step to inherit.

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

/// The way to farrier. Messages of several threads do not mix.
#[derive(Default)]
pub struct Messages {
    out: Mutex<Out>,
    more: Condvar,
}

#[derive(Default)]
struct Out {
    kept: Option<File>,
    written: Written,
}

/// What was sent so far.
#[derive(Clone, Copy, Default)]
pub struct Written {
    /// Bytes of whole frames.
    pub length: u64,
    /// Was the last message sent?
    pub is_whole: bool,
}

impl Messages {
    /// Those that are kept in a file. What steps print goes to standard output, too, for people.
    pub fn kept(file: File) -> Self {
        let out = Out { kept: Some(file), ..Out::default() };
        Self { out: Mutex::new(out), more: Condvar::new() }
    }

    /// Sends one.
    pub fn send(&self, message: &Message) -> io::Result<()> {
        let mut out = self.lock();
        let frame = frame(message)?;
        match &mut out.kept {
            Some(file) => file.write_all(&frame)?,
            None => StandardOutput.write_all(&frame)?,
        }
        out.written.length += frame.len() as u64;
        out.written.is_whole = matches!(message, Message::End(_));
        if out.kept.is_some()
            && let Message::Output(text) = message
        {
            // Whoever reads it may have gone.
            let _ = StandardOutput.write_all(text);
        }
        self.more.notify_all();
        Ok(())
    }

    /// Waits until more than `length` bytes, or the last message, were sent, or the time is over.
    pub fn wait_for_more(&self, length: u64, most: Duration) -> Written {
        let is_all = |out: &mut Out| out.written.length <= length && !out.written.is_whole;
        let waited = self.more.wait_timeout_while(self.lock(), most, is_all);
        waited.unwrap_or_else(PoisonError::into_inner).0.written
    }

    fn lock(&self) -> MutexGuard<'_, Out> {
        self.out.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Standard output, without a buffer.
pub struct StandardOutput;

impl Write for StandardOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::write(stdout(), bytes))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard input, without a buffer: another program reads on where this one stops.
pub struct StandardInput;

impl Read for StandardInput {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        Ok(retry_on_intr(|| rustix::io::read(stdin(), &mut *bytes))?)
    }
}

/// The same error with what was tried in front of it, and what was behind it.
pub fn said(what: &str, error: impl Into<io::Error>) -> io::Error {
    let error = error.into();
    let mut text = format!("{what}: {error}");
    let mut cause = error.source();
    while let Some(behind) = cause {
        text = format!("{text}: {behind}");
        cause = behind.source();
    }
    io::Error::new(error.kind(), text)
}
