//! DriverBuilds and Events on an API server, and `farrier preflight`, which users run before a node boots another kernel.
use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use farrier_cluster::Fence;
use farrier_controller::{
    live::{ReconcileView, StatusSink},
    status::{KubeStatus, StatusDestination},
};
use farrier_core::plan::{
    Activity, AnnouncementReason, HoldReason, Outcome, Plan, PlannedCell, PlannedRollout, RolloutDecision,
    RolloutTarget, SkipReason, UnusedAnnouncement,
};

use crate::support::{
    kube_api::{FakeApi, Kind, Requests},
    logs::Logs,
    published::publish_planned,
    site::Site,
};
use jiff::{SignedDuration, Timestamp};
use serde_json::json;

const BUILDS: &str = "driverbuilds.farrier.dev";
const EVENTS: &str = "events.events.k8s.io";

fn with_driver_builds(api: &FakeApi) {
    let definition = serde_json::to_value(farrier_controller::status::crd()).unwrap();
    api.install(Kind::defined_by(&definition).unwrap());
}

struct Story {
    api: FakeApi,
    sink: KubeStatus,
    plan: Plan,
    now: Timestamp,
}

impl Story {
    fn new(api: FakeApi, fence: Option<Arc<dyn Fence>>) -> Self {
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "farrier"}});
        api.create(namespace);
        let place = StatusDestination {
            namespace: "farrier".to_owned(),
            manager: "farrier".to_owned(),
            instance: "farrier-0".to_owned(),
        };
        let sink = KubeStatus::new(api.client(), place, fence);
        let mut story = Self { api, sink, plan: Plan::default(), now: Timestamp::UNIX_EPOCH };
        story.calls_for("6.1.0-47-amd64");
        story.calls_for("6.1.0-48-amd64");
        story
    }

    fn calls_for(&mut self, release: &str) {
        self.plan.cells.push(PlannedCell {
            image: "hello".parse().unwrap(),
            target: farrier_core::kernel::KernelTarget {
                os: "debian".parse().unwrap(),
                os_version: "12".parse().unwrap(),
                release: release.parse().unwrap(),
                arch: "amd64".parse().unwrap(),
            },
            outcome: Outcome::Skipped { why: SkipReason::NoFamily },
            nodes: 3,
            announced_by: Vec::new(),
        });
    }

    /// Runs one reconcile `minutes` after the last one, and returns the writes.
    async fn reconcile(&mut self, minutes: i64) -> Vec<String> {
        self.now += SignedDuration::from_mins(minutes);
        self.api.clear_log();
        let (plan, now, activity) = (self.plan.clone(), self.now, Activity::new());
        let (snapshot, definitions) = <(Arc<_>, Arc<_>)>::default();
        let view = ReconcileView {
            plan: plan.into(),
            snapshot,
            definitions,
            activity,
            live: Activity::new().into(),
            rollouts: Vec::new(),
            configuration_error: None,
            now,
        };
        self.sink.reconciled(&view).await;
        let told = |record: &crate::support::kube_api::Record| {
            let sub = record.subresource.as_deref().map(|sub| format!("/{sub}")).unwrap_or_default();
            format!("{} {}{sub} {}", record.verb, record.resource, record.name)
        };
        let mut written: Vec<String> = self.api.writes().iter().map(told).collect();
        written.sort();
        written
    }

    fn lists(&self) -> usize {
        self.api.count(&Requests::verb("list").resource(BUILDS))
    }

    fn names(&self) -> Vec<String> {
        let name = |object: &serde_json::Value| object["metadata"]["name"].as_str().unwrap().to_owned();
        self.api.list(BUILDS).iter().map(name).collect()
    }
}

