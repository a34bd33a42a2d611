//! Tests of the loop with an in-memory cluster and a registry in a directory. Builds are real but need no engine,
//! because they reuse another kernel's payload. The tests advance a paused clock, so hours pass at once.

mod hostile_nodes;
mod inputs;
mod leadership;
mod waits;

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use farrier_builder::services::{BootChecker, Stage};
use farrier_builder::testing::{Bench, FIRST, Fleet, Gate, K9, K10, K11, Logs, SYMBOLS, module};
use farrier_cluster::{ApiError, Fence};
use farrier_core::plan::{Activity, KERNEL_LABEL, NodeChange, Untaint};
use farrier_store::registry::RegistryLocation;
use futures::FutureExt as _;
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::{sync::Notify, task::JoinHandle};
use tokio_util::sync::CancellationToken;

use super::*;

/// Keeps the last view that a status sink received.
#[derive(Default)]
struct RecordingSink {
    views: Mutex<Vec<(Activity, Option<String>)>>,
    notify: Notify,
    resets: AtomicUsize,
}

#[async_trait::async_trait]
impl StatusSink for RecordingSink {
    async fn reconciled(&self, view: &ReconcileView) {
        let views = (view.activity.clone(), view.configuration_error.clone());
        self.views.lock().push(views);
        self.notify.notify_one();
    }

    fn forget(&self) {
        self.resets.fetch_add(1, Ordering::SeqCst);
    }
}

impl RecordingSink {
    fn last(&self) -> Option<(Activity, Option<String>)> {
        self.views.lock().last().cloned()
    }

    async fn until(&self, condition: impl Fn(&Activity, Option<&str>) -> bool) {
        let wait = async {
            while !self.last().is_some_and(|(activity, error)| condition(&activity, error.as_deref())) {
                self.notify.notified().await;
            }
        };
        let found = tokio::time::timeout(Duration::from_hours(1), wait).await;
        assert!(found.is_ok(), "condition was never met: {:?}", self.last());
    }
}

/// A fence that a test can close.
#[derive(Default)]
struct TestFence(Mutex<Option<String>>);

impl Fence for TestFence {
    fn closed_reason(&self) -> Option<String> {
        self.0.lock().clone()
    }
}

/// A running loop, with everything it works on.
struct Running {
    bench: Bench,
    fleet: Arc<Fleet>,
    views: Arc<RecordingSink>,
    leads: watch::Sender<bool>,
    configuration: watch::Sender<Configuration>,
    health: Arc<Health>,
    metrics: Arc<Metrics>,
    cancel: CancellationToken,
    task: JoinHandle<()>,
}

fn rollout(daemon_set: &str) -> Value {
    json!({"strategy": "image", "namespace": "drivers", "daemonSet": daemon_set, "container": "driver"})
}

/// A bench with an image that may reuse payloads and is rolled out to these DaemonSets, in a registry that nodes can
/// pull from.
fn bench(further: &Value, daemon_sets: &[&str]) -> Bench {
    let rollouts: Vec<Value> = daemon_sets.iter().map(|name| rollout(name)).collect();
    let mut spec = json!({"reuse": "compatible", "rollout": rollouts});
    spec.as_object_mut().unwrap().extend(further.as_object().unwrap().clone());
    let mut bench = Bench::new(&spec);
    bench.services.images.location =
        RegistryLocation::Remote { host: "registry.test".to_owned(), prefix: None };
    bench
}

impl Running {
    fn start(bench: Bench, fleet: Arc<Fleet>, leads: bool) -> Self {
        Self::start_with(bench, fleet, leads, Vec::new())
    }

    fn start_with(bench: Bench, fleet: Arc<Fleet>, leads: bool, node_tasks: Vec<Arc<dyn NodeTask>>) -> Self {
        let views = Arc::new(RecordingSink::default());
        let definitions = Arc::new(bench.services.definitions.clone());
        let configuration = watch::channel(Configuration { definitions, error: None }).0;
        let leads = watch::channel(leads).0;
        let (health, metrics) = (Arc::new(Health::default()), Arc::new(Metrics::default()));
        let cancel = bench.services.process.cancel.clone();
        let live = Live::new(
            bench.services.clone(),
            LiveContext {
                resync: Duration::from_mins(1),
                cluster: Arc::clone(&fleet) as Arc<dyn Cluster>,
                configuration: configuration.subscribe(),
                leads: leads.subscribe(),
                status: Some(Arc::clone(&views) as Arc<dyn StatusSink>),
                page: None,
                node_tasks,
                reconcile_request: Arc::default(),
                metrics: Arc::clone(&metrics),
                health: Arc::clone(&health),
            },
        );
        let task = tokio::task::spawn_local(live.run());
        Self { bench, fleet, views, leads, configuration, health, metrics, cancel, task }
    }

