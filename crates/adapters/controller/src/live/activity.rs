//! Current activity of builds, recorded from the builds' progress reports.

use std::{sync::Arc, time::Duration};

use farrier_core::{
    plan::{Activity, BuildActivity},
    text::is_deceptive,
};
use jiff::Timestamp;

use farrier_builder::services::{Reporter, Stage};
use parking_lot::Mutex;

use super::queue::CellKey;

/// Number of lines kept from the end of a build's output.
const LOG_TAIL_LINES: usize = 20;
/// Maximum length of a kept line in characters. The lines are stored in an API object.
const MAX_LINE_CHARS: usize = 300;

/// Activity of all builds, shared between the loop, the builds and the status sinks.
#[derive(Clone, Debug, Default)]
pub struct SharedActivity(Arc<Mutex<Activity>>);

impl From<Activity> for SharedActivity {
    fn from(activity: Activity) -> Self {
        Self(Arc::new(Mutex::new(activity)))
    }
}

impl SharedActivity {
    /// Returns a copy of the current activity.
    pub fn snapshot(&self) -> Activity {
        self.0.lock().clone()
    }

    fn update(&self, key: &CellKey, change: impl FnOnce(&mut BuildActivity)) {
        change(self.0.lock().entry(key.clone()).or_default());
    }

    /// Drops the activity of every build for which `keep` returns false.
    pub(super) fn retain(&self, keep: impl Fn(&CellKey) -> bool) {
        self.0.lock().retain(|key, _| keep(key));
    }

    /// Records that a build is queued.
    pub(super) fn record_queued(&self, key: &CellKey) {
        self.update(key, |activity| {
            if activity.stage != Some(Stage::Queued) {
                activity.stage = Some(Stage::Queued);
                activity.since = Some(Timestamp::now());
            }
        });
    }

    /// Records the start of a build.
    pub(super) fn record_start(&self, key: &CellKey) {
        self.update(key, |activity| {
            activity.attempts = activity.attempts.saturating_add(1);
            activity.next_retry = None;
            activity.stage = Some(Stage::Starting);
            activity.since = Some(Timestamp::now());
            activity.began = activity.since;
            activity.log_tail.clear();
        });
    }

    /// Records the end of a build.
    pub(super) fn record_end(
        &self,
        key: &CellKey,
        took: Duration,
        error: Option<String>,
        retry_in: Option<Duration>,
    ) {
        self.update(key, |activity| {
            activity.stage = None;
            (activity.since, activity.began) = (None, None);
            activity.took = Some(took);
            activity.error = error;
            activity.next_retry = retry_in.and_then(from_now);
        });
    }

    /// Records that a build is delayed because farrier was killed during earlier attempts.
    pub(super) fn record_delay(&self, key: &CellKey, attempts: u32, error: String, wait: Duration) {
        self.update(key, |activity| {
            activity.attempts = attempts;
            activity.error = Some(error);
            activity.next_retry = from_now(wait);
        });
    }

    /// Records that a build was stopped early. The stopped build does not count as an attempt.
    pub(super) fn record_stop(&self, key: &CellKey) {
        self.update(key, |activity| {
            activity.attempts = activity.attempts.saturating_sub(1);
            activity.stage = None;
            (activity.since, activity.began) = (None, None);
        });
    }

    /// Discards the activity of a build whose inputs changed. Attempts with the new inputs count from zero.
    pub(super) fn reset(&self, key: &CellKey) {
        self.0.lock().remove(key);
    }
}

fn from_now(wait: Duration) -> Option<Timestamp> {
    Timestamp::now().checked_add(jiff::SignedDuration::try_from(wait).ok()?).ok()
}

/// Records the progress of one build, and forwards it to the next reporter.
pub(super) struct BuildReporter {
    /// Key of the build's cell.
    pub(super) key: CellKey,
    /// Shared activity that the progress is recorded in.
    pub(super) activity: SharedActivity,
    /// The reporter to forward to.
    pub(super) next: Arc<dyn Reporter>,
    /// Whether to log stages. A single run shows stages as progress instead.
    pub(super) logs_stages: bool,
}

impl Reporter for BuildReporter {
    fn usual_duration(&self, subject: &str, usual: Duration) {
        self.activity.update(&self.key, |activity| activity.usual = Some(usual));
        self.next.usual_duration(subject, usual);
    }

    fn stage(&self, subject: &str, stage: Stage) {
        self.activity.update(&self.key, |activity| {
            activity.stage = Some(stage);
            activity.since = Some(Timestamp::now());
        });
        if self.logs_stages {
            tracing::info!(stage = %stage, "build stage");
        }
        self.next.stage(subject, stage);
    }

    fn output(&self, subject: &str, line: &str) {
        self.activity.update(&self.key, |activity| {
            if activity.log_tail.len() >= LOG_TAIL_LINES {
                activity.log_tail.remove(0);
            }
            let printable = |c: char| if is_deceptive(c) { ' ' } else { c };
            activity.log_tail.push(line.chars().take(MAX_LINE_CHARS).map(printable).collect());
        });
        self.next.output(subject, line);
    }

    fn note(&self, subject: &str, text: &str) {
        self.next.note(subject, text);
    }

    fn finished(&self, subject: &str, outcome: &str) {
        self.next.finished(subject, outcome);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Silent;

    impl Reporter for Silent {
        fn stage(&self, _: &str, _: Stage) {}
        fn output(&self, _: &str, _: &str) {}
        fn note(&self, _: &str, _: &str) {}
        fn finished(&self, _: &str, _: &str) {}
    }

    fn key() -> CellKey {
        let target = farrier_core::kernel::KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0-47-amd64".parse().unwrap(),
            arch: farrier_core::kernel::Architecture::Amd64,
        };
        ("mft".parse().unwrap(), target)
    }

    #[test]
    fn activity_follows_a_build_from_the_queue_to_its_end() {
        let shared = SharedActivity::default();
        let reporter =
            BuildReporter { key: key(), activity: shared.clone(), next: Arc::new(Silent), logs_stages: true };
        let now = || shared.snapshot().remove(&key()).unwrap_or_default();
        shared.record_queued(&key());
        assert_eq!(now().stage, Some(Stage::Queued));
        shared.record_start(&key());
        reporter.usual_duration("x", Duration::from_secs(74));
        reporter.stage("x", Stage::Compile);
        assert_eq!((now().stage, now().attempts), (Some(Stage::Compile), 1));
        let time = now().time(now().began.unwrap() + Duration::from_mins(1)).unwrap();
        assert_eq!(time.to_string(), "60 s of usually 74 s");
        for n in 0..50 {
            reporter.output("x", &format!("line {n}\u{1b}[0m{}", "y".repeat(1000)));
        }
        let tail = now().log_tail;
        assert_eq!(tail.len(), 20);
        assert!(tail[19].starts_with("line 49 [0my"), "{}", tail[19]);
        assert!(tail.iter().all(|line| line.chars().count() <= MAX_LINE_CHARS));

        shared.record_end(
            &key(),
            Duration::from_secs(3),
            Some("no room".to_owned()),
            Some(Duration::from_secs(9)),
        );
        let ended = now();
        assert_eq!((ended.stage, ended.began, ended.error.as_deref()), (None, None, Some("no room")));
        assert!(ended.next_retry.is_some());

        // A stopped build is not an attempt, and a success clears the error.
        shared.record_start(&key());
        shared.record_stop(&key());
        assert_eq!(now().attempts, 1);
        shared.record_start(&key());
        shared.record_end(&key(), Duration::from_secs(3), None, None);
        assert_eq!((now().attempts, now().error, now().next_retry), (2, None, None));
    }
}