#[tokio::test]
async fn objects_are_written_once_and_go_when_nothing_calls_for_them() {
    let api = FakeApi::start();
    with_driver_builds(&api);
    let mut story = Story::new(api, None);
    assert_eq!(story.reconcile(0).await.len(), 4, "two objects, two statuses");
    assert_eq!((story.lists(), story.names().len()), (1, 2));
    let object = &story.api.list(BUILDS)[0];
    assert_eq!(object["spec"]["release"], "6.1.0-47-amd64");
    assert_eq!(object["status"]["phase"], "skipped");
    assert_eq!(object["status"]["nodes"], 3);

    for _ in 0..5 {
        assert_eq!(story.reconcile(1).await, [""; 0]);
        assert_eq!(story.lists(), 0);
    }
    let kept = story.names()[0].clone();
    story.plan.cells.truncate(1);
    assert_eq!(story.reconcile(1).await, [""; 0]);
    assert_eq!(
        story.names().len(),
        2,
        "an object without nodes stays for a while, because labels may return"
    );
    assert_eq!(story.reconcile(10).await.len(), 1);
    assert_eq!(story.names(), [kept]);

    story.plan.cells[0].nodes = 4;
    let written = story.reconcile(1).await;
    assert_eq!(written.len(), 1);
    assert!(written[0].starts_with("patch driverbuilds.farrier.dev/status hello-"), "{written:?}");
}

#[tokio::test]
async fn what_somebody_deleted_is_made_anew() {
    let api = FakeApi::start();
    with_driver_builds(&api);
    let mut story = Story::new(api, None);
    story.reconcile(0).await;
    story.api.delete(BUILDS, "farrier", &story.names()[0]);
    story.plan.cells[0].nodes = 4;
    story.reconcile(1).await;
    story.reconcile(1).await;
    assert_eq!(story.names().len(), 2);
    // A missing object without changes is only detected by the hourly list.
    story.api.delete(BUILDS, "farrier", &story.names()[1]);
    assert_eq!(story.reconcile(1).await, [""; 0]);
    story.reconcile(60).await;
    assert_eq!((story.lists(), story.names().len()), (1, 2));
}

#[tokio::test]
async fn without_the_definition_the_rest_goes_on() {
    let mut story = Story::new(FakeApi::start(), None);
    assert_eq!(story.reconcile(0).await, [""; 0]);
    assert_eq!(story.reconcile(1).await, [""; 0]);
    assert_eq!(story.lists(), 0, "the list is not repeated immediately");
    let why = AnnouncementReason::NoPlatform;
    story.plan.unused_announcements.push(UnusedAnnouncement { node: "n1".to_owned(), why });
    assert_eq!(story.reconcile(1).await.len(), 1);
    let events = story.api.list(EVENTS);
    assert_eq!(events.len(), 1);
    assert_eq!(events[0]["reason"], "AnnouncementNotUsed");
    assert_eq!(events[0]["type"], "Warning");
    assert_eq!(events[0]["regarding"]["name"], "n1");

    with_driver_builds(&story.api);
    story.reconcile(5).await;
    assert_eq!(story.names().len(), 2);
}

#[tokio::test]
async fn a_missing_right_stops_nothing_else() {
    let api = FakeApi::start();
    with_driver_builds(&api);
    api.deny("create", EVENTS);
    let mut story = Story::new(api, None);
    story.reconcile(0).await;
    story
        .plan
        .unused_announcements
        .push(UnusedAnnouncement { node: "n1".to_owned(), why: AnnouncementReason::NoPlatform });
    story.plan.cells[0].nodes = 4;
    story.reconcile(1).await;
    assert_eq!(story.api.list(BUILDS)[0]["status"]["nodes"], 4);
    assert_eq!(story.api.list(EVENTS).len(), 0);
}

#[tokio::test]
async fn a_namespace_that_is_not_there_is_said_as_that() {
    let api = FakeApi::start();
    with_driver_builds(&api);
    let mut story = Story::new(api, None);
    story.reconcile(0).await;
    let logs = Logs::start();
    let spec =
        json!({"strategy": "image", "namespace": "nowhere", "daemonSet": "hello", "container": "driver"});
    story.plan.rollouts.push(PlannedRollout {
        image: "hello".parse().unwrap(),
        target: RolloutTarget::of(&serde_json::from_value(spec).unwrap()),
        decision: RolloutDecision::Hold(HoldReason::NOT_FOUND),
        changes: Vec::new(),
        upgrade: None,
        warnings: Vec::new(),
        current_image: None,
    });
    story.reconcile(1).await;
    let said = logs.with("there is no such namespace");
    assert!(
        said.len() == 1 && said[0].contains("nowhere") && said[0].contains("create the namespace"),
        "{said:?}"
    );
    assert_eq!(logs.with("status cannot be written"), [""; 0]);
}