    /// Returns the image that the registry holds for a kernel, by digest.
    async fn published(&self, release: &str) -> Option<String> {
        published(&self.bench, release).await
    }

    async fn stop(self) {
        self.cancel.cancel();
        self.task.await.unwrap();
    }
}

async fn published(bench: &Bench, release: &str) -> Option<String> {
    let reference = bench.cell(release).await.reference;
    let found =
        bench.services.images.registry.manifest(&reference.repository, &reference.version).await.unwrap();
    found.map(|found| format!("{}@{}", reference.repository, found.digest))
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_kernel_change_is_built_published_and_rolled_out() {
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
    });
    let live = Running::start(bench, fleet, true);
    let first = live.published(K9).await.unwrap();
    live.fleet.until(|state| state.image("a") == first).await;
    assert!(live.health.is_ready());

    live.fleet.change(|state| state.node("n", K10));
    let state = live.fleet.until(|state| state.writes.len() == 2).await;
    assert_eq!(state.image("a"), live.published(K10).await.unwrap());
    let metrics_text = live.metrics.text().unwrap();
    for line in [
        "farrier_builds_total{outcome=\"reused\"} 1",
        "farrier_rewrites_total{strategy=\"image\",outcome=\"made\"} 2",
    ] {
        assert!(metrics_text.contains(line), "{line} is missing from\n{metrics_text}");
    }

    // Steady state: an hour passes with periodic reconciles and without a write.
    let (snapshots_before, began) = (live.fleet.state().snapshots_taken, Instant::now());
    live.fleet.until(|state| state.snapshots_taken >= snapshots_before + 60).await;
    assert!(began.elapsed() >= Duration::from_mins(58), "{:?}", began.elapsed());
    assert_eq!(live.fleet.state().writes.len(), 2);
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_node_that_joins_after_the_plan_stops_the_rollout() {
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.publish(K10, &[&module()]).await.unwrap();
    // The first snapshot is for the plan. Before the second, which precedes the rewrite, a node with another kernel
    // joins.
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
        state.before = Some((2, |state| state.node("m", K10)));
    });
    let live = Running::start(bench, fleet, true);
    live.fleet.until(|state| state.snapshots_taken >= 5).await;
    let state = live.fleet.state();
    assert_eq!((state.snapshot.nodes.len(), state.image("a")), (2, FIRST));

    live.fleet.change(|state| {
        state.snapshot.nodes.retain(|node| node.name == "m");
        state.changed = true;
    });
    let state = live.fleet.until(|state| !state.writes.is_empty()).await;
    assert_eq!(state.image("a"), live.published(K10).await.unwrap());
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn nodes_that_a_rollout_does_not_reach_do_not_stop_it() {
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.publish(K10, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", K9);
        state.before = Some((2, |state| state.node("m", K10)));
    });
    let live = Running::start(bench, fleet, true);
    let state = live.fleet.until(|state| !state.writes.is_empty()).await;
    assert_eq!(state.snapshots_taken, 2, "one snapshot for the first plan, one before the write");
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn reconciles_without_a_write_do_not_use_up_the_rate_limit() {
    let logs = Logs::start();
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
        state.churn = 40;
    });
    let live = Running::start(bench, fleet, true);
    live.fleet.until(|state| state.churn == 0).await;
    let stable_since = Instant::now();
    live.fleet.until(|state| !state.writes.is_empty()).await;
    assert!(stable_since.elapsed() < Duration::from_secs(3), "{:?}", stable_since.elapsed());
    assert_eq!(logs.with("rollout waits"), [""; 0]);
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn copies_that_another_client_deletes_are_created_at_a_limited_rate() {
    let mut rollout = rollout("a");
    rollout["strategy"] = "per-kernel".into();
    let bench = bench(&json!({"rollout": [rollout]}), &[]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
        state.pod("a", "n", FIRST);
    });
    let live = Running::start(bench, fleet, true);
    let began = Instant::now();
    live.fleet.until(|state| state.writes.len() >= 8).await;
    assert!(began.elapsed() >= Duration::from_secs(45), "{:?}", began.elapsed());
    live.stop().await;
}

