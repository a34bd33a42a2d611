//! Decides when a companion container loads and unloads its module. The module depends on drivers that other containers
//! load and unload.

/// Observed state of the two drivers and of the module.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Observation {
    /// OFED is ready.
    pub(crate) ofed: bool,
    /// The GPU driver is ready.
    pub(crate) gpu: bool,
    /// The module is loaded.
    pub(crate) loaded: bool,
    /// Identity of the loaded `ib_core`.
    pub(crate) ib_core: Option<String>,
}

/// Next action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing: the module is loaded and current.
    Keep,
    /// Nothing: a driver is missing.
    Wait(Missing),
    /// Load the module.
    Load,
    /// Unload the module and load it again, because it was loaded against another `ib_core`.
    Reload,
    /// Unload the module, so that the drivers below it can be unloaded.
    Release(Missing),
}

/// Drivers that the module waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Missing {
    Ofed,
    Gpu,
    Both,
}

/// The container that unloads the module when a driver below it is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Owner {
    /// The drivers' own containers, which know the module by name, such as nvidia-peermem.
    DriverContainers,
    /// Only the container that loaded the module: nv_peer_mem.
    ThisContainer,
}

/// Decides the next action. `loaded_against` is the `ib_core` that the module was loaded against, if known.
pub(crate) fn decide(owner: Owner, observed: &Observation, loaded_against: Option<&str>) -> Step {
    let missing = match (observed.ofed, observed.gpu) {
        (true, true) => None,
        (false, true) => Some(Missing::Ofed),
        (true, false) => Some(Missing::Gpu),
        (false, false) => Some(Missing::Both),
    };
    match missing {
        Some(missing) if observed.loaded && owner == Owner::ThisContainer => Step::Release(missing),
        Some(missing) => Step::Wait(missing),
        None if !observed.loaded => Step::Load,
        // A module that uses ib_core prevents its replacement. After a replacement, the loaded module thus does not use it.
        None if loaded_against.zip(observed.ib_core.as_deref()).is_some_and(|(old, new)| old != new) => {
            Step::Reload
        }
        None => Step::Keep,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn observed(ofed: bool, gpu: bool, loaded: bool) -> Observation {
        Observation { ofed, gpu, loaded, ib_core: Some("A".into()) }
    }

    #[test]
    fn waits_for_both_drivers() {
        let step = |ofed, gpu| decide(Owner::DriverContainers, &observed(ofed, gpu, false), None);
        assert_eq!(step(false, false), Step::Wait(Missing::Both));
        assert_eq!(step(true, false), Step::Wait(Missing::Gpu));
        assert_eq!(step(false, true), Step::Wait(Missing::Ofed));
        assert_eq!(step(true, true), Step::Load);
    }

    #[test]
    fn modules_of_other_owners_are_not_unloaded() {
        assert_eq!(
            decide(Owner::DriverContainers, &observed(false, true, true), None),
            Step::Wait(Missing::Ofed)
        );
        assert_eq!(
            decide(Owner::ThisContainer, &observed(false, true, true), None),
            Step::Release(Missing::Ofed)
        );
        assert_eq!(
            decide(Owner::ThisContainer, &observed(true, false, true), None),
            Step::Release(Missing::Gpu)
        );
        assert_eq!(
            decide(Owner::ThisContainer, &observed(true, false, false), None),
            Step::Wait(Missing::Gpu)
        );
    }

    #[test]
    fn another_ib_core_requires_a_reload() {
        let there = observed(true, true, true);
        assert_eq!(decide(Owner::DriverContainers, &there, Some("A")), Step::Keep);
        assert_eq!(decide(Owner::DriverContainers, &there, None), Step::Keep);
        assert_eq!(decide(Owner::DriverContainers, &there, Some("B")), Step::Reload);
        let unknown = Observation { ib_core: None, ..there };
        assert_eq!(decide(Owner::DriverContainers, &unknown, Some("B")), Step::Keep);
    }

    #[test]
    fn nothing_is_loaded_while_a_driver_is_missing() {
        for owner in [Owner::DriverContainers, Owner::ThisContainer] {
            for (ofed, gpu) in [(false, true), (true, false), (false, false)] {
                for loaded in [false, true] {
                    let step = decide(owner, &observed(ofed, gpu, loaded), Some("B"));
                    assert!(matches!(step, Step::Wait(_) | Step::Release(_)), "{step:?}");
                }
            }
        }
    }
}
