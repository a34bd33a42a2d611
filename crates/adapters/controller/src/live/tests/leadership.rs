//! Tests of gaining and losing leadership.

use super::*;

#[tokio::test(flavor = "local", start_paused = true)]
async fn losing_the_leadership_stops_builds() {
    let mut bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.image().spec.check.boot = true;
    let gate = Arc::new(Gate::default());
    bench.services.tools.boot_checker = Some(Arc::clone(&gate) as Arc<dyn BootChecker>);
    let fleet = Fleet::new(|state| state.node("n", K10));
    let live = Running::start(bench, fleet, true);
    gate.asked.notified().await;
    live.leads.send_replace(false);
    let snapshots_before = live.fleet.state().snapshots_taken;
    live.fleet.until(|state| state.snapshots_taken >= snapshots_before + 3).await;
    assert!(live.metrics.text().unwrap().contains("farrier_builds_running 0"));
    assert_eq!(live.published(K10).await, None);
    live.stop().await;
}

/// Another replica has written status in between.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_new_term_discards_the_status_of_the_earlier_term() {
    let bench = bench(&json!({}), &["a"]);
    let live = Running::start(bench, Fleet::new(|state| state.node("n", K9)), true);
    let three_more = || live.fleet.state().snapshots_taken + 3;
    live.fleet.until(|state| state.snapshots_taken >= 3).await;
    live.leads.send_replace(false);
    let next = three_more();
    live.fleet.until(|state| state.snapshots_taken >= next).await;
    assert_eq!(live.views.resets.load(Ordering::SeqCst), 0);
    live.leads.send_replace(true);
    let next = three_more();
    live.fleet.until(|state| state.snapshots_taken >= next).await;
    assert_eq!(live.views.resets.load(Ordering::SeqCst), 1);
    live.stop().await;
}
