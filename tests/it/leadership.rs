//! Leader election with leases at an API server: acquired, lost, released and taken over.
use std::time::{Duration, Instant};

use farrier_cluster::{Fence, KubeOptions};
use farrier_controller::runtime::lease::{Leadership, LeaseOptions, LeaseTask, LeaseTiming, campaign};

use crate::support::{
    kube_api::{ApiFailure, FakeApi, Kind, Requests, objects},
    live::Live,
    logs::Logs,
};

/// Client-go's timing, scaled down to a tenth.
const TIMING: LeaseTiming = LeaseTiming {
    lease: Duration::from_secs(2),
    renew_deadline: Duration::from_secs(1),
    retry: Duration::from_millis(100),
};

/// Starts an API server with farrier's namespace.
fn cluster() -> FakeApi {
    let api = FakeApi::start();
    api.create(serde_json::json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "farrier"}}));
    api
}

fn candidate(api: &FakeApi, identity: &str) -> (Leadership, LeaseTask) {
    let options = LeaseOptions {
        namespace: "farrier".to_owned(),
        name: "farrier".to_owned(),
        identity: identity.to_owned(),
        timing: TIMING,
    };
    campaign(api.client(), options)
}

async fn until(leadership: &Leadership, leads: bool) {
    let mut watch = leadership.watch();
    let wait = watch.wait_for(|now| *now == leads);
    tokio::time::timeout(Duration::from_secs(30), wait).await.expect("the leadership never changed").unwrap();
}

fn lease(api: &FakeApi) -> serde_json::Value {
    api.get("leases.coordination.k8s.io", "farrier", "farrier").unwrap()["spec"].clone()
}

#[tokio::test]
async fn of_two_started_together_one_leads_and_hands_over_when_it_stops() {
    let api = cluster();
    let (a, a_task) = candidate(&api, "a");
    let (b, b_task) = candidate(&api, "b");
    let (mut a_watch, mut b_watch) = (a.watch(), b.watch());
    let first_is_a = tokio::select! {
        leads = a_watch.wait_for(|leads| *leads) => leads.is_ok(),
        leads = b_watch.wait_for(|leads| *leads) => leads.is_err(),
    };
    let ((first, first_task), (second, second_task)) =
        if first_is_a { ((a, a_task), (b, b_task)) } else { ((b, b_task), (a, a_task)) };
    assert_eq!(first.closed_reason(), None);
    assert!(
        second.closed_reason().unwrap().contains("held by another farrier"),
        "{:?}",
        second.closed_reason()
    );
    let spec = lease(&api);
    assert_eq!(spec["leaseTransitions"], 0);

    let stopped = Instant::now();
    first_task.release().await;
    assert!(first.closed_reason().is_some());
    until(&second, true).await;
    assert!(stopped.elapsed() < TIMING.lease, "the lease was not released");
    assert_eq!(second.closed_reason(), None);
    assert_eq!(lease(&api)["leaseTransitions"], 1);
    second_task.release().await;
    assert_eq!(lease(&api)["holderIdentity"], "");
}

#[tokio::test]
async fn a_standby_says_who_leads_and_once_for_each_leader() {
    let api = cluster();
    let logs = Logs::start();
    let (first, first_task) = candidate(&api, "farrier-7d-abc_01");
    until(&first, true).await;
    let (second, second_task) = candidate(&api, "farrier-7d-xyz_02");
    let looks = Requests::verb("get").resource("leases.coordination.k8s.io");
    let before = api.count(&looks);
    while api.count(&looks) < before + 4 {
        tokio::time::sleep(TIMING.retry).await;
    }
    let said = logs.with("standing by");
    assert_eq!(said.len(), 1, "{said:?}");
    assert!(said[0].contains("leader=\"farrier-7d-abc_01\""), "{said:?}");
    assert!(said[0].contains("kubectl -n farrier logs farrier-7d-abc"), "{said:?}");
    first_task.release().await;
    until(&second, true).await;
    second_task.release().await;
}

