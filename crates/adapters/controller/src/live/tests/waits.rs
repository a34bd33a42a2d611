//! Tests that waiting is not a failure: a chain whose nodes change during its rollout, a pod kept by a disruption
//! budget, and a build that killed farrier.

use farrier_builder::Attempts;
use farrier_builder::testing::State;
use farrier_core::plan::{HoldReason, RolloutDecision, handover_label};
use kmod::testing::ModuleFile;

use super::{super::once::run_once, *};

/// `y` and `z` are compiled against `x`. The three have the DaemonSets `b`, `c` and `a`. All images are published.
async fn chain() -> Bench {
    let mut bench = bench(&json!({"exposes": ["/usr/src/x"], "reuse": "never"}), &["a"]);
    for (name, daemon_set) in [("y", "b"), ("z", "c")] {
        bench.add(name, &json!({"modules": [name], "needs": ["x"], "rollout": [rollout(daemon_set)]}));
    }
    for release in [K9, K10] {
        for (name, module) in [("x", "m"), ("y", "y"), ("z", "z")] {
            let module = ModuleFile::named(module).needs("printk", 1);
            bench.publish_of(name, release, &[&module]).await.unwrap();
        }
    }
    bench
}

/// One node for each DaemonSet. Before the third snapshot, which is taken between the first and the second rollout of
/// the chain, the label of one node changes: `b` reaches that node, and `c` does not.
fn fleet() -> Arc<Fleet> {
    Fleet::new(|state| {
        for (node, daemon_set) in [("n", "a"), ("m", "b"), ("o", "c")] {
            state.node(node, K9);
            state.daemon_set(daemon_set, "");
        }
        let pool = ("pool".to_owned(), "c".to_owned());
        state.snapshot.nodes[2].labels.extend([pool.clone()]);
        state.snapshot.daemon_sets[2].placement.node_selector = [pool].into();
        state.before = Some((3, |state| {
            state.snapshot.nodes[1].labels.insert("pool".to_owned(), "another".to_owned());
        }));
    })
}

/// Names of the images, in the order of the writes.
fn written(state: &State) -> Vec<&str> {
    let repositories = state.writes.iter().map(|image| image.split_once('@').unwrap().0);
    repositories.map(|repository| repository.rsplit('/').next().unwrap()).collect()
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_single_run_completes_a_chain_whose_nodes_change() {
    let (bench, fleet) = (chain().await, fleet());
    let report =
        run_once(bench.services.clone(), Arc::clone(&fleet) as Arc<dyn Cluster>, Vec::new()).await.unwrap();
    assert!(!report.failed(), "{:#?}", report.rollouts);
    let state = fleet.state();
    assert_eq!(written(&state), ["x", "y", "z"], "in order, although nothing blocked the last one");
    assert_eq!(
        state.snapshots_taken, 6,
        "two plans, one snapshot before each write, one before the rollout put off"
    );
    let made = report.rollouts.iter().map(|made| (made.planned.target.to_string(), made.error.clone()));
    assert_eq!(made.collect::<BTreeMap<_, _>>().len(), 3, "{:#?}", report.rollouts);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn the_loop_completes_a_chain_with_the_next_plan() {
    let live = Running::start(chain().await, fleet(), true);
    let began = Instant::now();
    let state = live.fleet.until(|state| state.writes.len() == 3).await;
    assert_eq!(written(&state), ["x", "y", "z"]);
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    let metrics_text = live.metrics.text().unwrap();
    let none_failed = "farrier_rewrites_total{strategy=\"image\",outcome=\"failed\"} 0";
    assert!(metrics_text.contains(none_failed), "{metrics_text}");
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_single_run_gives_up_while_a_node_keeps_changing() {
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
        state.churn = usize::MAX;
    });
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let cluster = Arc::clone(&fleet) as Arc<dyn Cluster>;
    let report = run_once(bench.services.clone(), cluster, Vec::new()).await.unwrap();
    let error = report.rollouts[0].error.as_deref().unwrap();
    assert!(error.contains("label churn of node n changed from 9 to 10"), "{error}");
    assert!(report.failed() && fleet.state().writes.is_empty());
}

/// A node of the first target changes after the plan; the nodes of the second do not.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_replanned_rollout_does_not_hold_others() {
    let fleet = Fleet::new(|state| {
        for (index, (node, daemon_set)) in [("n", "a"), ("m", "b")].into_iter().enumerate() {
            state.node(node, K9);
            state.daemon_set(daemon_set, "");
            let pool = ("pool".to_owned(), daemon_set.to_owned());
            state.snapshot.nodes[index].labels.extend([pool.clone()]);
            state.snapshot.daemon_sets[index].placement.node_selector = [pool].into();
        }
        state.before = Some((2, |state| {
            state.snapshot.nodes[0].labels.insert("other".to_owned(), "yes".to_owned());
        }));
    });
    let live = Running::start(published_bench().await, fleet, true);
    let state = live.fleet.until(|state| !state.writes.is_empty()).await;
    assert_eq!(state.image("a"), FIRST, "its plan is stale");
    assert_eq!(
        state.snapshots_taken, 3,
        "the other plan is current: one snapshot for planning, and one before each write"
    );
    live.fleet.until(|state| state.image("a") == state.image("b")).await;
    live.stop().await;
}

