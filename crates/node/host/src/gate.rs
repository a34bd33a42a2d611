//! Decides which kernel the host boots. No I/O.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{
    Error,
    state::{Artifacts, State, Trial},
};

/// The newest kernel that the host may boot next, and the newer ones that it may not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Decision {
    /// Kernel that the boot loader is to boot once.
    pub(crate) trial: Option<Trial>,
    /// Newer kernels that are held, with the reason for each driver.
    pub(crate) held: BTreeMap<String, BTreeMap<String, String>>,
    /// Newest kernel whose first boot has not failed, else the newest failed one. The cluster builds drivers for it.
    #[serde(default)]
    pub(crate) announced: Option<String>,
}

impl Decision {
    /// Holds the kernel that was to boot, because the boot loader refused it.
    pub(crate) fn hold_trial(&mut self, why: &Error) {
        if let Some(Trial { release, artifacts, .. }) = self.trial.take() {
            let reasons = artifacts.into_keys().map(|driver| (driver, why.to_string()));
            self.held.insert(release, reasons.collect());
        }
    }
}

/// Returns the kernel that must be the default: the first installed one of the confirmed default, the boot loader's default, and the
/// kernel that runs with its drivers.
pub(crate) fn default_kernel<'a>(candidates: [Option<&'a str>; 3], installed: &[String]) -> Option<&'a str> {
    candidates.into_iter().flatten().find(|release| installed.iter().any(|installed| installed == release))
}

/// Looks up a driver for a kernel: the digest of its system extension, or why there is none.
pub(crate) type Lookup<'a> = dyn FnMut(&str, &str) -> Result<String, String> + 'a;

/// Decides about the kernels that are newer than the default kernel. `installed` is ordered, oldest first. The boot loader has
/// entries for the kernels in `bootable`.
pub(crate) fn decide(
    default: &str,
    installed: &[String],
    bootable: &[String],
    drivers: &[String],
    state: &State,
    look_up: &mut Lookup<'_>,
) -> Decision {
    let mut decision = Decision::default();
    let for_all_drivers =
        |reason: &str| drivers.iter().map(|driver| (driver.clone(), reason.to_owned())).collect();
    let newer = || installed.iter().rev().take_while(|release| *release != default);
    for release in newer() {
        if let Some(failed) = state.failed.get(release) {
            let reason = format!("its first boot failed: {}", failed.reason);
            decision.held.insert(release.clone(), for_all_drivers(&reason));
            continue;
        }
        decision.announced.get_or_insert_with(|| release.clone());
        let (mut artifacts, mut missing) = (Artifacts::new(), BTreeMap::new());
        for driver in drivers {
            match look_up(driver, release) {
                Ok(digest) => artifacts.insert(driver.clone(), digest),
                Err(why) => missing.insert(driver.clone(), why),
            };
        }
        if missing.is_empty() && !bootable.contains(release) {
            missing =
                for_all_drivers("stored, but the kernel has no complete boot entry: see `dpkg --audit`");
        }
        if missing.is_empty() {
            decision.trial = Some(Trial { release: release.clone(), artifacts, armed_in: None });
            break;
        }
        decision.held.insert(release.clone(), missing);
    }
    decision.announced = decision.announced.or_else(|| newer().next().cloned());
    decision
}

/// Change of what the boot loader boots next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BootInstruction {
    /// The boot loader's state matches the decision already.
    Nothing,
    /// Boot the default: the decision has no trial.
    ClearNext,
    /// Boot this kernel once.
    BootOnce(Trial),
}