/// Removes a taint from node `n` in each reconcile.
struct Untainter;

impl NodeTask for Untainter {
    fn changes(&self, _: &Definitions, _: &Planned) -> Vec<Change> {
        let untaint = Some(Untaint { key: "farrier.dev/driver-not-ready".to_owned(), created: None });
        vec![Change::Node(NodeChange { name: "n".to_owned(), untaint, ..NodeChange::default() })]
    }
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_startup_taint_that_another_writer_sets_again_is_left_for_a_while() {
    let logs = Logs::start();
    let bench = bench(&json!({}), &[]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| state.node("n", K9));
    let live = Running::start_with(bench, fleet, true, vec![Arc::new(Untainter)]);
    let began = Instant::now();
    live.fleet.until(|state| state.writes.len() >= 4).await;
    assert!(began.elapsed() >= Duration::from_mins(10), "{:?}", began.elapsed());
    assert_eq!(logs.with("another writer reverts farrier's changes of nodes").len(), 1);
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_write_that_a_webhook_changes_is_made_again_after_an_hour() {
    let logs = Logs::start();
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
        let field = "annotation farrier.dev/record of DaemonSet a".to_owned();
        state.refused.insert("a".to_owned(), ApiError::NotKept(field));
    });
    let live = Running::start(bench, fleet, true);
    let snapshots = live.fleet.until(|state| state.refusals > 0).await.snapshots_taken;
    live.fleet.until(|state| state.snapshots_taken >= snapshots + 40).await;
    assert_eq!(live.fleet.state().refusals, 1);
    assert!(
        !logs
            .with("did not keep the annotation farrier.dev/record of DaemonSet a that farrier set")
            .is_empty()
    );
    live.fleet.until(|state| state.refusals == 2).await;
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_failed_write_does_not_hold_targets_outside_its_chain() {
    let bench = bench(&json!({}), &["a", "b"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", K9);
        state.daemon_set("b", K9);
        state.refused.insert("a".to_owned(), ApiError::Changed("another writer was faster".to_owned()));
    });
    let live = Running::start(bench, fleet, true);
    let state = live.fleet.until(|state| state.image("b") != FIRST).await;
    assert_eq!((state.image("a"), state.snapshots_taken), (FIRST, 3), "within the first reconcile");
    live.fleet.change(|state| {
        state.refused.clear();
        state.changed = true;
    });
    live.fleet.until(|state| state.image("a") != FIRST).await;
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn published_images_are_rolled_out_during_a_build() {
    let mut bench = bench(&json!({}), &["a", "b"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.publish(K10, &[&module()]).await.unwrap();
    bench.image().spec.check.boot = true;
    let gate = Arc::new(Gate::default());
    bench.services.tools.boot_checker = Some(Arc::clone(&gate) as Arc<dyn BootChecker>);
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.node("m", K11);
        state.daemon_set("a", K9);
        state.daemon_set("b", K11);
    });
    let live = Running::start(bench, fleet, true);
    gate.asked.notified().await;
    let first = live.published(K9).await.unwrap();
    live.fleet.until(|state| state.image("a") == first).await;
    // The kernel changes to one whose image is already published.
    live.fleet.change(|state| {
        state.node("n", K10);
        state.snapshot.daemon_sets[0].placement.node_selector =
            [(KERNEL_LABEL.to_owned(), K10.to_owned())].into();
    });
    let state = live.fleet.until(|state| state.writes.len() == 2).await;
    assert_eq!(state.image("a"), live.published(K10).await.unwrap());
    assert_eq!(state.image("b"), FIRST);
    live.views.until(|activity, _| activity.values().any(|build| build.stage == Some(Stage::Boot))).await;

    gate.open.notify_one();
    let state = live.fleet.until(|state| state.writes.len() == 3).await;
    assert_eq!(state.image("b"), live.published(K11).await.unwrap());
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_standby_observes_and_neither_builds_nor_writes() {
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K10);
        state.daemon_set("a", "");
    });
    let live = Running::start(bench, fleet, false);
    live.fleet.until(|state| state.snapshots_taken >= 5).await;
    assert!(live.health.is_ready());
    assert_eq!((live.published(K10).await, live.fleet.state().writes.len()), (None, 0));
    assert!(live.views.last().is_none());