/// Another writer has used up the rewrite limit of the first target.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_rate_limited_target_holds_the_rest_of_its_chain() {
    let live = Running::start(chain().await, fleet(), true);
    live.fleet.until(|state| state.writes.len() == 3).await;
    for writes in 4..=6 {
        live.fleet.change(|state| {
            state.set_image("a", FIRST);
            state.changed = true;
        });
        live.fleet.until(|state| state.writes.len() == writes).await;
    }
    live.fleet.change(|state| {
        for node in &mut state.snapshot.nodes {
            K10.clone_into(&mut node.kernel_version);
            node.labels.insert(KERNEL_LABEL.to_owned(), K10.to_owned());
        }
        state.changed = true;
    });
    let held = Instant::now();
    let state = live.fleet.until(|state| state.writes.len() == 9).await;
    assert_eq!(written(&state), ["x", "y", "z", "x", "x", "x", "x", "y", "z"]);
    assert!(held.elapsed() > Duration::from_secs(5), "{:?}", held.elapsed());
    live.stop().await;
}

/// A webhook changes what farrier writes to the first target.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_hold_of_a_write_holds_the_rest_of_its_chain() {
    let (logs, fleet) = (Logs::start(), fleet());
    let error = ApiError::NotKept("annotation farrier.dev/record of DaemonSet a".to_owned());
    fleet.change(|state| drop(state.refused.insert("a".to_owned(), error)));
    let live = Running::start(chain().await, fleet, true);
    let state = live.fleet.until(|state| state.snapshots_taken >= 20).await;
    assert!(state.refusals == 1 && state.writes.is_empty(), "{:?}", state.writes);
    let held = "images of a chain are rolled out together, and x is on hold: the API server did not keep";
    assert!(!logs.with(held).is_empty());
    live.stop().await;
}

/// DaemonSet `a` has its image, with an outdated pod on node `n`; `b` is not rolled out yet.
async fn outdated_pod(bench: &Bench) -> Arc<Fleet> {
    let image = published(bench, K9).await.unwrap();
    let before = published(bench, K10).await.unwrap();
    Fleet::new(|state| {
        state.node("n", K9);
        for name in ["a", "b"] {
            state.daemon_set(name, "");
        }
        state.set_image("a", &image);
        state.pod("a", "n", &before);
        let refusal = "Cannot evict pod as it would violate the pod's disruption budget.".to_owned();
        state.refused.insert("a-n".to_owned(), ApiError::Disruption(refusal));
    })
}

async fn published_bench() -> Bench {
    let bench = bench(&json!({}), &["a", "b"]);
    for release in [K9, K10] {
        bench.publish(release, &[&module()]).await.unwrap();
    }
    bench
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_refused_eviction_is_a_hold_in_a_single_run() {
    let bench = published_bench().await;
    let fleet = outdated_pod(&bench).await;
    let report =
        run_once(bench.services.clone(), Arc::clone(&fleet) as Arc<dyn Cluster>, Vec::new()).await.unwrap();
    assert!(!report.failed(), "{:#?}", report.rollouts);
    let [kept, made] = report.rollouts.as_slice() else { panic!("{:#?}", report.rollouts) };
    let RolloutDecision::Hold(HoldReason::Disruption { detail }) = &kept.planned.decision else {
        panic!("{kept:#?}")
    };
    assert!(detail.contains("disruption budget"), "{detail}");
    assert!(matches!(made.planned.decision, RolloutDecision::Rewrite { .. }), "{made:#?}");
    assert_eq!((fleet.state().evictions.len(), fleet.state().writes.len()), (1, 1));
}

/// A spot node is deleted between the plan and the eviction.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_pod_that_is_gone_before_its_eviction_is_no_failure() {
    let bench = published_bench().await;
    let fleet = outdated_pod(&bench).await;
    fleet.change(|state| drop(state.refused.insert("a-n".to_owned(), ApiError::Gone)));
    let report =
        run_once(bench.services.clone(), Arc::clone(&fleet) as Arc<dyn Cluster>, Vec::new()).await.unwrap();
    assert!(!report.failed() && fleet.state().refusals == 1, "{:#?}", report.rollouts);
}

/// A spot node is deleted between the plan and the write of its label.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_node_that_is_gone_before_its_label_is_written_is_no_failure() {
    let mut rollout = rollout("a");
    rollout["strategy"] = "per-kernel".into();
    let bench = bench(&json!({"rollout": [rollout]}), &[]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
        state.pod("a", "n", FIRST);
        let label = handover_label("drivers", "a");
        state.snapshot.nodes[0].labels.insert(label, "handed-over".to_owned());
        state.refused.insert("n".to_owned(), ApiError::Gone);
    });
    let report =
        run_once(bench.services.clone(), Arc::clone(&fleet) as Arc<dyn Cluster>, Vec::new()).await.unwrap();
    let state = fleet.state();
    assert!(!report.failed(), "{:#?}", report.rollouts);
    assert_eq!((state.refusals, state.writes.len()), (1, 1), "the copy is created: {:?}", state.writes);
}

