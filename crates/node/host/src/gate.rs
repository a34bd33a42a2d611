//! The decision which kernel the host boots. Pure.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::state::{Artifacts, State, Trial};

/// The newest kernel that the host may boot next, and the newer ones that it may not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Decision {
    /// Kernel that the boot loader is to boot once.
    pub(crate) trial: Option<Trial>,
    /// Whether the boot loader must be told about the trial.
    pub(crate) is_new: bool,
    /// Newer kernels that stay out of the boot loader's default, with the reason of each driver.
    pub(crate) held: BTreeMap<String, BTreeMap<String, String>>,
}

/// Looks up a driver for a kernel: the digest of its system extension, or why there is none.
pub(crate) type Lookup<'a> = dyn FnMut(&str, &str) -> Result<String, String> + 'a;

/// Decides about the kernels that are newer than the default kernel. `installed` is ordered, oldest first.
pub(crate) fn decide(
    default: &str,
    installed: &[String],
    drivers: &[String],
    state: &State,
    look_up: &mut Lookup<'_>,
) -> Decision {
    let mut decision = Decision::default();
    let newer = installed.iter().rev().take_while(|release| *release != default);
    for release in newer {
        if let Some(failed) = state.failed.get(release) {
            let reason = format!("its first boot failed: {}", failed.reason);
            decision.held.insert(
                release.clone(),
                drivers.iter().map(|driver| (driver.clone(), reason.clone())).collect(),
            );
            continue;
        }
        let (mut artifacts, mut missing) = (Artifacts::new(), BTreeMap::new());
        for driver in drivers {
            match look_up(driver, release) {
                Ok(digest) => artifacts.insert(driver.clone(), digest),
                Err(why) => missing.insert(driver.clone(), why),
            };
        }
        if missing.is_empty() {
            let trial = Trial { release: release.clone(), artifacts };
            decision.is_new = state.trial.as_ref() != Some(&trial);
            decision.trial = Some(trial);
            break;
        }
        decision.held.insert(release.clone(), missing);
    }
    decision
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
        decide("1", &names(&["0", "1", "2", "3"]), &names(&["gpu", "net"]), state, &mut look_up)
    }

    #[test]
    fn a_kernel_without_all_of_its_drivers_is_held() {
        let Decision { trial, held, .. } = decision(&["gpu@2", "gpu@3"], &State::default());
        assert_eq!(trial, None);
        assert_eq!(held.keys().collect::<Vec<_>>(), ["2", "3"]);
        assert_eq!(held["3"], BTreeMap::from([("net".to_owned(), "no image".to_owned())]));
    }

    #[test]
    fn the_newest_kernel_with_all_of_its_drivers_is_tried() {
        let available = ["gpu@2", "net@2", "gpu@3"];
        let first = decision(&available, &State::default());
        let trial = first.trial.clone().unwrap();
        assert_eq!((trial.release.as_str(), trial.artifacts.len(), first.is_new), ("2", 2, true));
        assert_eq!(first.held.keys().collect::<Vec<_>>(), ["3"], "the newer one is still held");
        let armed = State { trial: Some(trial), ..State::default() };
        assert!(!decision(&available, &armed).is_new, "the boot loader knows");
        let newer = decision(&["gpu@2", "net@2", "gpu@3", "net@3"], &armed);
        assert_eq!((newer.trial.unwrap().release.as_str(), newer.is_new), ("3", true));
    }

    #[test]
    fn a_kernel_whose_first_boot_failed_is_not_tried_again() {
        let failed = FailedTrial { artifacts: Artifacts::new(), reason: "it hung".to_owned() };
        let state = State { trial: None, failed: BTreeMap::from([("3".to_owned(), failed)]) };
        let Decision { trial, held, .. } = decision(&["gpu@2", "net@2", "gpu@3", "net@3"], &state);
        assert_eq!(trial.unwrap().release, "2");
        assert_eq!(held["3"]["gpu"], "its first boot failed: it hung");
    }

    #[test]
    fn older_kernels_and_the_default_are_no_candidates() {
        let mut look_up = |_: &str, _: &str| panic!("nothing to look up");
        let decision = decide("3", &names(&["2", "3"]), &names(&["gpu"]), &State::default(), &mut look_up);
        assert_eq!(decision, Decision::default());
    }
}
