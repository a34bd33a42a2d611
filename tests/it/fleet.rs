//! The real program over a whole fleet: changes of many nodes at once, and repeated changes of one node.
use crate::support::{
    kernels,
    kube_api::{
        Fate, Requests,
        objects::{KERNEL_LABEL, daemon_set, node},
    },
    live::{DRIVER, Live, NAMESPACE, OLD_IMAGE},
};
use serde_json::json;

const A: &str = "6.1.0-901-amd64";
const B: &str = "6.1.0-902-amd64";

fn nodes(count: usize, kernel: &str) -> Vec<serde_json::Value> {
    (0..count).map(|number| node(&format!("n{number}"), kernel)).collect()
}

/// Returns the images of the pods on a node.
fn on_node(live: &Live, node: &str) -> Vec<String> {
    let pods = live.api.list("pods");
    let here = pods.iter().filter(|pod| pod["spec"]["nodeName"] == node);
    here.map(|pod| pod["spec"]["containers"][0]["image"].as_str().unwrap().to_owned()).collect()
}

#[test]
fn a_node_that_flaps_between_two_kernels_costs_few_writes_and_its_image_follows() {
    let mut live = Live::new(nodes(1, A), "image");
    let images = live.publish_for("n0", &[B]);
    live.start(&[]);
    live.until("the first image", |live| live.image(DRIVER) == images[A]);
    for _ in 0..50 {
        live.api.set_kernel("n0", B);
        live.api.set_kernel("n0", A);
    }
    live.api.set_kernel("n0", B);
    live.until("the last kernel's image", |live| live.image(DRIVER) == images[B]);
    let writes = live.writes_to("daemonsets.apps");
    assert!(writes <= 10, "{writes} writes for 101 changes\n{}", live.log());
}

#[test]
fn a_third_of_the_fleet_reboots_at_once_and_no_node_is_without_its_modules() {
    let mut live = Live::new(nodes(10, A), "union");
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    live.publish_for("n0", &[B]);
    live.start(&[]);
    live.until("all nodes run an image with kernel A", |live| {
        let image = live.image(DRIVER);
        image != OLD_IMAGE && (0..10).all(|number| on_node(live, &format!("n{number}")) == [image.clone()])
    });
    let first = live.image(DRIVER);
    // From here on only farrier restarts pods.
    let on_delete = json!({"spec": {"updateStrategy": {"type": "OnDelete", "rollingUpdate": null}}});
    live.api.patch_as("kubectl", "daemonsets.apps", NAMESPACE, DRIVER, &on_delete);
    for number in 0..3 {
        live.api.set_kernel(&format!("n{number}"), B);
    }
    live.until("the three nodes run an image with both kernels", |live| {
        let both = live.image(DRIVER);
        both != first && (0..3).all(|number| on_node(live, &format!("n{number}")) == [both.clone()])
    });
    for number in 3..10 {
        assert_eq!(
            on_node(&live, &format!("n{number}")),
            std::slice::from_ref(&first),
            "n{number} was disturbed\n{}",
            live.log()
        );
    }
}

#[test]
fn a_kernel_on_one_node_gets_a_daemon_set_of_its_own_and_the_others_keep_theirs() {
    let mut fleet = nodes(3, A);
    fleet.push(node("odd", B));
    let mut live = Live::new(fleet, "per-kernel");
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    let images = live.publish();
    live.start(&[]);
    live.until("each node runs its kernel's image", |live| {
        on_node(live, "odd") == [images[B].clone()]
            && (0..3).all(|number| on_node(live, &format!("n{number}")) == [images[A].clone()])
    });
    let copies = live.api.list("daemonsets.apps").len() - 1;
    assert_eq!(copies, 2);
    // NFD restarts: the labels are missing for a while, and farrier tears nothing down.
    live.api.clear_log();
    for name in ["n0", "odd"] {
        let gone = json!({"metadata": {"labels": {KERNEL_LABEL: null}}});
        live.api.patch_as("nfd-master", "nodes", "", name, &gone);
    }
    let before = live.reconciles();
    live.until("a reconcile", |live| live.reconciles() > before);
    assert_eq!(live.api.count(&Requests::verb("delete").resource("daemonsets.apps")), 0);
    assert_eq!(live.api.list("daemonsets.apps").len(), 3);
}