/// The budget refuses the eviction of a pod that is running but not ready. A pending pod may always be evicted.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_refused_eviction_holds_no_other_pod() {
    let bench = published_bench().await;
    let fleet = outdated_pod(&bench).await;
    let before = published(&bench, K10).await.unwrap();
    fleet.change(|state| {
        state.node("o", K9);
        state.pod("a", "o", &before);
        for pod in &mut state.snapshot.pods {
            pod.ready = false;
        }
    });
    run_once(bench.services.clone(), Arc::clone(&fleet) as Arc<dyn Cluster>, Vec::new()).await.unwrap();
    let left: Vec<String> = fleet.state().snapshot.pods.iter().map(|pod| pod.name.clone()).collect();
    assert_eq!(left, ["a-n"]);
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_refused_eviction_is_retried_and_holds_no_other_rollout() {
    let bench = published_bench().await;
    let fleet = outdated_pod(&bench).await;
    let live = Running::start(bench, fleet, true);
    let state = live.fleet.until(|state| state.writes.len() == 1).await;
    assert_ne!(state.image("b"), FIRST);
    // Each change triggers a reconcile, but not another eviction request.
    for change in 0..10 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        live.fleet.change(|state| {
            state.snapshot.nodes[0].labels.insert("churn".to_owned(), change.to_string());
            state.changed = true;
        });
    }
    let state = live.fleet.until(|state| state.evictions.len() == 3).await;
    for pair in state.evictions.windows(2) {
        let between = pair[1] - pair[0];
        assert!((15..20).contains(&between.as_secs()), "{between:?}");
    }
    live.fleet.change(|state| state.refused.clear());
    live.fleet.until(|state| state.snapshot.pods.is_empty()).await;
    let metrics_text = live.metrics.text().unwrap();
    let none_failed = "farrier_rewrites_total{strategy=\"image\",outcome=\"failed\"} 0";
    assert!(metrics_text.contains(none_failed), "{metrics_text}");
    live.stop().await;
}

/// Everything can be observed, so other kernels and rollouts continue.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_refused_write_is_no_unreachable_server() {
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
        state.refused.insert("a".to_owned(), ApiError::Rejected("denied by a policy".to_owned()));
    });
    let live = Running::start(published_bench().await, fleet, true);
    live.fleet.until(|state| state.snapshots_taken >= 6).await;
    let metrics_text = live.metrics.text().unwrap();
    assert!(metrics_text.contains("farrier_reconciles_total{outcome=\"unreachable\"} 0"), "{metrics_text}");
    assert!(!metrics_text.contains("farrier_reconciles_total{outcome=\"refused\"} 0"), "{metrics_text}");
    live.stop().await;
}

/// The loop plans with the last known state, which is no observation.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_silent_api_server_is_unreachable() {
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.snapshot.stale_since = Some(Timestamp::UNIX_EPOCH);
    });
    let live = Running::start(published_bench().await, fleet, true);
    live.fleet.until(|state| state.snapshots_taken >= 3).await;
    let metrics_text = live.metrics.text().unwrap();
    assert!(metrics_text.contains("farrier_reconciles_total{outcome=\"done\"} 0"), "{metrics_text}");
    assert!(!metrics_text.contains("farrier_reconciles_total{outcome=\"unreachable\"} 0"), "{metrics_text}");
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_slow_reconcile_is_no_hang() {
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", K9);
        state.write_time = Some(Duration::from_mins(6));
    });
    let live = Running::start(published_bench().await, fleet, true);
    let mut written = Box::pin(live.fleet.until(|state| !state.writes.is_empty()));
    while tokio::time::timeout(Duration::from_secs(10), &mut written).await.is_err() {
        assert_eq!(live.health.stalled(), None);
    }
    drop(written);
    live.stop().await;
}

/// Two earlier farrier processes were killed while building, possibly by the build.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_build_that_killed_farrier_is_delayed() {
    let logs = Logs::start();
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let attempts = Attempts::in_cache(&bench.services.cache);
    for _ in 0..2 {
        drop(attempts.begin(bench.cell(K10).await.input_hash).unwrap());
    }
    let began = Instant::now();
    let live = Running::start(
        bench,
        Fleet::new(|state| {
            state.node("n", K10);
            state.daemon_set("a", "");
        }),
        true,
    );
    live.views.until(|activity, _| activity.values().any(|build| build.next_retry.is_some())).await;
    let (activity, _) = live.views.last().unwrap();
    let build = activity.values().next().unwrap();
    assert_eq!(build.attempts, 2);
    let logged = logs.with("retrying");
    assert!(
        logged.len() == 1 && logged[0].contains("the last 2 attempts ended without a result"),
        "{logged:?}"
    );

    // The build is retried after a while. Its success clears the earlier attempts.
    live.fleet.until(|state| state.writes.len() == 1).await;
    assert!(began.elapsed() >= Duration::from_secs(10), "{:?}", began.elapsed());
    assert!(attempts.without_outcome().is_empty());
    live.stop().await;
}
