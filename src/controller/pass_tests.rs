use std::sync::Arc;

use serde_json::json;

use crate::{
    controller::{
        live::once::run_once,
        testing::{Bench, FIRST, Fleet, Gate, K9, K10, K11, module},
    },
    parts::BootChecker,
    plan::{HoldReason, RolloutDecision},
    registry::RegistryLocation,
};

/// Guarantee 1 is about the nodes as they are when the image is set, not as they were when a build began.
#[tokio::test]
async fn a_node_that_joins_while_a_build_runs_is_asked_about() {
    let rollout =
        json!({"strategy": "image", "namespace": "drivers", "daemonSet": "a", "container": "driver"});
    let mut bench = Bench::new(&json!({"reuse": "compatible", "rollout": [rollout]}));
    bench.parts.location = RegistryLocation::Remote { host: "registry.test".to_owned(), prefix: None };
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.image().spec.check.boot = true;
    let gate = Arc::new(Gate::default());
    bench.parts.boot_checker = Some(Arc::clone(&gate) as Arc<dyn BootChecker>);
    let fleet = Fleet::new(|state| {
        state.node("n", K10);
        state.daemon_set("a", "");
    });
    let joins = async {
        gate.asked.notified().await;
        fleet.change(|state| state.node("m", K11));
        gate.open.notify_one();
    };
    let (report, ()) = tokio::join!(run_once(bench.parts.clone(), Arc::clone(&fleet) as _), joins);
    let report = report.unwrap();
    let [rollout] = report.rollouts.as_slice() else { panic!("{:?}", report.rollouts) };
    let RolloutDecision::Hold(HoldReason::MixedKernels { kernels }) = &rollout.planned.decision else {
        panic!("{rollout:?}")
    };
    assert_eq!(kernels.len(), 2);
    assert_eq!((fleet.state().writes.len(), fleet.state().image("a")), (0, FIRST));
}