    live.leads.send_replace(true);
    let state = live.fleet.until(|state| !state.writes.is_empty()).await;
    assert_eq!(state.image("a"), live.published(K10).await.unwrap());
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_fence_that_closes_during_a_build_prevents_publication() {
    let mut bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.image().spec.check.boot = true;
    let (gate, fence) = (Arc::new(Gate::default()), Arc::new(TestFence::default()));
    bench.services.tools.boot_checker = Some(Arc::clone(&gate) as Arc<dyn BootChecker>);
    bench.services.process.fence = Some(Arc::clone(&fence) as Arc<dyn Fence>);
    let fleet = Fleet::new(|state| {
        state.node("n", K10);
        state.daemon_set("a", "");
    });
    let live = Running::start(bench, fleet, true);
    gate.asked.notified().await;
    *fence.0.lock() = Some("lease farrier/farrier could not be renewed in time".to_owned());
    gate.open.notify_one();
    let snapshots_before = live.fleet.state().snapshots_taken;
    live.fleet.until(|state| state.snapshots_taken >= snapshots_before + 5).await;
    assert_eq!((live.published(K10).await, live.fleet.state().writes.len()), (None, 0));

    // The lease returns. The finished build is published, not repeated.
    *fence.0.lock() = None;
    live.fleet.until(|state| state.writes.len() == 1).await;
    assert!(gate.asked.notified().now_or_never().is_none());
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_skipped_cell_and_its_held_rollout_are_logged_once() {
    let logs = Logs::start();
    let bench = bench(&json!({"patches": [{"path": "patches/none.patch"}]}), &["a"]);
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("b", "");
    });
    let live = Running::start(bench, fleet, true);
    live.fleet.until(|state| state.snapshots_taken >= 10).await;
    let plans = logs.with("first plan made");
    assert!(plans.len() == 1 && plans[0].contains("1 skipped, 1 on hold"), "{plans:?}");
    let logged = logs.with("state changed");
    assert_eq!(logged.len(), 2, "{logged:?}");
    assert!(logged[0].contains("WARN") && logged[0].contains("state=\"skipped\""), "{logged:?}");
    assert!(logged[0].contains("none.patch"), "{logged:?}");
    assert!(
        logged[1].contains("DaemonSet drivers/a") && logged[1].contains("hint=\"create the DaemonSet"),
        "{logged:?}"
    );

    // The patch appears. There is no engine, and the build logs that itself.
    let patches = live.bench.services.definitions.root.join("patches");
    std::fs::create_dir(&patches).unwrap();
    std::fs::write(patches.join("none.patch"), "").unwrap();
    live.views.until(|activity, _| activity.values().any(|build| build.attempts >= 3)).await;
    assert!(logs.with("build failed").len() >= 2);
    assert_eq!(logs.with("state changed").len(), 2, "{:?}", logs.with("state changed"));
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn transient_faults_are_retried_with_backoff() {
    let logs = Logs::start();
    // Without a payload to reuse and without an engine, each attempt finds the engine unreachable.
    let bench = bench(&json!({}), &["a"]);
    let fleet = Fleet::new(|state| state.node("n", K9));
    let began = Instant::now();
    let live = Running::start(bench, fleet, true);
    live.views.until(|activity, _| activity.values().any(|build| build.attempts >= 5)).await;
    let (activity, _) = live.views.last().unwrap();
    let build = activity.values().next().unwrap();
    assert!(build.error.is_some() && build.took.is_some(), "{build:?}");
    // At least half of 10 + 20 + 40 + 80 seconds, because of jitter.
    assert!(began.elapsed() >= Duration::from_secs(75), "{:?}", began.elapsed());
    for logged in logs.with("build failed") {
        let wait = logged.split_once(" retry_in_seconds=").and_then(|(_, rest)| rest.split(' ').next());
        assert!(wait.is_some_and(|wait| wait.parse::<u64>().is_ok()), "{logged}");
        assert!(logged.contains("start the Docker daemon"), "{logged}");
    }
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn a_lost_tag_is_published_again() {
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K10);
        state.daemon_set("a", "");
    });
    let live = Running::start(bench, fleet, true);
    live.fleet.until(|state| state.writes.len() == 1).await;
    let before = live.published(K10).await.unwrap();
    live.bench.lose(&live.bench.cell(K10).await.reference);
    assert_eq!(live.published(K10).await, None);

    let lost = Instant::now();
    live.views.until(|_, _| lost.elapsed() >= Duration::from_mins(3)).await;
    // The same inputs give the same image, so there is nothing to rewrite.
    assert_eq!(live.published(K10).await, Some(before));
    assert_eq!(live.fleet.state().writes.len(), 1);
    live.stop().await;
}

