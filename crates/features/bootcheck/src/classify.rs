//! Derives the outcome of each module from the report and from the end of the virtual machine.

use std::collections::BTreeSet;

use driver_entrypoint::report::{ReadBack, Record, SyscallResult};
use kmod::BootOutcome;
use nix::errno::Errno;

use super::{
    BootError, Result,
    console::{Console, is_initcall_trace},
    protocol::Transcript,
    qemu::{Ending, Run},
    steps::PlannedStep,
};

/// Returns an outcome for each step. The init process must have reported.
pub(super) fn classify(steps: &[PlannedStep], run: &Run) -> Result<Vec<BootOutcome>> {
    let modules: Vec<(&str, bool)> =
        steps.iter().map(|step| (step.name.as_str(), step.payload_index.is_some())).collect();
    let mut outcomes = outcomes(&modules, &run.transcript, run.ending, &run.console)?;
    let dependencies: Vec<_> =
        steps.iter().map(|step| (step.name.as_str(), step.dependencies.as_slice())).collect();
    mark_dependents_not_reached(&dependencies, &mut outcomes);
    Ok(outcomes)
}

/// Turns the refusal of a module into [`BootOutcome::NotReached`] if one of its dependencies found no hardware or is missing.
/// Without the symbols of the dependency, a refusal shows nothing about the module itself.
fn mark_dependents_not_reached(steps: &[(&str, &[String])], outcomes: &mut [BootOutcome]) {
    let planned: BTreeSet<&str> = steps.iter().map(|(name, _)| *name).collect();
    let dependencies = steps.iter().flat_map(|(_, dependencies)| *dependencies).map(String::as_str);
    let mut absent: BTreeSet<&str> = dependencies.filter(|name| !planned.contains(name)).collect();
    for ((name, dependencies), outcome) in steps.iter().zip(outcomes) {
        let is_absent = match outcome {
            BootOutcome::NotPresent { error, .. } => matches!(error.as_str(), "ENODEV" | "ENXIO"),
            BootOutcome::Refused { error, .. } if error == "ENOENT" => {
                dependencies.iter().any(|dependency| absent.contains(dependency.as_str()))
            }
            _ => false,
        };
        if is_absent {
            absent.insert(*name);
            if matches!(outcome, BootOutcome::Refused { .. }) {
                *outcome = BootOutcome::NotReached;
            }
        }
    }
}

/// Derives the outcomes before dependencies are considered. `steps` contains the name of each module, and whether the module
/// belongs to the payload.
fn outcomes(
    steps: &[(&str, bool)],
    transcript: &Transcript,
    ending: Ending,
    console: &Console,
) -> Result<Vec<BootOutcome>> {
    if !transcript.is_complete() {
        return Err(BootError::Incomplete);
    }
    let mut tracker = OutcomeTracker {
        steps,
        outcomes: vec![BootOutcome::NotReached; steps.len()],
        current: None,
        latest: 0,
    };
    let mut failed_dependencies = Vec::new();
    for record in transcript.records() {
        match record {
            Record::Hello { .. } | Record::End(_) => {}
            Record::Failed(message) => return Err(BootError::Init(message.clone())),
            Record::Loading(step) | Record::Unloading(step) => tracker.begin(*step),
            Record::Loaded { step, result, initialized, oops, read_back, messages } => {
                let messages = shown_messages(&failed_dependencies, messages);
                let outcome = load_outcome(*result, *initialized, *oops, read_back, messages);
                if let (Some((name, false)), Some(error)) = (steps.get(*step), outcome.error()) {
                    failed_dependencies.push(format!("{name}, an in-tree module: {error}"));
                }
                tracker.set(*step, outcome);
            }
            Record::Unloaded { step, oops, messages, result: _ } => {
                tracker.current = None;
                if *oops {
                    tracker.set(*step, BootOutcome::Crashed { messages: shown_messages(&[], messages) });
                }
            }
        }
    }
    if !transcript.ended() {
        let outcome = match ending {
            Ending::Exited => BootOutcome::Crashed { messages: console.crash_lines() },
            Ending::Silent => BootOutcome::Hung { messages: console.crash_lines() },
        };
        let step = tracker.current.unwrap_or(tracker.latest);
        tracker.set(step, outcome);
    }
    Ok(tracker.outcomes)
}

