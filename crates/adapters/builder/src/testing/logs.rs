//! Captures the log lines of a test, formatted for people.

use std::{
    io,
    sync::{Arc, Mutex},
};

use tracing::subscriber::DefaultGuard;

/// Log lines of this thread, captured until dropped.
pub struct Logs {
    text: Text,
    _guard: DefaultGuard,
}

#[derive(Clone, Default)]
struct Text(Arc<Mutex<Vec<u8>>>);

impl io::Write for Text {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Logs {
    /// Starts to capture at level INFO.
    pub fn start() -> Self {
        let text = Text::default();
        let writer = text.clone();
        let lines = tracing_subscriber::fmt().with_ansi(false).without_time().with_target(false);
        let subscriber = lines.with_writer(move || writer.clone()).finish();
        Self { text, _guard: tracing::subscriber::set_default(subscriber) }
    }

    /// Returns the lines that contain this text.
    pub fn with(&self, part: &str) -> Vec<String> {
        let text = String::from_utf8(self.text.0.lock().unwrap().clone()).unwrap();
        text.lines().filter(|line| line.contains(part)).map(|line| line.trim().to_owned()).collect()
    }
}
