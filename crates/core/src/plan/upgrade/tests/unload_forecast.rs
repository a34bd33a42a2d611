//! Tests of unload forecasts: a driver is replaced only when a forecast on its node says that it can be unloaded.

use serde_json::json;

use super::{
    fleet::{Fleet, draining},
    waits,
};

#[test]
fn a_driver_goes_when_nothing_holds_it() {
    let by_forecast = || draining(json!({"drain": "device-users", "forecast": "forecast"}));
    let mut fleet = Fleet::new(1, by_forecast());
    fleet.settle_until(|fleet| waits(&fleet.plan(), "n0") == "pods that must leave first: 1");
    assert_eq!(fleet.state("n0"), "drained", "no resource request identified the pod");
    assert_eq!(fleet.settle().forecast.done, 1);

    let mut fleet = Fleet::new(2, by_forecast());
    fleet.stuck = true;
    fleet.settle_until(|fleet| fleet.state("n0") == "not-drained");
    let why = waits(&fleet.plan(), "n0");
    assert!(why.ends_with("the unload forecast found no way to unload the driver within 5m"), "{why}");
    assert!(!fleet.nodes["n0"].facts.unschedulable);
    assert_eq!(fleet.nodes["n0"].driver.as_ref().unwrap().image, "v1");
    fleet.stuck = false;
    assert_eq!(fleet.settle().forecast.done, 2);
}
