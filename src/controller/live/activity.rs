//! Adapter: what the loop's builds do at this moment, as their reporters tell it.

use std::{sync::Arc, time::Duration};

use jiff::Timestamp;

use super::queue::CellKey;
use crate::{
    parts::{Reporter, Stage},
    plan::{Activity, BuildActivity},
    text::is_deceptive,
};

use parking_lot::Mutex;
/// Lines of a build's output that are kept.
const TAIL: usize = 20;
/// Characters of such a line: it ends up in an object of the API.
const LINE: usize = 300;

/// The activity that all builds write to.
#[derive(Clone, Debug, Default)]
pub struct SharedActivity(Arc<Mutex<Activity>>);

impl From<Activity> for SharedActivity {
    fn from(activity: Activity) -> Self {
        Self(Arc::new(Mutex::new(activity)))
    }
}

impl SharedActivity {
    /// As it is now.
    pub fn snapshot(&self) -> Activity {
        self.0.lock().clone()
    }

    fn with(&self, key: &CellKey, change: impl FnOnce(&mut BuildActivity)) {
        change(self.0.lock().entry(key.clone()).or_default());
    }

    /// Forgets what is neither kept by the caller nor under way.
    pub(super) fn retain(&self, keep: impl Fn(&CellKey) -> bool) {
        self.0.lock().retain(|key, _| keep(key));
    }

    /// It waits for room.
    pub(super) fn queued(&self, key: &CellKey) {
        self.with(key, |activity| {
            if activity.stage != Some(Stage::Queued) {
                activity.stage = Some(Stage::Queued);
                activity.since = Some(Timestamp::now());
            }
        });
    }

    /// It starts.
    pub(super) fn started(&self, key: &CellKey) {
        self.with(key, |activity| {
            activity.attempts = activity.attempts.saturating_add(1);
            activity.next_retry = None;
            activity.stage = Some(Stage::Starting);
            activity.since = Some(Timestamp::now());
            activity.began = activity.since;
            activity.log_tail.clear();
        });
    }

    /// It ended.
    pub(super) fn ended(
        &self,
        key: &CellKey,
        took: Duration,
        error: Option<String>,
        retry_in: Option<Duration>,
    ) {
        self.with(key, |activity| {
            activity.stage = None;
            (activity.since, activity.began) = (None, None);
            activity.took = Some(took);
            activity.error = error;
            activity.next_retry = retry_in.and_then(from_now);
        });
    }

    /// It waits, because so many attempts of an earlier farrier had no outcome.
    pub(super) fn put_off(&self, key: &CellKey, attempts: u32, error: String, wait: Duration) {
        self.with(key, |activity| {
            activity.attempts = attempts;
            activity.error = Some(error);
            activity.next_retry = from_now(wait);
        });
    }

    /// It was stopped before it came to anything: that was no attempt.
    pub(super) fn stopped(&self, key: &CellKey) {
        self.with(key, |activity| {
            activity.attempts = activity.attempts.saturating_sub(1);
            activity.stage = None;
            (activity.since, activity.began) = (None, None);
        });
    }

    /// Other inputs than before: their attempts are counted anew.
    pub(super) fn renewed(&self, key: &CellKey) {
        self.0.lock().remove(key);
    }
}

fn from_now(wait: Duration) -> Option<Timestamp> {
    Timestamp::now().checked_add(jiff::SignedDuration::try_from(wait).ok()?).ok()
}

/// Writes down what one build tells, and hands it on.
pub(super) struct BuildReporter {
    /// Whose build.
    pub(super) key: CellKey,
    /// Where it is written down.
    pub(super) activity: SharedActivity,
    /// Who hears it, too.
    pub(super) next: Arc<dyn Reporter>,
    /// Are stages logged? A single run shows them as its progress.
    pub(super) logs: bool,
}

impl Reporter for BuildReporter {
    fn usual(&self, subject: &str, usual: Duration) {
        self.activity.with(&self.key, |activity| activity.usual = Some(usual));
        self.next.usual(subject, usual);
    }

    fn stage(&self, subject: &str, stage: Stage) {
        self.activity.with(&self.key, |activity| {
            activity.stage = Some(stage);
            activity.since = Some(Timestamp::now());
        });
        if self.logs {
            tracing::info!(stage = %stage, "build stage");
        }
        self.next.stage(subject, stage);
    }

    fn output(&self, subject: &str, line: &str) {
        self.activity.with(&self.key, |activity| {
            if activity.log_tail.len() >= TAIL {
                activity.log_tail.remove(0);
            }
            let shown = |c: char| if is_deceptive(c) { ' ' } else { c };
            activity.log_tail.push(line.chars().take(LINE).map(shown).collect());
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
        let target = crate::kernel::KernelTarget {
            os: "debian".parse().unwrap(),
            os_version: "12".parse().unwrap(),
            release: "6.1.0-47-amd64".parse().unwrap(),
            arch: crate::kernel::Architecture::Amd64,
        };
        ("mft".parse().unwrap(), target)
    }

    #[test]
    fn a_build_is_followed_from_the_queue_to_its_end() {
        let shared = SharedActivity::default();
        let reporter =
            BuildReporter { key: key(), activity: shared.clone(), next: Arc::new(Silent), logs: true };
        let now = || shared.snapshot().remove(&key()).unwrap_or_default();
        shared.queued(&key());
        assert_eq!(now().stage, Some(Stage::Queued));
        shared.started(&key());
        reporter.usual("x", Duration::from_secs(74));
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
        assert!(tail.iter().all(|line| line.chars().count() <= LINE));

        shared.ended(
            &key(),
            Duration::from_secs(3),
            Some("no room".to_owned()),
            Some(Duration::from_secs(9)),
        );
        let ended = now();
        assert_eq!((ended.stage, ended.began, ended.error.as_deref()), (None, None, Some("no room")));
        assert!(ended.next_retry.is_some());

        // Stopping is no attempt, and success clears what was wrong.
        shared.started(&key());
        shared.stopped(&key());
        assert_eq!(now().attempts, 1);
        shared.started(&key());
        shared.ended(&key(), Duration::from_secs(3), None, None);
        assert_eq!((now().attempts, now().error, now().next_retry), (2, None, None));
    }
}
