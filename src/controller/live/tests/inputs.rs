//! Inputs that change between a plan and the end of its build.

use super::*;

/// A loop over one node of another kernel than the one that the image is published for.
async fn bench_with_a_lender() -> Bench {
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

/// What the registry holds has the hash that every later plan computes, and stays.
async fn is_published_as_planned(live: &Running) {
    let cell = live.bench.cell(K10).await;
    let found = live.bench.parts.look_up(&cell.reference).await.unwrap().unwrap();
    assert_eq!(found.input_hash, Some(cell.input_hash));
    let (looks, passes) = (live.fleet.state().looks, 4);
    live.fleet.until(|state| state.looks >= looks + passes).await;
    let plan = live.bench.parts.plan(live.fleet.as_ref()).await.unwrap().plan;
    assert!(plan.is_idle() && !plan.has_failures(), "{}", serde_json::to_string(&plan).unwrap());
}

/// The message "no headers" says how to bring them. They come while the build waits for its next attempt.
#[tokio::test(flavor = "local", start_paused = true)]
async fn headers_that_are_brought_while_a_build_waits_count_in_its_hash() {
    let bench = bench_with_a_lender().await;
    std::fs::remove_dir_all(bench.root().join(format!("headers-{K10}"))).unwrap();
    let live = Running::start(bench, fleet(), true);
    let lacks = |error: &Option<String>| error.as_ref().is_some_and(|error| error.contains("no headers"));
    live.views.until(|activity, _| activity.values().any(|build| lacks(&build.error))).await;

    live.bench.headers(K10, SYMBOLS);
    live.fleet.until(|state| state.writes.len() == 1).await;
    is_published_as_planned(&live).await;
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn headers_that_change_under_a_build_throw_it_away_and_nothing_else() {
    let mut bench = bench_with_a_lender().await;
    bench.image().spec.check.boot = true;
    let gate = Arc::new(Gate::default());
    bench.parts.boot_checker = Some(Arc::clone(&gate) as Arc<dyn BootChecker>);
    let live = Running::start(bench, fleet(), true);
    gate.asked.notified().await;
    live.bench.headers_with(K10, SYMBOLS, "CONFIG_OTHER=y\n");
    gate.open.notify_one();

    gate.asked.notified().await;
    assert_eq!(live.published(K10).await, None, "it was made for other headers than the next plan finds");
    gate.open.notify_one();
    live.fleet.until(|state| state.writes.len() == 1).await;
    is_published_as_planned(&live).await;
    live.stop().await;
}
