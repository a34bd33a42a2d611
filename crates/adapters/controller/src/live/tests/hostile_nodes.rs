//! Tests with nodes under an attacker's control.

use std::num::NonZeroU32;

use farrier_core::image::Period;

use super::*;

/// A node runs more kernels than the limit allows. farrier does not build the last one, logs it, and serves the other nodes.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_node_that_cycles_through_kernels_blocks_no_other_node() {
    let logs = Logs::start();
    let mut bench = bench(&json!({}), &["a"]);
    let limits = &mut bench.services.definitions.site.kernel_limits;
    (limits.per_node, limits.within) = (NonZeroU32::MIN, Period::seconds(3600));
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.publish(K10, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.node("m", K10);
        state.daemon_set("a", "");
    });
    let live = Running::start(bench, fleet, true);
    live.fleet.until(|state| state.snapshots_taken >= 3).await;
    assert_eq!(live.fleet.state().image("a"), FIRST, "two kernels on the nodes hold the rollout");

    live.fleet.change(|state| state.node("m", K11));
    let state = live.fleet.until(|state| !state.writes.is_empty()).await;
    assert_eq!(Some(state.image("a").to_owned()), live.published(K9).await);
    let snapshots_before = state.snapshots_taken;
    live.fleet.until(|state| state.snapshots_taken >= snapshots_before + 3).await;
    assert_eq!(live.published(K11).await, None);
    let lines = logs.with("a node's kernel is not trusted");
    assert!(lines.len() == 1 && lines[0].contains("kernelLimits.perNode"), "{lines:?}");

    // Once the node's earlier kernels have expired from the limit, farrier trusts the node again.
    let trusted_again = async {
        while live.published(K11).await.is_none() {
            tokio::time::sleep(Duration::from_mins(1)).await;
        }
    };
    let began = Instant::now();
    tokio::time::timeout(Duration::from_hours(2), trusted_again).await.unwrap();
    assert!(began.elapsed() > Duration::from_mins(30), "{:?}", began.elapsed());
    live.stop().await;
}