/// Compares the decision with what the boot loader would boot once (`next`).
pub(crate) fn boot_instruction(decision: &Decision, state: &State, next: Option<&str>) -> BootInstruction {
    match &decision.trial {
        Some(trial) => {
            let is_armed = |recorded: &Trial| {
                recorded.armed_in.is_some()
                    && (&recorded.release, &recorded.artifacts) == (&trial.release, &trial.artifacts)
            };
            if state.trial.as_ref().is_some_and(is_armed) && next == Some(trial.release.as_str()) {
                BootInstruction::Nothing
            } else {
                BootInstruction::BootOnce(trial.clone())
            }
        }
        None if next.is_some() || state.trial.is_some() => BootInstruction::ClearNext,
        None => BootInstruction::Nothing,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::FailedTrial;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|name| (*name).to_owned()).collect()
    }

    /// Decides with one or two drivers. `available` lists `driver@kernel`.
    fn decision(available: &[&str], state: &State) -> Decision {
        let mut look_up = |driver: &str, release: &str| {
            let wanted = format!("{driver}@{release}");
            if available.contains(&&*wanted) {
                Ok(format!("sha256:{wanted}"))
            } else {
                Err("no image".to_owned())
            }
        };
        let (installed, bootable) = (names(&["0", "1", "2", "3"]), names(&["1", "2", "3"]));
        decide("1", &installed, &bootable, &names(&["gpu", "net"]), state, &mut look_up)
    }

    #[test]
    fn only_the_removal_of_the_confirmed_kernel_changes_the_default() {
        let installed = names(&["1", "2", "3"]);
        for (candidates, expected) in [
            ([Some("1"), Some("3"), Some("2")], Some("1")),
            ([Some("1"), None, Some("2")], Some("1")),
            ([Some("removed"), Some("3"), Some("2")], Some("3")),
            ([Some("removed"), None, Some("2")], Some("2")),
            ([Some("removed"), Some("removed"), None], None),
            ([None, Some("3"), None], Some("3")),
        ] {
            assert_eq!(default_kernel(candidates, &installed), expected, "{candidates:?}");
        }
    }

    #[test]
    fn a_kernel_without_all_of_its_drivers_is_held() {
        let Decision { trial, held, announced } = decision(&["gpu@2", "gpu@3"], &State::default());
        assert_eq!((trial, announced.as_deref()), (None, Some("3")));
        assert_eq!(held.keys().collect::<Vec<_>>(), ["2", "3"]);
        assert_eq!(held["3"], BTreeMap::from([("net".to_owned(), "no image".to_owned())]));
    }

    #[test]
    fn the_newest_kernel_with_all_of_its_drivers_is_tried() {
        let available = ["gpu@2", "net@2", "gpu@3"];
        let first = decision(&available, &State::default());
        let trial = first.trial.clone().unwrap();
        assert_eq!((trial.release.as_str(), trial.artifacts.len()), ("2", 2));
        assert_eq!(first.held.keys().collect::<Vec<_>>(), ["3"], "the newer one is still held");
        let newer = decision(&["gpu@2", "net@2", "gpu@3", "net@3"], &State::default());
        assert_eq!(newer.trial.unwrap().release, "3");
    }

    #[test]
    fn the_boot_loader_is_told_until_it_knows() {
        let available = ["gpu@2", "net@2"];
        let decided = decision(&available, &State::default());
        let trial = decided.trial.clone().unwrap();
        let boot_once = BootInstruction::BootOnce(trial.clone());
        let with = |armed_in: Option<&str>| State {
            trial: Some(Trial { armed_in: armed_in.map(str::to_owned), ..trial.clone() }),
            ..State::default()
        };
        assert_eq!(boot_instruction(&decided, &State::default(), None), boot_once);
        assert_eq!(
            boot_instruction(&decided, &with(None), None),
            boot_once,
            "it failed, or farrier-host was killed"
        );
        assert_eq!(
            boot_instruction(&decided, &with(Some("b")), None),
            boot_once,
            "the kernel's package was replaced"
        );
        assert_eq!(boot_instruction(&decided, &with(Some("b")), Some("2")), BootInstruction::Nothing);
        let mut other = with(Some("b"));
        other.trial.as_mut().unwrap().artifacts.insert("gpu".to_owned(), "sha256:old".to_owned());
        assert_eq!(boot_instruction(&decided, &other, Some("2")), boot_once, "another build of a driver");
    }

    #[test]
    fn a_kernel_that_the_boot_loader_refuses_is_held() {
        let mut decided = decision(&["gpu@2", "net@2"], &State::default());
        decided.hold_trial(&Error::NoBootLoader);
        assert_eq!((decided.trial, decided.announced.as_deref()), (None, Some("3")));
        assert_eq!(decided.held.keys().collect::<Vec<_>>(), ["2", "3"]);
        assert_eq!(decided.held["2"]["net"], Error::NoBootLoader.to_string());
    }

    #[test]
    fn without_a_trial_the_default_boots_next() {
        let decided = decision(&[], &State::default());
        assert_eq!(boot_instruction(&decided, &State::default(), None), BootInstruction::Nothing);
        assert_eq!(boot_instruction(&decided, &State::default(), Some("2")), BootInstruction::ClearNext);
        let trial = Trial { release: "2".to_owned(), artifacts: Artifacts::new(), armed_in: None };
        let state = State { trial: Some(trial), ..State::default() };
        assert_eq!(boot_instruction(&decided, &state, None), BootInstruction::ClearNext);
    }

    #[test]
    fn a_kernel_whose_first_boot_failed_is_not_tried_again() {
        let failed = FailedTrial { reason: "it hung".to_owned() };
        let state = State { trial: None, failed: BTreeMap::from([("3".to_owned(), failed)]) };
        let Decision { trial, held, announced } = decision(&["gpu@2", "net@2", "gpu@3", "net@3"], &state);
        assert_eq!((trial.unwrap().release.as_str(), announced.as_deref()), ("2", Some("2")));
        assert_eq!(held["3"]["gpu"], "its first boot failed: it hung");
    }

    #[test]
    fn a_failed_kernel_is_announced_only_if_all_newer_ones_failed() {
        let failed = |release: &str| (release.to_owned(), FailedTrial { reason: "it hung".to_owned() });
        for (all_failed, expected) in [(&["3"][..], "2"), (&["2", "3"], "3"), (&["2"], "3")] {
            let failed = all_failed.iter().map(|release| failed(release)).collect();
            let decided = decision(&[], &State { trial: None, failed });
            assert_eq!(decided.announced.as_deref(), Some(expected), "{all_failed:?}");
        }
    }

    #[test]
    fn a_kernel_without_a_boot_entry_gives_way_to_an_older_one() {
        let (installed, bootable, drivers) = (names(&["1", "2", "3"]), names(&["1", "2"]), names(&["gpu"]));
        let mut stored = |_: &str, _: &str| Ok("sha256:0".to_owned());
        let decided = decide("1", &installed, &bootable, &drivers, &State::default(), &mut stored);
        assert_eq!(decided.trial.unwrap().release, "2");
        let reason = "stored, but the kernel has no complete boot entry: see `dpkg --audit`";
        assert_eq!(decided.held["3"]["gpu"], reason);
    }

    #[test]
    fn older_kernels_and_the_default_are_no_candidates() {
        let mut look_up = |_: &str, _: &str| panic!("nothing to look up");
        let installed = names(&["2", "3"]);
        let decision = decide("3", &installed, &installed, &names(&["gpu"]), &State::default(), &mut look_up);
        assert_eq!(decision, Decision::default());
    }
}
