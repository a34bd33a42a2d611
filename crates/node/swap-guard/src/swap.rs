//! The order of phases, and the loop that performs them. The next phase depends on the journal and the time only.

use std::{io, time::Duration};

use super::journal::{Entry, Failure, Journal, JournalFile, Phase};

/// Number of interruptions after which a guard undoes the swap: the new modules may be what kills the guard.
pub const MAX_INTERRUPTIONS: usize = 3;

/// Minimum time for a phase, even after the time limit: enough for three connections to an API server.
const MIN_PHASE_TIME: Duration = Duration::from_secs(10);

/// The node, as far as a swap changes it.
pub trait Host {
    /// Returns the seconds since the node's boot.
    fn uptime(&self) -> u64;
    /// Performs a phase, or completes it after an interruption.
    fn perform(&mut self, phase: Phase, time_left: Duration) -> Result<(), Failure>;
    /// Fails unless the old modules are loaded. The reason names those that are loaded instead.
    fn check_restored(&self) -> Result<(), Failure>;
    /// Reports that the journal could not be written.
    fn warn(&mut self, error: &io::Error);
}

/// Performs a swap to its end. Continues where the journal ends.
///
/// Fails if the journal cannot be written before anything has changed. Later the swap continues without it, because the
/// node may have no network.
pub fn run(host: &mut dyn Host, journal: &mut JournalFile, limit: Duration) -> io::Result<()> {
    let mut entry = resume(journal.journal(), host.uptime());
    while let Some(next) = entry {
        let phase = next.phase;
        // An earlier guard, which was killed, may already have unloaded modules.
        let has_begun = journal.journal().0.iter().any(|entry| entry.phase.is_forward());
        if let Err(error) = journal.append(next) {
            if !has_begun {
                return Err(error);
            }
            host.warn(&error);
        }
        if phase.is_final() {
            return Ok(());
        }
        let time_left = time_left(journal.journal(), limit, host.uptime());
        let result = host.perform(phase, time_left);
        entry = Some(after(host, phase, result));
    }
    Ok(())
}

/// Returns the phase with which a guard continues after its start; `None` if the swap has ended.
pub fn resume(journal: &Journal, uptime: u64) -> Option<Entry> {
    let phase = journal.phase().unwrap_or(Phase::Saving);
    if phase.is_final() {
        return None;
    }
    if phase.is_forward() && journal.interruptions() >= MAX_INTERRUPTIONS {
        let reason = format!("the guard was interrupted {} times during the swap", MAX_INTERRUPTIONS + 1);
        let failure = Some(Failure { reason, transient: false });
        return Some(Entry { uptime, phase: Phase::UndoUnloading, failure });
    }
    Some(Entry { uptime, phase, failure: None })
}

/// Returns the phase after one that has ended.
fn after(host: &dyn Host, phase: Phase, result: Result<(), Failure>) -> Entry {
    let uptime = host.uptime();
    let next = match (phase, &result) {
        (Phase::Saving, Ok(())) => Phase::Unloading,
        (Phase::Saving | Phase::Refused, _) => Phase::Refused,
        (Phase::Unloading, Ok(())) => Phase::Loading,
        (Phase::Loading, Ok(())) => Phase::Replaying,
        (Phase::Replaying, Ok(())) => Phase::Confirming,
        (Phase::Confirming, Ok(())) | (Phase::Committed, _) => Phase::Committed,
        (Phase::Unloading | Phase::Loading | Phase::Replaying | Phase::Confirming, Err(_)) => {
            Phase::UndoUnloading
        }
        // An undo continues after each failure, because there is no alternative.
        (Phase::UndoUnloading, _) => Phase::UndoLoading,
        (Phase::UndoLoading, _) => Phase::UndoReplaying,
        (Phase::UndoReplaying, _) => Phase::UndoConfirming,
        (Phase::UndoConfirming, _) => return after_undo(result, host.check_restored(), uptime),
        (Phase::Undone | Phase::PartlyUndone | Phase::Lost, _) => phase,
    };
    Entry { uptime, phase: next, failure: result.err() }
}

/// Returns the end of an undone swap: `answer` is whether the API servers answer, `restored` whether the old modules are loaded.
fn after_undo(answer: Result<(), Failure>, restored: Result<(), Failure>, uptime: u64) -> Entry {
    let (phase, failures) = match (answer, restored) {
        (Ok(()), Ok(())) => (Phase::Undone, vec![]),
        (Ok(()), Err(other)) => (Phase::PartlyUndone, vec![other]),
        (Err(silent), Ok(())) => (Phase::Lost, vec![silent]),
        (Err(silent), Err(other)) => (Phase::Lost, vec![other, silent]),
    };
    let reasons: Vec<String> = failures.into_iter().map(|failure| failure.reason).collect();
    let failure = Failure { reason: reasons.join("; "), transient: false };
    Entry { uptime, phase, failure: (!reasons.is_empty()).then_some(failure) }
}

