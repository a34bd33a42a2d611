//! Derives the outcome of each module from the report and from the end of the virtual machine.

use std::collections::BTreeSet;

use driver_entrypoint::report::{Ended, ReadBack, Record};
use kmod::BootOutcome;
use nix::errno::Errno;

use super::{
    BootError, Result,
    console::{Console, is_trace},
    protocol::Transcript,
    qemu::{Ending, Run},
    steps::PlannedStep,
};

/// Returns an outcome for each step. The kernel's init must have reported.
pub(super) fn classify(steps: &[PlannedStep], run: &Run) -> Result<Vec<BootOutcome>> {
    let names: Vec<(&str, bool)> =
        steps.iter().map(|step| (step.name.as_str(), step.payload.is_some())).collect();
    let mut outcomes = outcomes(&names, &run.transcript, run.ending, &run.console)?;
    let needs: Vec<_> = steps.iter().map(|step| (step.name.as_str(), step.needs.as_slice())).collect();
    excuse(&needs, &mut outcomes);
    Ok(outcomes)
}

/// Excuses modules that were refused because a needed module found no hardware or is missing. Without the needed
/// module's symbols, a refusal shows nothing about the refused module itself.
fn excuse(steps: &[(&str, &[String])], outcomes: &mut [BootOutcome]) {
    let own: BTreeSet<&str> = steps.iter().map(|(name, _)| *name).collect();
    let needed = steps.iter().flat_map(|(_, needs)| *needs).map(String::as_str);
    let mut absent: BTreeSet<&str> = needed.filter(|name| !own.contains(name)).collect();
    for ((name, needs), outcome) in steps.iter().zip(outcomes) {
        let is_absent = match outcome {
            BootOutcome::NotPresent { error, .. } => matches!(error.as_str(), "ENODEV" | "ENXIO"),
            BootOutcome::Refused { error, .. } if error == "ENOENT" => {
                needs.iter().any(|needed| absent.contains(needed.as_str()))
            }
            _ => false,
        };
        if is_absent {
            absent.insert(*name);
        }
        if is_absent && matches!(outcome, BootOutcome::Refused { .. }) {
            *outcome = BootOutcome::NotReached;
        }
    }
}

/// `steps`: the name, and whether the module belongs to the payload.
fn outcomes(
    steps: &[(&str, bool)],
    transcript: &Transcript,
    ending: Ending,
    console: &Console,
) -> Result<Vec<BootOutcome>> {
    if !transcript.complete() {
        return Err(BootError::Incomplete);
    }
    let mut story =
        Story { steps, outcomes: vec![BootOutcome::NotReached; steps.len()], busy: None, last: 0 };
    let mut failed_dependencies = Vec::new();
    for record in transcript.records() {
        match record {
            Record::Hello { .. } | Record::End(_) => {}
            Record::Failed(message) => return Err(BootError::Init(message.clone())),
            Record::Loading(step) | Record::Unloading(step) => story.begin(*step),
            Record::Loaded { step, ended, initialised, oops, read_back, messages } => {
                let outcome =
                    loaded(*ended, *initialised, *oops, read_back, &shown(&failed_dependencies, messages));
                if let (Some((name, false)), Some(error)) = (steps.get(*step), outcome.error()) {
                    failed_dependencies.push(format!("{name}, an in-tree module: {error}"));
                }
                story.set(*step, outcome);
            }
            Record::Unloaded { step, oops, messages, ended: _ } => {
                story.busy = None;
                if *oops {
                    story.set(*step, BootOutcome::Crashed { messages: shown(&[], messages) });
                }
            }
        }
    }
    if !transcript.ended() {
        let outcome = match ending {
            Ending::Exited => BootOutcome::Crashed { messages: console.last_words() },
            Ending::Silent => BootOutcome::Hung { messages: console.last_words() },
        };
        let step = story.busy.unwrap_or(story.last);
        story.set(step, outcome);
    }
    Ok(story.outcomes)
}

