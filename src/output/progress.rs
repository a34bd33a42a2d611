//! Progress on standard error: spinners and bars on a terminal, plain lines elsewhere.

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal as _},
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use farrier_builder::parts::{Reporter, Stage};
use farrier_bundle::{Meter, Phase};
use farrier_core::text::printable_lines;
use indicatif::{HumanBytes, HumanDuration, MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use parking_lot::Mutex;

use super::{message, printable};

/// Progress of builds: a spinner for each target on a terminal, plain lines elsewhere.
pub struct Progress {
    bars: Option<MultiProgress>,
    running: Mutex<BTreeMap<String, ProgressBar>>,
    stages: Mutex<BTreeMap<String, LongStage>>,
}

/// Maximum time that a plain log is silent about a stage. Some drivers configure themselves for longer than
/// users wait.
const SILENCE: Duration = Duration::from_mins(1);

/// A stage in a plain log, which has no spinner to show that work continues.
struct LongStage {
    stage: Stage,
    since: Instant,
    told: Instant,
}

impl LongStage {
    fn begin(stage: Stage, now: Instant) -> Self {
        Self { stage, since: now, told: now }
    }

    /// Returns a message for the stage's output line, if the last message about the stage is long ago.
    fn sign_of_life(&mut self, line: &str, now: Instant) -> Option<String> {
        (now.duration_since(self.told) >= SILENCE).then(|| {
            self.told = now;
            let minutes = now.duration_since(self.since).as_secs() / 60;
            format!("{} for {minutes} min, now: {line}", self.stage)
        })
    }
}

impl Progress {
    /// Makes progress in the form that standard error can show.
    pub fn new() -> Self {
        let bars = io::stderr().is_terminal().then(MultiProgress::new);
        Self { bars, running: Mutex::default(), stages: Mutex::default() }
    }

    /// Sets the format of a build's live line, with `time` at its end.
    fn set_style(bar: &ProgressBar, time: &str) {
        if let Ok(style) =
            ProgressStyle::with_template(&format!("{{spinner}} {{prefix}}: {{wide_msg}} [{time}]"))
        {
            bar.set_style(style);
        }
    }

    fn with_bar(&self, subject: &str, show: impl FnOnce(&ProgressBar)) {
        let Some(bars) = &self.bars else { return };
        let mut running = self.running.lock();
        let bar = running.entry(subject.to_owned()).or_insert_with(|| {
            let bar = bars.add(ProgressBar::new_spinner());
            Self::set_style(&bar, "{elapsed}");
            bar.set_prefix(printable(subject));
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        show(bar);
    }
}

impl Reporter for Progress {
    fn usual(&self, subject: &str, usual: Duration) {
        let time = format!("{{elapsed}} of usually {:#}", HumanDuration(usual));
        self.with_bar(subject, |bar| Self::set_style(bar, &time));
    }

    fn stage(&self, subject: &str, stage: Stage) {
        if self.bars.is_none() {
            message(&format!("{subject}: {stage}"));
            self.stages.lock().insert(subject.to_owned(), LongStage::begin(stage, Instant::now()));
        }
        self.with_bar(subject, |bar| bar.set_message(stage.to_string()));
    }

    fn output(&self, subject: &str, line: &str) {
        let mut stages = self.stages.lock();
        let told = stages.get_mut(subject).and_then(|stage| stage.sign_of_life(line, Instant::now()));
        if let Some(told) = told {
            message(&format!("{subject}: {told}"));
        }
        drop(stages);
        self.with_bar(subject, |bar| bar.set_message(printable(line)));
    }

    fn note(&self, subject: &str, text: &str) {
        let line = format!("{subject}: {text}");
        match &self.bars {
            // Print through the bars, so that they are not garbled. A failure is ignored, because there is
            // nowhere to report it.
            Some(bars) => drop(bars.println(printable_lines(&line))),
            None => message(&line),
        }
    }

    fn finished(&self, subject: &str, outcome: &str) {
        self.stages.lock().remove(subject);
        match self.running.lock().remove(subject) {
            Some(bar) => bar.finish_with_message(printable(outcome)),
            None => message(&format!("{subject}: {outcome}")),
        }
    }
}

/// A smaller transfer ends before a line about it could be read.
const WORTH_A_LINE: u64 = 64 << 20;

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
    fn line(&self, how_far: impl std::fmt::Display) {
        if self.bar.is_hidden() {
            message(&format!("{}: {how_far}", self.bar.prefix()));
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
        if tenth(after) > tenth(before) && tenth(after) < 10 && total >= WORTH_A_LINE {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_stage_is_told_of_once_a_minute() {
        let start = Instant::now();
        let mut stage = LongStage::begin(Stage::Compile, start);
        let mut say =
            |seconds: u64| stage.sign_of_life("checking x... yes", start + Duration::from_secs(seconds));
        assert_eq!([say(1), say(59)], [None, None]);
        assert_eq!(say(61).as_deref(), Some("compiling for 1 min, now: checking x... yes"));
        assert_eq!([say(62), say(120)], [None, None]);
        assert_eq!(say(125).as_deref(), Some("compiling for 2 min, now: checking x... yes"));
    }
}