/// Returns the time that the current phase may take. The limit counts from the first unload, and again from the start of
/// the undo. An interruption of the guard does not extend the limit.
pub fn time_left(journal: &Journal, limit: Duration, uptime: u64) -> Duration {
    let undo_start = journal.start_of(Phase::UndoUnloading);
    let start = undo_start.or_else(|| journal.start_of(Phase::Unloading)).unwrap_or(uptime);
    let elapsed = Duration::from_secs(uptime.saturating_sub(start));
    limit.saturating_sub(elapsed).max(MIN_PHASE_TIME)
}

#[cfg(test)]
mod tests {
    use std::{
        cell::Cell,
        fs,
        panic::{AssertUnwindSafe, catch_unwind, panic_any},
        path::Path,
    };

    use super::*;

    const LIMIT: Duration = Duration::from_mins(2);

    /// Driver of the node.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Driver {
        Old,
        None,
        New,
    }

    /// When a guard is killed: at the begin of a step, or at its end.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Kill {
        Before,
        After,
    }

    /// A node with one driver and its settings. `broken` is the phase that fails.
    struct FakeHost {
        driver: Driver,
        has_settings: bool,
        broken: Option<Phase>,
        broken_undo: Option<Phase>,
        steps_left: Cell<Option<(usize, Kill)>>,
        performed: Vec<Phase>,
        has_full_disk: bool,
        uptime: Cell<u64>,
    }

    impl FakeHost {
        fn new(broken: Option<Phase>) -> Self {
            Self {
                driver: Driver::Old,
                has_settings: true,
                broken,
                broken_undo: None,
                steps_left: Cell::new(None),
                performed: Vec::new(),
                has_full_disk: false,
                uptime: Cell::new(0),
            }
        }

        fn change(&mut self, phase: Phase) {
            match phase {
                Phase::Unloading if self.driver == Driver::Old => {
                    (self.driver, self.has_settings) = (Driver::None, false);
                }
                Phase::Loading if self.driver == Driver::None => self.driver = Driver::New,
                Phase::UndoUnloading if self.driver == Driver::New => {
                    (self.driver, self.has_settings) = (Driver::None, false);
                }
                Phase::UndoLoading if self.driver == Driver::None => self.driver = Driver::Old,
                Phase::Replaying | Phase::UndoReplaying => self.has_settings = self.driver != Driver::None,
                _ => {}
            }
        }
    }

    impl Host for FakeHost {
        fn uptime(&self) -> u64 {
            self.uptime.set(self.uptime.get() + 1);
            self.uptime.get()
        }

        fn perform(&mut self, phase: Phase, _: Duration) -> Result<(), Failure> {
            self.performed.push(phase);
            let kill = match self.steps_left.get() {
                Some((0, kill)) => Some(kill),
                Some((left, kill)) => {
                    self.steps_left.set(Some((left - 1, kill)));
                    None
                }
                None => None,
            };
            if kill == Some(Kill::Before) {
                panic_any(());
            }
            if [self.broken, self.broken_undo].contains(&Some(phase)) {
                return Err(Failure { reason: format!("{phase} is broken"), transient: false });
            }
            self.change(phase);
            if kill == Some(Kill::After) {
                panic_any(());
            }
            Ok(())
        }

        fn check_restored(&self) -> Result<(), Failure> {
            let reason = format!("driver: {:?}", self.driver);
            if self.driver == Driver::Old { Ok(()) } else { Err(Failure { reason, transient: false }) }
        }

        fn warn(&mut self, error: &io::Error) {
            assert!(self.has_full_disk, "{error}");
        }
    }

    /// Starts guards until one ends; the first is killed at a step. Returns the journal.
    fn run_with_kill(host: &mut FakeHost, directory: &Path, kill: Option<(usize, Kill)>) -> Journal {
        let path = directory.join("journal");
        host.steps_left.set(kill);
        loop {
            let ended = catch_unwind(AssertUnwindSafe(|| {
                run(host, &mut JournalFile::open(&path).unwrap(), LIMIT).unwrap();
            }));
            host.steps_left.set(None);
            if ended.is_ok() {
                return JournalFile::open(&path).unwrap().journal().clone();
            }
        }
    }

    const BREAKABLE: [Option<Phase>; 6] = [
        None,
        Some(Phase::Saving),
        Some(Phase::Unloading),
        Some(Phase::Loading),
        Some(Phase::Replaying),
        Some(Phase::Confirming),
    ];

    #[test]
    fn a_kill_at_any_step_changes_nothing_of_the_result() {
        for broken in BREAKABLE {
            let expected = match broken {
                None => (Phase::Committed, Driver::New),
                Some(Phase::Saving) => (Phase::Refused, Driver::Old),
                Some(_) => (Phase::Undone, Driver::Old),
            };
            let mut whole = FakeHost::new(broken);
            let directory = tempfile::tempdir().unwrap();
            let journal = run_with_kill(&mut whole, directory.path(), None);
            assert_eq!((journal.phase().unwrap(), whole.driver), expected, "{broken:?}");
            assert_eq!(journal.failure().is_some(), broken.is_some(), "{journal:?}");
            for step in 0..whole.performed.len() {
                for kill in [Kill::Before, Kill::After] {
                    let directory = tempfile::tempdir().unwrap();
                    let mut host = FakeHost::new(broken);
                    let journal = run_with_kill(&mut host, directory.path(), Some((step, kill)));
                    let result = (journal.phase().unwrap(), host.driver);
                    assert_eq!(result, expected, "{broken:?} {step} {kill:?}: {journal:?}");
                    assert!(host.has_settings, "{broken:?} {step} {kill:?}: {journal:?}");
                }
            }
        }
    }

    #[test]
    fn a_guard_that_is_killed_again_and_again_undoes_the_swap() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let mut host = FakeHost::new(None);
        for _ in 0..=MAX_INTERRUPTIONS {
            host.steps_left.set(Some((0, Kill::Before)));
            if JournalFile::open(&path).unwrap().journal().phase() != Some(Phase::Loading) {
                host.steps_left.set(Some((2, Kill::Before)));
            }
            let killed = catch_unwind(AssertUnwindSafe(|| {
                run(&mut host, &mut JournalFile::open(&path).unwrap(), LIMIT).unwrap();
            }));
            assert!(killed.is_err());
        }
        let journal = run_with_kill(&mut host, directory.path(), None);
        assert_eq!((journal.phase(), host.driver), (Some(Phase::Undone), Driver::Old), "{journal:?}");
        assert_eq!(journal.failure().unwrap().reason, "the guard was interrupted 4 times during the swap");
    }

    /// Writes to the journal fail, as on a full file system.
    fn read_only(directory: &Path, text: &str) -> JournalFile {
        let path = directory.join("journal");
        fs::write(&path, text).unwrap();
        JournalFile::read_only(&path)
    }

    #[test]
    fn without_a_journal_only_a_swap_that_has_begun_continues() {
        for (text, broken, expected) in [
            ("", None, None),
            ("1 saving\n", None, None),
            ("1 saving\n2 unloading\n", None, Some((Phase::Committed, Driver::New))),
            ("1 saving\n2 unloading\n", Some(Phase::Confirming), Some((Phase::Undone, Driver::Old))),
            ("1 saving\n2 unloading\n3 undo-unloading\n", None, Some((Phase::Undone, Driver::Old))),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let mut journal = read_only(directory.path(), text);
            let mut host = FakeHost::new(broken);
            host.has_full_disk = true;
            let result = run(&mut host, &mut journal, LIMIT);
            if let Some((phase, driver)) = expected {
                result.unwrap();
                assert_eq!((journal.journal().phase(), host.driver), (Some(phase), driver), "{text}");
            } else {
                result.unwrap_err();
                assert_eq!((host.performed, host.driver), (vec![], Driver::Old), "{text}");
            }
        }
    }

    #[test]
    fn the_end_of_a_failed_way_back_says_what_is_true() {
        for (broken_undo, phase, reason) in [
            (None, Phase::Undone, None),
            (Some(Phase::UndoUnloading), Phase::PartlyUndone, Some("driver: New")),
            (Some(Phase::UndoLoading), Phase::PartlyUndone, Some("driver: None")),
            (Some(Phase::UndoReplaying), Phase::Undone, None),
            (Some(Phase::UndoConfirming), Phase::Lost, Some("undo-confirming is broken")),
        ] {
            let directory = tempfile::tempdir().unwrap();
            let mut host = FakeHost::new(Some(Phase::Confirming));
            host.broken_undo = broken_undo;
            let journal = run_with_kill(&mut host, directory.path(), None);
            assert_eq!(journal.phase(), Some(phase), "{journal:?}");
            assert_eq!(journal.failure().unwrap().reason, "confirming is broken");
            assert_eq!(journal.last_failure().map(|failure| failure.reason.as_str()), reason, "{journal:?}");
        }
    }

    #[test]
    fn a_node_without_an_answer_and_without_the_old_modules_lacks_both() {
        let mut host = FakeHost::new(None);
        host.driver = Driver::New;
        let silent = Failure { reason: "no answer".to_owned(), transient: false };
        let entry = after(&host, Phase::UndoConfirming, Err(silent));
        assert_eq!(
            (entry.phase, entry.failure.unwrap().reason.as_str()),
            (Phase::Lost, "driver: New; no answer")
        );
    }

    #[test]
    fn the_limit_counts_from_the_first_unload_and_again_for_the_way_back() {
        let seconds =
            |text: &str, uptime| time_left(&Journal::parse(text.as_bytes()), LIMIT, uptime).as_secs();
        assert_eq!(seconds("", 1000), 120);
        assert_eq!(seconds("5 saving\n10 unloading\n20 loading\n70 loading\n", 70), 60);
        assert_eq!(seconds("10 unloading\n20 loading\n", 500), 10);
        assert_eq!(seconds("10 unloading\n500 undo-unloading lasting x\n510 undo-loading\n", 520), 100);
    }
}