/// Outcomes of the steps so far.
struct OutcomeTracker<'a> {
    /// Name of each module, and whether the module belongs to the payload.
    steps: &'a [(&'a str, bool)],
    outcomes: Vec<BootOutcome>,
    /// Step in progress.
    current: Option<usize>,
    /// Latest step that was in progress, which is the most likely cause of a later crash.
    latest: usize,
}

impl OutcomeTracker<'_> {
    fn begin(&mut self, step: usize) {
        (self.current, self.latest) = (Some(step), step);
    }

    /// Records the outcome of a step. A crash or hang of an in-tree module is attributed to the payload module that depends on
    /// it.
    fn set(&mut self, step: usize, outcome: BootOutcome) {
        self.current = None;
        let is_fatal = matches!(outcome, BootOutcome::Crashed { .. } | BootOutcome::Hung { .. });
        let blamed_step = if is_fatal { self.next_payload_step(step) } else { step };
        if let Some(slot) = self.outcomes.get_mut(blamed_step) {
            *slot = outcome;
        }
    }

    /// Returns the first step of the payload from `step` on, or `step` if there is none.
    fn next_payload_step(&self, step: usize) -> usize {
        let mut later = self.steps.iter().enumerate().skip(step);
        later.find(|(_, (_, is_payload))| *is_payload).map_or(step, |(index, _)| index)
    }
}

fn load_outcome(
    result: SyscallResult,
    initialized: bool,
    oops: bool,
    read_back: &ReadBack,
    messages: Vec<String>,
) -> BootOutcome {
    match result {
        SyscallResult::Killed(_) => BootOutcome::Crashed { messages },
        _ if oops => BootOutcome::Crashed { messages },
        SyscallResult::Success if read_back.listed && read_back.state == "live" => BootOutcome::Loaded,
        SyscallResult::Success => {
            BootOutcome::Failed { error: "it is not live in /proc/modules".to_owned(), messages }
        }
        SyscallResult::Errno(number) => {
            let (error, errno) = (errno_name(number), Errno::from_raw(number));
            match (initialized, means_no_hardware(errno)) {
                (true, true) => BootOutcome::NotPresent { error, messages },
                (true, false) => BootOutcome::Failed { error, messages },
                // The loader itself (kernel/module/main.c) never returns these errors. So the module's init function
                // returned the error, on a kernel that does not trace init functions.
                (false, _) if matches!(errno, Errno::ENXIO | Errno::ENODEV) => {
                    BootOutcome::NotPresent { error, messages }
                }
                (false, _) => BootOutcome::Refused { error, messages },
            }
        }
    }
}

/// Returns the messages to display: failed dependencies first, without traces of `initcall_debug`.
fn shown_messages(failed_dependencies: &[String], messages: &[String]) -> Vec<String> {
    let messages = messages.iter().filter(|message| !is_initcall_trace(message));
    failed_dependencies.iter().chain(messages).cloned().collect()
}

/// Whether the error is one that init functions return if the device, its firmware or a processor feature is missing.
fn means_no_hardware(errno: Errno) -> bool {
    matches!(errno, Errno::ENOENT | Errno::ENXIO | Errno::ENODEV | Errno::EOPNOTSUPP)
}

/// Returns the symbolic name of an `errno`.
fn errno_name(number: i32) -> String {
    match Errno::from_raw(number) {
        Errno::UnknownErrno => format!("errno {number}"),
        known => format!("{known:?}"),
    }
}

#[cfg(test)]
mod tests {
    use driver_entrypoint::report::Key;

    use super::*;

    const KEY: Key = Key([1; 16]);