struct Story<'a> {
    steps: &'a [(&'a str, bool)],
    outcomes: Vec<BootOutcome>,
    /// The step in progress.
    busy: Option<usize>,
    /// The last step that was in progress: the likeliest cause of later failures.
    last: usize,
}

impl Story<'_> {
    fn begin(&mut self, step: usize) {
        (self.busy, self.last) = (Some(step), step);
    }

    fn set(&mut self, step: usize, outcome: BootOutcome) {
        self.busy = None;
        // Attribute a crash or hang of an in-tree module to the payload module that needs it.
        let fatal = matches!(outcome, BootOutcome::Crashed { .. } | BootOutcome::Hung { .. });
        let of_payload = |&(_, (_, payload)): &(usize, &(&str, bool))| *payload;
        let place = if fatal {
            self.steps.iter().enumerate().skip(step).find(of_payload).map_or(step, |(place, _)| place)
        } else {
            step
        };
        if let Some(slot) = self.outcomes.get_mut(place) {
            *slot = outcome;
        }
    }
}

fn loaded(
    ended: Ended,
    initialised: bool,
    oops: bool,
    read_back: &ReadBack,
    messages: &[String],
) -> BootOutcome {
    let messages = messages.to_vec();
    match ended {
        Ended::Killed(_) => BootOutcome::Crashed { messages },
        _ if oops => BootOutcome::Crashed { messages },
        Ended::Done if read_back.listed && read_back.state == "live" => BootOutcome::Loaded,
        Ended::Done => BootOutcome::Failed { error: "it is not live in /proc/modules".to_owned(), messages },
        Ended::Error(number) => {
            let (error, known) = (name(number), Errno::from_raw(number));
            match (initialised, means_no_hardware(known)) {
                (true, true) => BootOutcome::NotPresent { error, messages },
                (true, false) => BootOutcome::Failed { error, messages },
                // The loader itself (kernel/module/main.c) never returns these errors. So the module's init function
                // returned the error, on a kernel that does not trace init functions.
                (false, _) if matches!(known, Errno::ENXIO | Errno::ENODEV) => {
                    BootOutcome::NotPresent { error, messages }
                }
                (false, _) => BootOutcome::Refused { error, messages },
            }
        }
    }
}

fn shown(first: &[String], messages: &[String]) -> Vec<String> {
    first.iter().chain(messages.iter().filter(|message| !is_trace(message))).cloned().collect()
}

/// Whether the error is one that init functions return if the device, its firmware or a processor feature is missing.
fn means_no_hardware(number: Errno) -> bool {
    matches!(number, Errno::ENOENT | Errno::ENXIO | Errno::ENODEV | Errno::EOPNOTSUPP)
}