/// Two farriers with different instance names use separate leases and separate field managers.
#[test]
fn a_named_farrier_has_a_lease_and_fields_of_its_own() {
    let mut live = Live::new([objects::node("n0", "6.1.0-901-amd64")], "image");
    live.api.install(
        Kind::defined_by(&serde_json::to_value(farrier_controller::status::crd()).unwrap()).unwrap(),
    );
    live.publish();
    live.start(&["--leader-elect", "--instance", "gpu"]);
    live.until("a DriverBuild", |live| !live.api.list("driverbuilds.farrier.dev").is_empty());
    let leases = live.api.list("leases.coordination.k8s.io");
    let names: Vec<_> = leases.iter().map(|lease| lease["metadata"]["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["farrier-gpu"]);
    let builds = live.api.list("driverbuilds.farrier.dev");
    let fields = builds[0]["metadata"]["managedFields"].as_array().unwrap();
    assert!(fields.iter().all(|entry| entry["manager"] == "farrier-gpu"), "{fields:?}");
}

#[tokio::test]
async fn a_server_that_comes_back_without_its_rights_is_one_line() {
    let api = cluster();
    let directory = tempfile::tempdir().unwrap();
    let options =
        KubeOptions { kubeconfig: Some(api.kubeconfig(directory.path())), ..KubeOptions::default() };
    let client = farrier_cluster::kube::client(&options).await.unwrap();
    let options = LeaseOptions {
        namespace: "farrier".to_owned(),
        name: "farrier".to_owned(),
        identity: "a".to_owned(),
        timing: TIMING,
    };
    let (leadership, task) = campaign(client, options);
    until(&leadership, true).await;
    let logs = Logs::start();
    let leases = Requests::any().resource("leases.coordination.k8s.io");
    api.fail(leases.clone(), ApiFailure::Drop, 1);
    api.fail(leases.clone(), ApiFailure::Forbidden, 4);
    let before = api.count(&leases);
    while api.count(&leases) < before + 8 {
        tokio::time::sleep(TIMING.retry).await;
    }
    assert_eq!(logs.with("was unavailable and still refuses requests").len(), 1, "{:?}", logs.with(""));
    assert_eq!(logs.with("forbidden"), [""; 0]);
    assert_eq!(leadership.closed_reason(), None);
    task.release().await;
}

#[test]
fn a_killed_leader_is_followed_when_its_time_is_over_and_its_fence_is_closed_by_then() {
    let api = cluster();
    let killed = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let (first, _first_task) = killed.block_on(async {
        let (leadership, task) = candidate(&api, "a");
        until(&leadership, true).await;
        (leadership, task)
    });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (second, second_task) = candidate(&api, "b");
        assert_eq!(first.closed_reason(), None);
        let died = Instant::now();
        killed.shutdown_background();
        until(&second, true).await;
        assert!(died.elapsed() >= TIMING.lease.saturating_sub(TIMING.retry * 3), "{:?}", died.elapsed());
        assert!(first.closed_reason().is_some(), "there were two writers");
        second_task.release().await;
    });
}

#[tokio::test]
async fn a_leader_that_is_cut_off_closes_its_fence_before_anybody_may_take_over() {
    let api = cluster();
    let (leadership, task) = candidate(&api, "a");
    until(&leadership, true).await;
    let cut = Instant::now();
    let fault = api.fail_always(Requests::any().resource("leases.coordination.k8s.io"), ApiFailure::Hang);
    let mut watch = leadership.watch();
    let turns = async |watch: &mut tokio::sync::watch::Receiver<bool>| {
        tokio::time::timeout(Duration::from_secs(30), watch.changed())
            .await
            .expect("the watch reports the change")
            .unwrap();
        *watch.borrow_and_update()
    };
    watch.mark_unchanged();
    // No other replica is known to lead, so builds continue and the watch stays true.
    assert!(turns(&mut watch).await);
    assert!(
        leadership.closed_reason().unwrap().contains("could not be renewed"),
        "{:?}",
        leadership.closed_reason()
    );
    // Another replica can take over only after the lease's full duration.
    assert!(cut.elapsed() < TIMING.lease, "{:?}", cut.elapsed());

    api.take_back(fault);
    assert!(turns(&mut watch).await);
    assert_eq!(leadership.closed_reason(), None);
    task.release().await;
}

#[tokio::test]
async fn a_leader_that_was_cut_off_gives_way_to_the_one_that_took_over() {
    let api = cluster();
    let (first, first_task) = candidate(&api, "a");
    until(&first, true).await;
    // Another replica's record, written while the leader could not reach the server.
    let fault = api.fail_always(Requests::any().resource("leases.coordination.k8s.io"), ApiFailure::Hang);
    let taken = serde_json::json!({"spec": {"holderIdentity": "b"}});
    api.patch_as("b", "leases.coordination.k8s.io", "farrier", "farrier", &taken);
    api.take_back(fault);
    until(&first, false).await;
    assert!(first.closed_reason().unwrap().contains("was lost"), "{:?}", first.closed_reason());
    first_task.release().await;
}

#[tokio::test]
async fn a_lease_that_may_not_be_written_is_never_led_by() {
    let api = cluster();
    let forbidden = api
        .fail_always(Requests::verb("create").resource("leases.coordination.k8s.io"), ApiFailure::Forbidden);
    let (leadership, task) = candidate(&api, "a");
    let asked = Requests::verb("create").resource("leases.coordination.k8s.io");
    let wait = async {
        while api.count(&asked) < 3 {
            tokio::time::sleep(TIMING.retry).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), wait).await.unwrap();
    assert!(leadership.closed_reason().is_some());
    api.take_back(forbidden);
    until(&leadership, true).await;
    task.release().await;
}