    fn transcript(records: &[Record]) -> Transcript {
        let hello = Record::Hello { version: "1".into(), kernel: "6.1.0".into() };
        let mut transcript = Transcript::new(KEY);
        for (number, record) in (0..).zip([&hello].into_iter().chain(records)) {
            transcript.push(record.line(&KEY, number).as_bytes());
        }
        transcript
    }

    fn load_record(step: usize, result: SyscallResult, initialized: bool, messages: &[&str]) -> Record {
        let live = result == SyscallResult::Success;
        let state = if live { "live" } else { "" }.to_owned();
        Record::Loaded {
            step,
            result,
            initialized,
            oops: false,
            read_back: ReadBack { listed: live, state, ..ReadBack::default() },
            messages: messages.iter().map(ToString::to_string).collect(),
        }
    }

    fn console(text: &str) -> Console {
        let mut console = Console::default();
        console.push(text.as_bytes());
        console
    }

    #[test]
    fn refusals_by_the_loader_differ_from_failures_of_the_init_function() {
        let answer = |number, initialized| {
            let records =
                [load_record(0, SyscallResult::Errno(number), initialized, &["m: x"]), Record::End(2)];
            outcomes(&[("m", true)], &transcript(&records), Ending::Exited, &console("")).unwrap().remove(0)
        };
        let messages = || vec!["m: x".to_owned()];
        let error = str::to_owned;
        assert_eq!(answer(8, false), BootOutcome::Refused { error: error("ENOEXEC"), messages: messages() });
        assert_eq!(answer(2, false), BootOutcome::Refused { error: error("ENOENT"), messages: messages() });
        assert_eq!(answer(2, true), BootOutcome::NotPresent { error: error("ENOENT"), messages: messages() });
        assert_eq!(
            answer(19, true),
            BootOutcome::NotPresent { error: error("ENODEV"), messages: messages() }
        );
        assert_eq!(
            answer(19, false),
            BootOutcome::NotPresent { error: error("ENODEV"), messages: messages() }
        );
        assert_eq!(answer(22, true), BootOutcome::Failed { error: error("EINVAL"), messages: messages() });
        assert_eq!(
            answer(524, false),
            BootOutcome::Refused { error: error("errno 524"), messages: messages() }
        );
    }

    #[test]
    fn the_step_in_progress_is_the_one_that_crashed_or_hung() {
        let records =
            [Record::Loading(0), load_record(0, SyscallResult::Success, true, &[]), Record::Loading(1)];
        let steps = [("a", true), ("b", true), ("c", true)];
        let console = console("x\nKernel panic - not syncing: m\n");
        let messages = || vec!["Kernel panic - not syncing: m".to_owned()];
        let outcomes_with = |ending| outcomes(&steps, &transcript(&records), ending, &console).unwrap();
        let crashed = BootOutcome::Crashed { messages: messages() };
        assert_eq!(outcomes_with(Ending::Exited), [BootOutcome::Loaded, crashed, BootOutcome::NotReached]);
        let hung = BootOutcome::Hung { messages: messages() };
        assert_eq!(outcomes_with(Ending::Silent), [BootOutcome::Loaded, hung, BootOutcome::NotReached]);
    }

    #[test]
    fn a_crash_between_steps_is_attributed_to_the_earlier_step() {
        let records = [Record::Loading(0), load_record(0, SyscallResult::Success, true, &[])];
        let outcomes =
            outcomes(&[("a", true), ("b", true)], &transcript(&records), Ending::Exited, &console(""))
                .unwrap();
        assert_eq!(outcomes, [BootOutcome::Crashed { messages: vec![] }, BootOutcome::NotReached]);
    }

    #[test]
    fn a_crash_during_the_unload_is_reported() {
        let oops = Record::Unloaded {
            step: 0,
            result: SyscallResult::Killed(9),
            oops: true,
            messages: vec!["BUG: x".into()],
        };
        let records = [load_record(0, SyscallResult::Success, true, &[]), oops, Record::End(3)];
        let outcomes = outcomes(&[("a", true)], &transcript(&records), Ending::Exited, &console("")).unwrap();
        assert_eq!(outcomes, [BootOutcome::Crashed { messages: vec!["BUG: x".into()] }]);
    }