/// Returns an error number's symbolic name.
fn name(number: i32) -> String {
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

    fn tried(step: usize, ended: Ended, initialised: bool, messages: &[&str]) -> Record {
        let live = ended == Ended::Done;
        let state = if live { "live" } else { "" }.to_owned();
        Record::Loaded {
            step,
            ended,
            initialised,
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
    fn answers_of_the_loader_and_of_the_module_are_told_apart() {
        let answer = |number, initialised| {
            let records = [tried(0, Ended::Error(number), initialised, &["m: x"]), Record::End(2)];
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
    fn what_was_under_way_crashed_or_hung() {
        let records = [Record::Loading(0), tried(0, Ended::Done, true, &[]), Record::Loading(1)];
        let steps = [("a", true), ("b", true), ("c", true)];
        let console = console("x\nKernel panic - not syncing: m\n");
        let messages = || vec!["Kernel panic - not syncing: m".to_owned()];
        let found = |ending| outcomes(&steps, &transcript(&records), ending, &console).unwrap();
        let crashed = BootOutcome::Crashed { messages: messages() };
        assert_eq!(found(Ending::Exited), [BootOutcome::Loaded, crashed, BootOutcome::NotReached]);
        let hung = BootOutcome::Hung { messages: messages() };
        assert_eq!(found(Ending::Silent), [BootOutcome::Loaded, hung, BootOutcome::NotReached]);
    }

    #[test]
    fn a_crash_between_steps_is_that_of_the_step_before() {
        let records = [Record::Loading(0), tried(0, Ended::Done, true, &[])];
        let found =
            outcomes(&[("a", true), ("b", true)], &transcript(&records), Ending::Exited, &console(""))
                .unwrap();
        assert_eq!(found, [BootOutcome::Crashed { messages: vec![] }, BootOutcome::NotReached]);
    }

    #[test]
    fn a_crash_while_unloading_counts() {
        let oops = Record::Unloaded {
            step: 0,
            ended: Ended::Killed(9),
            oops: true,
            messages: vec!["BUG: x".into()],
        };
        let records = [tried(0, Ended::Done, true, &[]), oops, Record::End(3)];
        let found = outcomes(&[("a", true)], &transcript(&records), Ending::Exited, &console("")).unwrap();
        assert_eq!(found, [BootOutcome::Crashed { messages: vec!["BUG: x".into()] }]);
    }

    #[test]
    fn a_dependency_that_failed_is_named() {
        let records = [
            tried(0, Ended::Error(2), true, &["calling  x"]),
            tried(1, Ended::Error(2), false, &["m: Unknown symbol y (err -2)"]),
            Record::End(3),
        ];
        let steps = [("libcrc32c", false), ("m", true)];
        let found = outcomes(&steps, &transcript(&records), Ending::Exited, &console("")).unwrap();
        let messages = vec![
            "libcrc32c, an in-tree module: ENOENT".to_owned(),
            "m: Unknown symbol y (err -2)".to_owned(),
        ];
        assert_eq!(found[1], BootOutcome::Refused { error: "ENOENT".into(), messages });
    }

    #[test]
    fn what_needs_absent_hardware_is_not_tried() {
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
        let said = ["ENOENT", "ENOENT", "ENOENT", "EINVAL"].map(refused);
        let mut outcomes = vec![absent("ENODEV")];
        outcomes.extend(said);
        // This error does not indicate missing hardware.
        outcomes.extend([absent("ENOENT"), refused("ENOENT")]);
        excuse(&steps, &mut outcomes);
        assert_eq!(
            outcomes[..4],
            [absent("ENODEV"), BootOutcome::NotReached, BootOutcome::NotReached, refused("ENOENT")]
        );
        assert_eq!(outcomes[4..], [refused("EINVAL"), absent("ENOENT"), refused("ENOENT")]);
    }

    #[test]
    fn what_needs_a_module_that_was_not_there_to_load_is_not_tried() {
        let refused = |error: &str| BootOutcome::Refused { error: error.to_owned(), messages: Vec::new() };
        let [video, own, bridge] = ["video", "own", "bridge"].map(|name| [name.to_owned()]);
        let none: &[String] = &[];
        let steps: [(&str, &[String]); 6] = [
            ("bridge", &video),
            ("camera", &bridge),
            ("own", none),
            // All that it needs is loaded, but it needs a symbol that nothing exports.
            ("user", &own),
            ("alone", none),
            // The loader got far enough to judge this module.
            ("other", &video),
        ];
        let mut outcomes = ["ENOENT", "ENOENT", "", "ENOENT", "ENOENT", "ENOEXEC"].map(refused);
        outcomes[2] = BootOutcome::Loaded;
        excuse(&steps, &mut outcomes);
        let (out, enoent) = (BootOutcome::NotReached, refused("ENOENT"));
        assert_eq!(
            outcomes,
            [out.clone(), out, BootOutcome::Loaded, enoent.clone(), enoent, refused("ENOEXEC")]
        );
    }

    #[test]
    fn a_report_with_a_gap_proves_nothing() {
        let mut transcript = transcript(&[]);
        transcript.push(Record::End(5).line(&KEY, 5).as_bytes());
        let error = outcomes(&[], &transcript, Ending::Exited, &console("")).unwrap_err();
        assert!(matches!(error, BootError::Incomplete));
    }
}