#[derive(Default)]
struct Lease {
    lost: AtomicBool,
}

impl Fence for Lease {
    fn closed_reason(&self) -> Option<String> {
        self.lost.load(Ordering::SeqCst).then(|| "the lease is lost".to_owned())
    }
}

#[tokio::test]
async fn who_lost_the_lease_writes_nothing() {
    let api = FakeApi::start();
    with_driver_builds(&api);
    let lease = Arc::new(Lease::default());
    let mut story = Story::new(api, Some(Arc::clone(&lease) as Arc<dyn Fence>));
    lease.lost.store(true, Ordering::SeqCst);
    assert_eq!(story.reconcile(0).await, [""; 0]);
    assert_eq!(story.lists(), 0);
    lease.lost.store(false, Ordering::SeqCst);
    assert_eq!(story.reconcile(1).await.len(), 4);
}

/// Apart from the hourly list, only a new leader detects objects that another replica deleted.
#[tokio::test]
async fn who_leads_again_lists_what_another_has_written() {
    let api = FakeApi::start();
    with_driver_builds(&api);
    let mut story = Story::new(api, None);
    story.reconcile(0).await;
    let names = story.names();
    story.api.delete(BUILDS, "farrier", &names[0]);
    // A new leader sends no Events for changes during the other replica's leadership.
    let why = AnnouncementReason::NoPlatform;
    story.plan.unused_announcements.push(UnusedAnnouncement { node: "n1".to_owned(), why });
    story.sink.forget();
    assert_eq!(story.reconcile(1).await.len(), 2, "an object and its status");
    assert_eq!((story.lists(), story.names()), (1, names));
    assert_eq!(story.api.list(EVENTS).len(), 0);
}

/// The canary runs one kernel and announces another.
#[test]
fn preflight_waits_for_the_images_that_a_node_will_need() {
    let site = Site::with_stand_in();
    let ask = ["preflight", "--kernel", "6.1.0-902-amd64", "--node", "edge-2", "-o", "json"];
    let answer = site.farrier(&ask).exits(1).json();
    assert_eq!(answer["ready"], false);
    assert_eq!(answer["nodes"][0]["needs"][0]["state"], "missing");

    let node = site.cluster().join("edge-2.yaml");
    let text = std::fs::read_to_string(&node).unwrap();
    let announced = "  name: edge-2\n  annotations: {farrier.dev/next-kernel: 6.1.0-902-amd64}\n";
    std::fs::write(&node, text.replace("  name: edge-2\n", announced)).unwrap();
    let plan = site.farrier(&["plan", "-o", "json"]).exits(0).json();
    let hello = |build: &&serde_json::Value| build["cell"]["image"] == "hello";
    let announced: Vec<_> =
        plan["builds"].as_array().unwrap().iter().filter(hello).map(|b| &b["cell"]["announcedBy"]).collect();
    assert_eq!(announced[0], &serde_json::Value::Null);
    assert_eq!(announced[1][0]["node"], "edge-2");

    publish_planned(&plan);
    let answer = site.farrier(&ask).exits(0).json();
    assert_eq!(answer["ready"], true);
    let status = site.farrier(&["status"]).exits(0).stdout;
    assert!(status.contains("announced by node edge-2"), "{status}");
    let pages = tempfile::tempdir().unwrap();
    let said = site.farrier(&["status", "--html", pages.path().to_str().unwrap()]).exits(0);
    assert_eq!(said.stdout, status);
    let read = |name: &str| std::fs::read_to_string(pages.path().join(name)).unwrap();
    let index = read("index.html");
    assert!(index.contains("<th scope=\"row\">6.1.0-902-amd64<i>1 announced</i>"), "{index}");
    assert!(read("nodes.html").contains("edge-2") && read("state-published.html").contains("hello"));
    let cells = std::fs::read_dir(pages.path().join("c")).unwrap();
    let cells = cells.filter(|cell| cell.as_ref().unwrap().path().extension() == Some("html".as_ref()));
    assert_eq!(cells.count(), index.matches("href=c/").count());
    let hostile = ["preflight", "--kernel", "../../etc", "--node", "edge-2"];
    site.farrier(&hostile).exits(2);
    site.farrier(&["preflight", "--kernel", "6.1.0-902-amd64", "--node", "nobody"]).exits(2);
}
