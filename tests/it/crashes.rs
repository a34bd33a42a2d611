//! Rollouts of crashing drivers, with the real program and an API server. Its kubelets report containers without a readiness
//! probe as ready for a moment after each start.
use std::time::{Duration, Instant};

use crate::support::{
    kube_api::{
        Fate, Kind,
        objects::{daemon_set, node},
        pod_fate::Crash,
    },
    live::{DRIVER, Live, NAMESPACE, OLD_IMAGE},
};
use serde_json::Value;

const KERNEL: &str = "6.1.0-901-amd64";
const WORDS: &str = "no such device";

/// Starts farrier and rolls its image out to one node. The old image works, and the new image's containers end with `fate`.
fn rollout(strategy: &str, watch: &str, fate: Fate) -> Live {
    let mut live = Live::new([node("n0", KERNEL)], strategy);
    live.site.edit("images/driver.yaml", "container: driver}", &format!("container: driver, {watch}}}"));
    // farrier writes Events only when the custom resource exists.
    live.api.install(
        Kind::defined_by(&serde_json::to_value(farrier_controller::status::crd()).unwrap()).unwrap(),
    );
    live.publish();
    live.api.run_daemon_sets(
        true,
        move |start| {
            if start.images[0] == OLD_IMAGE { Fate::Ready } else { fate.clone() }
        },
    );
    // Deadlines must wake the controller without waiting for the next resync.
    live.start(&["--interval", "3600"]);
    live.until("the new image to run", |live| on_node(live) != [OLD_IMAGE]);
    live
}

/// Returns the images of the pods on the node.
fn on_node(live: &Live) -> Vec<String> {
    let pods = live.api.list("pods");
    let image = |pod: &Value| pod["spec"]["containers"][0]["image"].as_str().unwrap().to_owned();
    pods.iter().filter(|pod| pod["spec"]["nodeName"] == "n0").map(image).collect()
}

/// Returns the JSON value of a DaemonSet's annotation.
fn noted(live: &Live, name: &str, annotation: &str) -> Value {
    let object = live.api.get("daemonsets.apps", NAMESPACE, name).unwrap();
    let text = object["metadata"]["annotations"][annotation].as_str().unwrap_or("{}").to_owned();
    serde_json::from_str(&text).unwrap()
}

fn record(live: &Live) -> Value {
    noted(live, DRIVER, "farrier.dev/record")["driver"].take()
}

/// Asserts that the record, the plan and the Event contain the pod's termination message.
#[track_caller]
fn assert_told(live: &Live, why: &Value) {
    let why = why.as_str().unwrap_or_else(|| panic!("no reason is recorded\n{}", live.log()));
    for words in ["on node n0", "exit code 1", WORDS, "restarted"] {
        assert!(why.contains(words), "{words:?} is not in the record: {why}");
    }
    let plan = live.plan().to_string();
    assert!(plan.contains(WORDS), "{plan}");
    live.until("the event", |live| {
        let events = live.api.list("events.events.k8s.io");
        let told = |event: &&Value| {
            event["reason"] == "RolloutRestored"
                && event["note"].as_str().is_some_and(|note| note.contains(WORDS))
        };
        events.iter().any(|event| told(&event) && event["regarding"]["name"] == DRIVER)
    });
}

/// Asserts that no write marked an image as good.
#[track_caller]
fn assert_never_good(live: &Live) {
    for write in live.api.writes() {
        let annotations = write.body["metadata"]["annotations"].to_string();
        for good in [r#"\"state\":\"good\""#, r#"\"good\":true"#] {
            assert!(!annotations.contains(good), "{annotations}");
        }
    }
}

#[test]
fn a_driver_that_crashes_at_its_start_is_restored_after_its_deadline() {
    let live = rollout("image", "deadline: 3s, stableFor: 2s", Fate::Crashes(Crash::at_once(WORDS)));
    live.until("the old image", |live| live.image(DRIVER) == OLD_IMAGE);
    live.until("the node to run it", |live| on_node(live) == [OLD_IMAGE]);
    assert_eq!(record(&live)["state"], "failed", "{}", live.log());
    assert_told(&live, &record(&live)["why"]);
    assert_never_good(&live);
}

#[test]
fn a_driver_that_starts_to_crash_while_it_is_watched_is_restored() {
    let crash = Crash::after(Duration::from_secs(4), WORDS);
    let live = rollout("image", "deadline: 2s, stableFor: 10s", Fate::Crashes(crash));
    live.until("the old image", |live| live.image(DRIVER) == OLD_IMAGE);
    let why = record(&live)["why"].take();
    assert!(why.as_str().is_some_and(|why| why.contains(WORDS)), "{why}\n{}", live.log());
    assert_never_good(&live);
}

#[test]
fn a_driver_that_stays_ready_for_its_time_is_good_then_and_not_before() {
    let live = rollout("image", "deadline: 2s, stableFor: 3s", Fate::Ready);
    let set = Instant::now();
    live.until("the record", |live| record(live)["state"] == "good");
    // API timestamps have a resolution of one second.
    assert!(set.elapsed() >= Duration::from_secs(2), "{}", record(&live));
    assert_ne!(live.image(DRIVER), OLD_IMAGE);
}

#[test]
fn a_copy_whose_pod_crashes_gives_its_node_back_after_its_deadline() {
    let crash = Fate::Crashes(Crash::at_once(WORDS));
    let live = rollout("per-kernel", "deadline: 3s, stableFor: 2s", crash);
    live.until("the node to return to the original DaemonSet", |live| on_node(live) == [OLD_IMAGE]);
    let copies = live.api.list("daemonsets.apps");
    let copies: Vec<&str> = copies.iter().filter_map(|copy| copy["metadata"]["name"].as_str()).collect();
    let [copy] = copies.iter().filter(|name| **name != DRIVER).collect::<Vec<_>>()[..] else {
        panic!("{copies:?}\n{}", live.log())
    };
    assert_told(&live, &noted(&live, copy, "farrier.dev/rollout")["failed"]["why"]);
    assert_never_good(&live);
}

/// Crashes in one DaemonSet do not block the rollout of another.
#[test]
fn a_crash_holds_no_other_daemon_set() {
    let mut live = Live::new([node("n0", KERNEL)], "image");
    live.site.edit(
        "images/driver.yaml",
        "container: driver}",
        "container: driver, deadline: 3s, stableFor: 2s}",
    );
    let mut other = daemon_set(NAMESPACE, "other", OLD_IMAGE);
    other["spec"]["template"]["spec"]["nodeSelector"] = serde_json::json!({});
    live.api.create(other);
    let text = std::fs::read_to_string(live.site.definitions().join("images/driver.yaml")).unwrap();
    let entry = text.lines().find(|entry| entry.contains("strategy:")).unwrap().to_owned();
    live.site.edit(
        "images/driver.yaml",
        &entry,
        &format!("{entry}\n{}", entry.replace("daemonSet: driver", "daemonSet: other")),
    );
    live.publish();
    live.api.run_daemon_sets(true, |start| {
        let crashes = start.daemon_set == DRIVER && start.images[0] != OLD_IMAGE;
        if crashes { Fate::Crashes(Crash::at_once(WORDS)) } else { Fate::Ready }
    });
    live.start(&["--interval", "3600"]);
    live.until("one rollout to be reverted", |live| record(live)["state"] == "failed");
    live.until("the other rollout to be good", |live| {
        noted(live, "other", "farrier.dev/record")["driver"]["state"] == "good"
    });
}
