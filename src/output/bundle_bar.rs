//! Progress of a bundle on standard error.

use std::{
    io::{self, IsTerminal as _},
    sync::atomic::{AtomicU64, Ordering},
};

use farrier_bundle::{Meter, Phase};
use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::message;

/// Minimum size of a transfer whose progress is printed in lines. Smaller transfers end within seconds.
const MIN_BYTES_FOR_LINES: u64 = 64 << 20;

/// Progress of a bundle: a bar on a terminal, a line for each tenth elsewhere.
pub struct Bar {
    bar: ProgressBar,
    done: AtomicU64,
}

impl Bar {
    pub fn new() -> Self {
        let target = if io::stderr().is_terminal() {
            ProgressDrawTarget::stderr()
        } else {
            ProgressDrawTarget::hidden()
        };
        let bar = ProgressBar::with_draw_target(None, target);
        let template = "{prefix}: {bar:30} {bytes} of {total_bytes} {bytes_per_sec} [{elapsed}]";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style);
        }
        Self { bar, done: AtomicU64::new(0) }
    }

    /// Prints a line if no bar is drawn.
    fn line(&self, progress: impl std::fmt::Display) {
        if self.bar.is_hidden() {
            message(&format!("{}: {progress}", self.bar.prefix()));
        }
    }
}

impl Meter for Bar {
    fn begin(&self, phase: Phase, bytes: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.bar.reset();
        self.bar.set_length(bytes);
        self.bar.set_prefix(match phase {
            Phase::Resume => "verifying the output of an earlier run",
            Phase::Export => "exporting",
            Phase::Verify => "verifying",
            Phase::Push => "pushing",
        });
        self.line(HumanBytes(bytes));
    }

    fn advance(&self, bytes: u64) {
        self.bar.inc(bytes);
        let total = self.bar.length().unwrap_or_default();
        let before = self.done.fetch_add(bytes, Ordering::Relaxed);
        let tenth = |done: u64| done * 10 / total.max(1);
        let after = before + bytes;
        if tenth(after) > tenth(before) && tenth(after) < 10 && total >= MIN_BYTES_FOR_LINES {
            self.line(format!("{} of {}", HumanBytes(after), HumanBytes(total)));
        }
    }

    fn end(&self) {
        if !self.bar.is_hidden() {
            self.bar.finish();
            message("");
        }
    }
}
