//! Progress on standard error: spinners and bars on a terminal, plain lines elsewhere.

use std::{
    collections::BTreeMap,
    io::{self, IsTerminal as _},
    time::{Duration, Instant},
};

use farrier_builder::services::{Reporter, Stage};
use farrier_core::text::printable_lines;
use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressStyle};
use parking_lot::Mutex;

use super::{message, printable};

/// Progress of builds: a spinner for each target on a terminal, plain lines elsewhere.
pub struct Progress {
    bars: Option<MultiProgress>,
    running: Mutex<BTreeMap<String, ProgressBar>>,
    stages: Mutex<BTreeMap<String, LongStage>>,
}

/// Interval of the messages about a long stage in a plain log. Some drivers configure themselves for minutes,
/// and users would think that the build hangs.
const HEARTBEAT_INTERVAL: Duration = Duration::from_mins(1);

/// A running stage in a plain log, which has no spinner to show that work continues.
struct LongStage {
    stage: Stage,
    since: Instant,
    last_message: Instant,
}

impl LongStage {
    fn begin(stage: Stage, now: Instant) -> Self {
        Self { stage, since: now, last_message: now }
    }

    /// Returns a message that the stage still runs, with its latest output line, if the last message is older
    /// than [`HEARTBEAT_INTERVAL`].
    fn heartbeat(&mut self, line: &str, now: Instant) -> Option<String> {
        (now.duration_since(self.last_message) >= HEARTBEAT_INTERVAL).then(|| {
            self.last_message = now;
            let minutes = now.duration_since(self.since).as_secs() / 60;
            format!("{} for {minutes} min, now: {line}", self.stage)
        })
    }
}

impl Progress {
    /// Creates the progress display: spinners if standard error is a terminal, otherwise plain lines.
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
    fn usual_duration(&self, subject: &str, usual: Duration) {
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
        let heartbeat = stages.get_mut(subject).and_then(|stage| stage.heartbeat(line, Instant::now()));
        if let Some(heartbeat) = heartbeat {
            message(&format!("{subject}: {heartbeat}"));
        }
        drop(stages);
        self.with_bar(subject, |bar| bar.set_message(printable(line)));
    }

    fn note(&self, subject: &str, text: &str) {
        let line = format!("{subject}: {text}");
        match &self.bars {
            // Print through the bars, which would otherwise be garbled. Ignore a failure, because there is
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_stage_is_told_of_once_a_minute() {
        let start = Instant::now();
        let mut stage = LongStage::begin(Stage::Compile, start);
        let mut say =
            |seconds: u64| stage.heartbeat("checking x... yes", start + Duration::from_secs(seconds));
        assert_eq!([say(1), say(59)], [None, None]);
        assert_eq!(say(61).as_deref(), Some("compiling for 1 min, now: checking x... yes"));
        assert_eq!([say(62), say(120)], [None, None]);
        assert_eq!(say(125).as_deref(), Some("compiling for 2 min, now: checking x... yes"));
    }
}