    #[test]
    fn a_failed_in_tree_dependency_is_named() {
        let records = [
            load_record(0, SyscallResult::Errno(2), true, &["calling  x"]),
            load_record(1, SyscallResult::Errno(2), false, &["m: Unknown symbol y (err -2)"]),
            Record::End(3),
        ];
        let steps = [("libcrc32c", false), ("m", true)];
        let outcomes = outcomes(&steps, &transcript(&records), Ending::Exited, &console("")).unwrap();
        let messages = vec![
            "libcrc32c, an in-tree module: ENOENT".to_owned(),
            "m: Unknown symbol y (err -2)".to_owned(),
        ];
        assert_eq!(outcomes[1], BootOutcome::Refused { error: "ENOENT".into(), messages });
    }

    #[test]
    fn dependents_of_a_module_without_hardware_are_not_reached() {
        let refused = |error: &str| BootOutcome::Refused { error: error.to_owned(), messages: Vec::new() };
        let absent = |error: &str| BootOutcome::NotPresent { error: error.to_owned(), messages: Vec::new() };
        let [gpu, modeset, crc] = ["gpu", "modeset", "crc"].map(|name| [name.to_owned()]);
        let none: &[String] = &[];
        let steps: [(&str, &[String]); 7] = [
            ("gpu", none),
            ("modeset", &gpu),
            ("drm", &modeset),
            ("other", none),
            ("uvm", &gpu),
            ("crc", none),
            ("net", &crc),
        ];
        let mut outcomes = vec![absent("ENODEV")];
        outcomes.extend(["ENOENT", "ENOENT", "ENOENT", "EINVAL"].map(refused));
        // This error does not indicate missing hardware.
        outcomes.extend([absent("ENOENT"), refused("ENOENT")]);
        mark_dependents_not_reached(&steps, &mut outcomes);
        assert_eq!(
            outcomes[..4],
            [absent("ENODEV"), BootOutcome::NotReached, BootOutcome::NotReached, refused("ENOENT")]
        );
        assert_eq!(outcomes[4..], [refused("EINVAL"), absent("ENOENT"), refused("ENOENT")]);
    }

    #[test]
    fn dependents_of_a_missing_module_are_not_reached() {
        let refused = |error: &str| BootOutcome::Refused { error: error.to_owned(), messages: Vec::new() };
        let [video, own, bridge] = ["video", "own", "bridge"].map(|name| [name.to_owned()]);
        let none: &[String] = &[];
        let steps: [(&str, &[String]); 6] = [
            ("bridge", &video),
            ("camera", &bridge),
            ("own", none),
            // All dependencies of this module are loaded, but nothing exports one of its symbols.
            ("user", &own),
            ("alone", none),
            // The loader got far enough to judge this module.
            ("other", &video),
        ];
        let mut outcomes = ["ENOENT", "ENOENT", "", "ENOENT", "ENOENT", "ENOEXEC"].map(refused);
        outcomes[2] = BootOutcome::Loaded;
        mark_dependents_not_reached(&steps, &mut outcomes);
        let (not_reached, enoent) = (BootOutcome::NotReached, refused("ENOENT"));
        assert_eq!(
            outcomes,
            [
                not_reached.clone(),
                not_reached,
                BootOutcome::Loaded,
                enoent.clone(),
                enoent,
                refused("ENOEXEC")
            ]
        );
    }

    #[test]
    fn an_incomplete_report_is_an_error() {
        let mut transcript = transcript(&[]);
        transcript.push(Record::End(5).line(&KEY, 5).as_bytes());
        let error = outcomes(&[], &transcript, Ending::Exited, &console("")).unwrap_err();
        assert!(matches!(error, BootError::Incomplete));
    }
}
