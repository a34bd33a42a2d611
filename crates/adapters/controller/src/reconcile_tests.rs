use std::{collections::BTreeMap, fs, sync::Arc, time::Duration};

use farrier_builder::{
    services::BootChecker,
    testing::{Bench, FIRST, Fleet, Gate, K9, K10, K11, module},
};
use farrier_cluster::Cluster as _;
use farrier_core::plan::{HoldReason, Outcome, RolloutDecision};
use farrier_store::registry::{RegistryLocation, RegistryOptions, connect};
use serde_json::json;

use super::{LookupCache, plan_for};
use crate::live::once::run_once;

/// Guarantee 1 applies to the nodes at the time of the write, not at the start of a build.
#[tokio::test]
async fn a_node_that_joins_during_a_build_holds_the_rollout() {
    let rollout =
        json!({"strategy": "image", "namespace": "drivers", "daemonSet": "a", "container": "driver"});
    let mut bench = Bench::new(&json!({"reuse": "compatible", "rollout": [rollout]}));
    bench.services.images.location =
        RegistryLocation::Remote { host: "registry.test".to_owned(), prefix: None };
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.image().spec.check.boot = true;
    let gate = Arc::new(Gate::default());
    bench.services.tools.boot_checker = Some(Arc::clone(&gate) as Arc<dyn BootChecker>);
    let fleet = Fleet::new(|state| {
        state.node("n", K10);
        state.daemon_set("a", "");
    });
    let joins = async {
        gate.asked.notified().await;
        fleet.change(|state| state.node("m", K11));
        gate.open.notify_one();
    };
    let (report, ()) =
        tokio::join!(run_once(bench.services.clone(), Arc::clone(&fleet) as _, Vec::new()), joins);
    let report = report.unwrap();
    let [rollout] = report.rollouts.as_slice() else { panic!("{:?}", report.rollouts) };
    let RolloutDecision::Hold(HoldReason::MixedKernels { kernels, .. }) = &rollout.planned.decision else {
        panic!("{rollout:?}")
    };
    assert_eq!(kernels.len(), 2);
    assert_eq!((fleet.state().writes.len(), fleet.state().image("a")), (0, FIRST));
}

/// Returns the reason why image `y` is not built.
async fn refused(bench: &Bench, fleet: &Fleet, lookup_cache: &mut LookupCache) -> Option<String> {
    let planned = plan_for(&bench.services, fleet.snapshot().await.unwrap(), lookup_cache).await.unwrap();
    let mut cells = planned.plan.cells.into_iter();
    match cells.find(|cell| cell.image.as_str() == "y").unwrap().outcome {
        Outcome::Skipped { why } => Some(why.to_string()),
        Outcome::Build { .. } => None,
        other => panic!("{other:?}"),
    }
}

/// A missing prebuilt image in a third party's registry is not looked up on every reconcile.
#[tokio::test(flavor = "local", start_paused = true)]
async fn an_absent_prebuilt_image_is_looked_up_again_only_after_a_pause() {
    let mut bench = Bench::new(&json!({}));
    let image = json!({"reference": "x:1.0-{{kernel_label}}-debian12-amd64"});
    bench.add("y", &json!({"sources": [{"name": "vendor", "from": {"image": image}}]}));
    let fleet = Fleet::new(|state| state.node("n", K9));
    let mut lookup_cache = LookupCache::default();
    let why = refused(&bench, &fleet, &mut lookup_cache).await.unwrap();
    assert!(why.contains("no prebuilt image x:1.0-"), "{why}");
    bench.publish(K9, &[&module()]).await.unwrap();
    lookup_cache.reset();
    assert_eq!(refused(&bench, &fleet, &mut lookup_cache).await, Some(why));
    // The image of another kernel is looked up at once.
    fleet.change(|state| state.node("n", K10));
    let why = refused(&bench, &fleet, &mut lookup_cache).await.unwrap();
    assert!(why.contains(K10), "{why}");
    fleet.change(|state| state.node("n", K9));
    tokio::time::advance(Duration::from_mins(6)).await;
    assert_eq!(refused(&bench, &fleet, &mut lookup_cache).await, None);
}

/// An outage keeps images from failing, so an unusable answer must not count as one.
#[tokio::test]
async fn only_a_registry_that_does_not_answer_is_down() {
    let mut bench = Bench::new(&json!({}));
    let fleet = Fleet::new(|state| state.node("n", K9));
    let mut lookup_cache = LookupCache::default();
    fs::create_dir(bench.root().join("layout")).unwrap();
    fs::write(bench.root().join("layout/index.json"), "{").unwrap();
    plan_for(&bench.services, fleet.snapshot().await.unwrap(), &mut lookup_cache).await.unwrap();
    assert!(lookup_cache.unreachable && !lookup_cache.observed.is_registry_down);

    let nobody = RegistryLocation::Remote { host: "127.0.0.1:1".to_owned(), prefix: None };
    bench.services.images.registry = connect(&nobody, &RegistryOptions::default());
    bench.services.images.location = nobody;
    plan_for(&bench.services, fleet.snapshot().await.unwrap(), &mut lookup_cache).await.unwrap();
    assert!(lookup_cache.observed.is_registry_down);
    lookup_cache.begin_plan(BTreeMap::new());
    assert!(!lookup_cache.observed.is_registry_down);
}