/// A single run says what it created, although it rewrote no image field.
#[test]
fn a_single_run_reports_each_daemon_set_that_it_made() {
    let live = Live::new([node("n0", A), node("odd", B)], "per-kernel");
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    live.publish();
    let output = live.command(&["run", "--once"]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let created: Vec<&str> = text.lines().filter(|line| line.starts_with("created   DaemonSet ")).collect();
    assert_eq!(created.len(), 2, "{text}");
    assert!(created.iter().all(|line| line.contains(NAMESPACE)), "{text}");
    assert!(!text.contains("nothing to do"), "{text}");
}

/// farrier stops after a few attempts, because each attempt restarts the driver's pod on the node twice.
#[test]
fn a_node_that_another_writer_takes_back_is_left_after_a_few_times() {
    let mut live = Live::new(nodes(1, A), "per-kernel");
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    live.publish();
    live.start(&[]);
    let mut taken = 0;
    live.until("farrier stops", |live| {
        let node = live.api.get("nodes", "", "n0").unwrap();
        let labels = node["metadata"]["labels"].as_object().unwrap();
        if let Some(label) = labels.keys().find(|label| label.starts_with("farrier.dev/driver.")) {
            let gone = json!({"metadata": {"labels": {label: null}}});
            live.api.patch_as("gitops", "nodes", "", "n0", &gone);
            taken += 1;
        }
        live.log().contains("another writer reverts the labels that assign nodes")
    });
    assert_eq!(taken, 3, "{}", live.log());
    live.until("the old driver", |live| on_node(live, "n0") == [OLD_IMAGE]);
    assert_eq!(live.log().matches("another writer reverts the labels that assign nodes").count(), 1);
}

#[test]
fn two_farriers_started_together_write_like_one() {
    let mut live = Live::new(nodes(3, A), "image");
    let images = live.publish_for("n0", &[B]);
    live.start(&["--leader-elect"]);
    live.start(&["--leader-elect"]);
    live.until("the image", |live| live.image(DRIVER) == images[A]);
    for number in 0..3 {
        live.api.set_kernel(&format!("n{number}"), B);
    }
    live.until("the next image", |live| live.image(DRIVER) == images[B]);
    let writers: std::collections::BTreeSet<String> = live
        .api
        .writes()
        .iter()
        .filter(|record| record.resource == "daemonsets.apps")
        .map(|record| record.path.clone())
        .collect();
    assert_eq!(writers.len(), 1);
    assert_eq!(live.writes_to("daemonsets.apps"), 2, "{}", live.log());
}

#[test]
fn a_farrier_that_was_killed_goes_on_where_it_was() {
    let mut live = Live::new(nodes(4, A), "per-kernel");
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    let images = live.publish();
    for round in 1.. {
        assert!(round < 200, "no progress\n{}", live.log());
        let before = live.api.writes().len();
        live.start(&[]);
        // Kill farrier after its next write, whichever it is.
        live.until("a write or the final state", |live| {
            live.api.writes().iter().filter(|write| !write.path.contains("driverbuilds")).count() > before
                || (0..4).all(|number| on_node(live, &format!("n{number}")) == [images[A].clone()])
        });
        live.kill();
        for number in 0..4 {
            let images = on_node(&live, &format!("n{number}"));
            assert!(images.len() <= 1, "two driver pods on n{number}: {images:?}");
        }
        if (0..4).all(|number| on_node(&live, &format!("n{number}")) == [images[A].clone()]) {
            break;
        }
    }
}

#[test]
fn the_label_of_a_hosts_next_kernel_is_an_announcement() {
    let mut fleet = nodes(1, A);
    // Written by NFD from farrier-host's file.
    fleet[0]["metadata"]["labels"]["feature.node.kubernetes.io/farrier-next-kernel"] = B.into();
    let mut live = Live::new(fleet, "image");
    live.publish_for("n0", &[B]);
    live.start(&[]);
    live.until("the node is marked", |live| {
        live.api.list("nodes")[0]["metadata"]["labels"]["farrier.dev/ready-for"] == B
    });
}

#[test]
fn hostile_labels_and_annotations_reach_nothing() {
    let mut fleet = nodes(1, A);
    let mut hostile = node("evil", "6.1.0-1-amd64; reboot");
    hostile["metadata"]["labels"][KERNEL_LABEL] = "../../etc".into();
    hostile["metadata"]["annotations"] = json!({
        "farrier.dev/next-kernel": "$(reboot)\n",
        "farrier.dev/ready-for": "everything",
    });
    fleet.push(hostile);
    let mut live = Live::new(fleet, "image");
    live.publish();
    live.start(&[]);
    live.until("a reconcile", |live| live.reconciles() > 0);
    // The DaemonSet selects a node with an unknown kernel, so farrier does not change the image.
    assert_eq!(live.image(DRIVER), OLD_IMAGE);
    let plan = live.plan();
    assert_eq!(plan["skippedNodes"][0]["node"], "evil", "{plan}");
    assert_eq!(plan["rollouts"][0]["reason"], "unknown-node", "{plan}");
}

/// The real engine, headers and compiler rebuild an image that the registry lost.
#[test]
fn a_tag_that_the_registry_lost_is_built_again_and_no_image_field_moves() {
    let kernel = kernels::newest().newer;
    let mut edge = node("edge", &kernel);
    edge["metadata"]["labels"]["test.farrier.dev/hello"] = "true".into();
    let mut live = Live::new([edge], "image");
    std::fs::remove_file(live.site.definitions().join("images/driver.yaml")).unwrap();
    live.api.create(daemon_set(NAMESPACE, "hello", OLD_IMAGE));
    live.start(&["--interval", "1"]);
    live.until("the first image", |live| live.image("hello") != OLD_IMAGE);
    let (image, tags) = (live.image("hello"), live.site.tags("hello"));
    assert_eq!(tags.len(), 1);

    live.site.registry.lose_tag("drivers/hello", &tags[0]);
    assert_eq!(live.site.tags("hello"), [""; 0]);
    live.until("the tag again", |live| live.site.tags("hello") == tags);
    assert_eq!(live.image("hello"), image);
}