#[tokio::test(flavor = "local", start_paused = true)]
async fn invalid_definitions_are_reported_and_the_valid_ones_stay_in_use() {
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
        state.daemon_set("b", "");
    });
    let live = Running::start(bench, fleet, true);
    live.fleet.until(|state| state.writes.len() == 1).await;
    live.configuration
        .send_modify(|configuration| configuration.error = Some("images/x.yaml: wrong".to_owned()));
    live.views.until(|_, error| error.is_some_and(|error| error.contains("images/x.yaml"))).await;
    assert!(live.metrics.text().unwrap().contains("farrier_configuration_valid 0"));
    // The loop continues with the last valid definitions.
    live.fleet.change(|state| state.node("n", K10));
    live.fleet.until(|state| state.writes.len() == 2).await;

    let mut definitions = live.bench.services.definitions.clone();
    let image = definitions.images.values_mut().next().unwrap();
    image.spec.rollout.push(serde_json::from_value(rollout("b")).unwrap());
    live.configuration.send_replace(Configuration { definitions: Arc::new(definitions), error: None });
    let state = live.fleet.until(|state| state.writes.len() == 3).await;
    assert_eq!(state.image("b"), state.image("a"));
    assert!(state.scope.last().unwrap().daemon_sets.contains(&("drivers".to_owned(), "b".to_owned())));
    live.views.until(|_, error| error.is_none()).await;
    assert!(live.metrics.text().unwrap().contains("farrier_configuration_valid 1"));
    live.stop().await;
}

/// A hundred changes in a minute, each with a write to the node, cause at most about as many reconciles and writes.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_flapping_node_causes_a_bounded_number_of_reconciles() {
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.publish(K10, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", "");
    });
    let live = Running::start(bench, fleet, true);
    live.fleet.until(|state| state.writes.len() == 1).await;
    let before = live.fleet.state().snapshots_taken;
    for flap in 0..100 {
        tokio::time::sleep(Duration::from_millis(600)).await;
        live.fleet.change(|state| state.node("n", if flap % 2 == 0 { K10 } else { K9 }));
    }
    let last = live.published(K9).await.unwrap();
    live.fleet.until(|state| state.image("a") == last && !state.changed).await;
    let state = live.fleet.state();
    assert!(state.snapshots_taken - before <= 155, "{}", state.snapshots_taken - before);
    assert!(state.writes.len() <= 101, "{}", state.writes.len());
    live.stop().await;
}

/// Thousands of changes at once, as when a third of a large fleet reboots.
#[tokio::test(flavor = "local", start_paused = true)]
async fn a_burst_of_changes_causes_few_reconciles() {
    let bench = bench(&json!({}), &["a"]);
    bench.publish(K9, &[&module()]).await.unwrap();
    bench.publish(K10, &[&module()]).await.unwrap();
    let fleet = Fleet::new(|state| {
        state.node("n", K9);
        state.daemon_set("a", K9);
    });
    let live = Running::start(bench, fleet, true);
    let before = live.fleet.until(|state| state.writes.len() == 1 && !state.changed).await.snapshots_taken;
    for n in 0..500 {
        tokio::time::sleep(Duration::from_millis(2)).await;
        live.fleet.change(|state| state.node(&format!("n{n}"), K10));
    }
    let after = live.fleet.until(|state| !state.changed).await.snapshots_taken;
    assert!(after - before <= 5, "{after}");
    live.stop().await;
}
