//! Tests with inputs that change between a plan and the end of its build, or that cannot be looked up.

use super::*;
use crate::observe_and_plan;

/// A bench with an image published for one kernel, for a node that runs another.
async fn bench_with_a_reusable_image() -> Bench {
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench
}

fn fleet() -> Arc<Fleet> {
    Fleet::new(|state| {
        state.node("n", K10);
        state.daemon_set("a", "");
    })
}

/// Asserts that the published image has the hash that every later plan computes, and that it stays.
async fn assert_published_as_planned(live: &Running) {
    let cell = live.bench.cell(K10).await;
    let found = live.bench.services.look_up(&cell.reference).await.unwrap().unwrap();
    assert_eq!(found.input_hash, Some(cell.input_hash));
    let (snapshots_before, reconciles) = (live.fleet.state().snapshots_taken, 4);
    live.fleet.until(|state| state.snapshots_taken >= snapshots_before + reconciles).await;
    let plan = observe_and_plan(&live.bench.services, live.fleet.as_ref()).await.unwrap().plan;
    assert!(plan.is_idle() && !plan.has_failures(), "{}", serde_json::to_string(&plan).unwrap());
}

/// A hint on missing headers is logged once. The headers then appear while the loop waits, without any notification.
#[tokio::test(flavor = "local", start_paused = true)]
async fn headers_that_appear_later_are_part_of_the_input_hash() {
    let logs = Logs::start();
    let bench = bench_with_a_reusable_image().await;
    std::fs::remove_dir_all(bench.root().join(format!("headers-{K10}"))).unwrap();
    let live = Running::start(bench, fleet(), true);
    live.fleet.until(|state| state.snapshots_taken >= 5).await;
    let logged = logs.with("no headers for ");
    assert!(logged.len() == 1 && logged[0].contains("farrier headers collect"), "{logged:?}");
    assert!(logs.with("build starts").is_empty());

    live.bench.headers(K10, SYMBOLS);
    live.fleet.until(|state| state.writes.len() == 1).await;
    assert_published_as_planned(&live).await;
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn headers_that_change_during_a_build_outdate_only_that_build() {
    let mut bench = bench_with_a_reusable_image().await;
    bench.image().spec.check.boot = true;
    let gate = Arc::new(Gate::default());
    bench.services.tools.boot_checker = Some(Arc::clone(&gate) as Arc<dyn BootChecker>);
    let live = Running::start(bench, fleet(), true);
    gate.asked.notified().await;
    live.bench.headers_with(K10, SYMBOLS, "CONFIG_OTHER=y\n");
    gate.open.notify_one();

    let again = tokio::time::timeout(Duration::from_secs(5), gate.asked.notified()).await;
    assert!(
        again.is_ok(),
        "the cell is planned and built again at once, because the cached lookups are stale"
    );
    assert_eq!(live.published(K10).await, None, "the build used other headers than the next plan finds");
    gate.open.notify_one();
    live.fleet.until(|state| state.writes.len() == 1).await;
    assert_published_as_planned(&live).await;
    live.stop().await;
}

#[tokio::test]
async fn each_kernel_has_the_toolchain_image_of_its_release() {
    let mut bench = Bench::new(&json!({}));
    let spec = &mut bench.services.definitions.families[0].spec;
    spec.toolchain = serde_json::from_value(json!({"image": "127.0.0.1:1/toolkit@{{digest}}"})).unwrap();
    let digest = |number: u8| format!("sha256:{number:064}");
    spec.digests = [(K9, 1), (K10, 2)]
        .map(|(release, number)| (release.parse().unwrap(), digest(number).parse().unwrap()))
        .into();
    let images: Vec<_> = bench.services.definitions.images.values().collect();
    let kernels = std::collections::BTreeSet::from([K9, K10, K11].map(Bench::target));
    let found = farrier_builder::resolve::resolve(&bench.services, &images, &kernels).await;
    let mut toolchains: Vec<_> = found.toolchains.into_values().collect();
    toolchains.sort();
    assert_eq!(toolchains[..2], [1, 2].map(|number| Ok(format!("127.0.0.1:1/toolkit@{}", digest(number)))));
    assert_eq!(
        toolchains[2..],
        [Err(format!("there is no value of {{{{digest}}}} for {K11} (set it in the kernel family)"))]
    );
}

/// A skip is logged with its reason, so the reason must contain the hint.
#[tokio::test]
async fn an_unavailable_toolchain_is_reported_with_a_hint() {
    let mut bench = Bench::new(&json!({}));
    let toolchain = serde_json::from_value(json!({"image": "127.0.0.1:1/toolchain:12"})).unwrap();
    bench.services.definitions.families[0].spec.toolchain = toolchain;
    let images: Vec<_> = bench.services.definitions.images.values().collect();
    let found =
        farrier_builder::resolve::resolve(&bench.services, &images, &[Bench::target(K9)].into()).await;
    let error = found.toolchains.values().next().unwrap().as_ref().unwrap_err();
    assert!(
        error.contains("check that the registry is running and that 127.0.0.1:1 is its address"),
        "{error}"
    );
}
