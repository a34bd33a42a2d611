//! The one place that decides what goes to standard output and what to standard error.

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal, Write},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::env_vars;
use crate::{
    controller::{Reporter, Stage},
    kmod::Style,
};

/// Writes a command's result to standard output. A closed pipe (`| head`) is no error.
pub fn result(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    let end: &[u8] = if text.ends_with('\n') { b"" } else { b"\n" };
    let written = out.write_all(text.as_bytes()).and_then(|()| out.write_all(end)).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => other,
    }
}

/// A table without borders, as the plan's.
pub fn table<const N: usize>(header: [&str; N]) -> comfy_table::Table {
    let mut table = comfy_table::Table::new();
    table.load_style(comfy_table::presets::NOTHING).set_header(header);
    table
}

/// Colours on a terminal, unless the environment says otherwise.
pub fn style() -> Style {
    let coloured = env_vars::colours().unwrap_or_else(|| io::stdout().is_terminal());
    if coloured { Style::Coloured } else { Style::Plain }
}

/// The JSON form of a result.
pub fn json(value: &impl serde::Serialize) -> io::Result<String> {
    serde_json::to_string_pretty(value).map_err(io::Error::from)
}

/// Writes a message to standard error. There is nowhere to report a failure of that.
pub fn message(text: &str) {
    let mut err = io::stderr().lock();
    let _ = writeln!(err, "{text}");
}

/// Progress on standard error: a spinner for each target on a terminal, plain lines elsewhere.
pub struct Progress {
    bars: Option<MultiProgress>,
    running: Mutex<BTreeMap<String, ProgressBar>>,
}

impl Progress {
    /// Progress as standard error can show it.
    pub fn new() -> Self {
        let bars = io::stderr().is_terminal().then(MultiProgress::new);
        Self { bars, running: Mutex::default() }
    }

    fn with_bar(&self, subject: &str, show: impl FnOnce(&ProgressBar)) {
        let Some(bars) = &self.bars else { return };
        let mut running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let bar = running.entry(subject.to_owned()).or_insert_with(|| {
            let bar = bars.add(ProgressBar::new_spinner());
            if let Ok(style) = ProgressStyle::with_template("{spinner} {prefix}: {wide_msg} [{elapsed}]") {
                bar.set_style(style);
            }
            bar.set_prefix(subject.to_owned());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        show(bar);
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}

impl Reporter for Progress {
    fn stage(&self, subject: &str, stage: Stage) {
        if self.bars.is_none() {
            message(&format!("{subject}: {stage}"));
        }
        self.with_bar(subject, |bar| bar.set_message(stage.to_string()));
    }

    fn output(&self, subject: &str, line: &str) {
        self.with_bar(subject, |bar| bar.set_message(line.to_owned()));
    }

    fn note(&self, subject: &str, text: &str) {
        let line = format!("{subject}: {text}");
        match &self.bars {
            // Through the bars, which would be torn otherwise; there is nowhere to report a failure of that.
            Some(bars) => drop(bars.println(line)),
            None => message(&line),
        }
    }

    fn finished(&self, subject: &str, outcome: &str) {
        match self.running.lock().unwrap_or_else(PoisonError::into_inner).remove(subject) {
            Some(bar) => bar.finish_with_message(outcome.to_owned()),
            None => message(&format!("{subject}: {outcome}")),
        }
    }
}
