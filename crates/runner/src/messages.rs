//! Messages to farrier, on standard output.

use std::{
    error::Error as _,
    fs::File,
    io::{self, Read},
    sync::{Mutex, MutexGuard, PoisonError},
};

use runner::wire::{Message, write_frame};
use rustix::io::dup;

/// The way to farrier. Messages of several threads do not mix.
#[derive(Default)]
pub struct Messages(Mutex<Option<File>>);

impl Messages {
    /// Sends one.
    pub fn send(&self, message: &Message) -> io::Result<()> {
        let mut out = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        write_frame(Self::file(&mut out)?, &message.encode())
    }

    fn file<'a>(out: &'a mut MutexGuard<'_, Option<File>>) -> io::Result<&'a mut File> {
        if out.is_none() {
            **out = Some(File::from(dup(rustix::stdio::stdout())?));
        }
        out.as_mut().ok_or_else(|| io::ErrorKind::BrokenPipe.into())
    }
}

/// Standard input, without a buffer: another program reads on where this one stops.
pub fn input() -> io::Result<impl Read> {
    Ok(File::from(dup(rustix::stdio::stdin())?))
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
