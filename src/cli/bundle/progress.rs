//! How far a bundle is, on standard error: a bar on a terminal, a line for each tenth elsewhere.

use std::{
    io::{self, IsTerminal as _},
    sync::{Mutex, PoisonError},
};

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::{
    bundle::{Meter, Phase},
    cli::printer,
};

/// Less than this is done before anybody reads of it.
const WORTH_A_LINE: u64 = 64 << 20;

/// A bar, or lines.
pub(super) struct Bar {
    bar: Option<ProgressBar>,
    lines: Mutex<Lines>,
}

struct Lines {
    phase: &'static str,
    total: u64,
    done: u64,
    tenth: u64,
}

impl Bar {
    pub(super) fn new() -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
            let template = "{prefix}: {bar:30} {bytes} of {total_bytes} {bytes_per_sec} [{elapsed}]";
            if let Ok(style) = ProgressStyle::with_template(template) {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, lines: Mutex::new(Lines { phase: "", total: 0, done: 0, tenth: 0 }) }
    }
}

impl Meter for Bar {
    fn begin(&self, phase: Phase, bytes: u64) {
        let phase = match phase {
            Phase::Resume => "verifying what an earlier run has written",
            Phase::Export => "exporting",
            Phase::Verify => "verifying",
            Phase::Push => "pushing",
        };
        if let Some(bar) = &self.bar {
            bar.reset();
            bar.set_length(bytes);
            bar.set_prefix(phase);
        } else {
            printer::message(&format!("{phase}: {}", HumanBytes(bytes)));
        }
        *self.lines.lock().unwrap_or_else(PoisonError::into_inner) =
            Lines { phase, total: bytes, done: 0, tenth: 0 };
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = &self.bar {
            bar.inc(bytes);
            return;
        }
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        lines.done += bytes;
        let tenth = lines.done * 10 / lines.total.max(1);
        if tenth > lines.tenth && tenth < 10 && lines.total >= WORTH_A_LINE {
            lines.tenth = tenth;
            let Lines { phase, total, done, .. } = &*lines;
            printer::message(&format!("{phase}: {} of {}", HumanBytes(*done), HumanBytes(*total)));
        }
    }

    fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish();
            printer::message("");
        }
    }
}
