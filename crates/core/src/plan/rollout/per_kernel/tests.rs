mod fence;
mod hand_over;
mod in_order;
mod shared;
mod simulation;

use std::collections::BTreeMap;

use proptest::prelude::*;

use self::simulation::{Cluster, OLD};
use super::super::{
    super::fixtures::{K47, K48},
    RolloutDecision, handover_label, per_kernel_originals, rollback_per_kernel,
};
use crate::plan::{
    BootReadiness, Change, ExceededLimit, Failure, HoldReason, KERNEL_LABEL, NEXT_KERNEL_ANNOTATION,
    PlannedRollout, PullFailure, missing_images, next_deadline,
};

fn now(cluster: &mut Cluster) -> String {
    match cluster.plan().decision {
        RolloutDecision::Steps { now } => now.join("\n"),
        RolloutDecision::Settled { how } => how,
        RolloutDecision::Hold(reason) => format!("hold: {reason}"),
        RolloutDecision::Pending { on } => format!("pending: {on}"),
        other => panic!("{other:?}"),
    }
}

fn step(cluster: &mut Cluster) {
    for change in cluster.plan().changes {
        cluster.apply(&change);
    }
    cluster.settle();
    cluster.pass_time(1);
}

fn settled(cluster: &mut Cluster) {
    let planned = cluster.converge();
    assert!(matches!(planned.decision, RolloutDecision::Settled { .. }), "{:?}", planned.decision);
}

#[test]
fn a_rollout_step_by_step() {
    let mut cluster = Cluster::new(&[K47, K47, K47, K48], &[K47]);
    cluster.publish();
    let mut said = Vec::new();
    for _ in 0..9 {
        said.push(now(&mut cluster));
        step(&mut cluster);
    }
    let digest = regex::Regex::new("@sha256:[0-9a-f]{64}").unwrap();
    insta::assert_snapshot!(digest.replace_all(&said.join("\n--\n"), "@DIGEST"));
    for node in cluster.world.snapshot.nodes.clone() {
        let images = cluster.selected(&node);
        assert!(images.len() == 1 && images[0] != OLD && cluster.has_modules(&images[0], &node.name));
    }
}

/// The node was handed over and has no ready pod. If it counted, it would use up the number of nodes that may be
/// unavailable at once.
#[test]
fn a_node_that_is_not_believed_holds_nobody() {
    let mut cluster = Cluster::new(&[K47, K47, K47], &[K47]);
    cluster.publish();
    settled(&mut cluster);
    cluster.set_kernel("n2", K48);
    cluster.world.snapshot.nodes[2].rejected_claims.kernel = Some(ExceededLimit::Distinct(1));
    cluster.set_kernel("n3", K47);
    cluster.settle();
    settled(&mut cluster);
    let images = &cluster.all_selected()["n3"];
    assert!(images.len() == 1 && images[0] != OLD && cluster.has_modules(&images[0], "n3"), "{images:?}");
    assert_eq!(cluster.copies().len(), 1);
}

#[test]
fn the_steady_state_makes_no_write_and_flapping_none_either() {
    let mut cluster = Cluster::new(&[K47, K47, K48], &[]);
    cluster.publish();
    settled(&mut cluster);
    let writes = cluster.writes;
    for round in 0..100 {
        cluster.set_kernel("n0", if round % 2 == 0 { K48 } else { K47 });
        cluster.pass_time(1);
        cluster.settle();
        assert!(cluster.plan().changes.is_empty(), "{}", now(&mut cluster));
    }
    assert_eq!(cluster.writes, writes);
}

#[test]
fn a_webhook_that_writes_another_registry_into_the_copies_is_not_fought() {
    let mut cluster = Cluster::new(&[K47, K48], &[]);
    cluster.publish();
    let mirrored = cluster
        .modules
        .iter()
        .map(|(image, kernels)| (image.replace("registry.test", "mirror.test"), kernels.clone()));
    let mirrored: Vec<_> = mirrored.collect();
    cluster.modules.extend(mirrored);
    cluster.mirror = Some("mirror.test");
    settled(&mut cluster);
    assert!(cluster.running().values().all(|image| image.starts_with("mirror.test/")));
}

/// Two farriers with a rollout to the same DaemonSet would give its copies their own images by turns.
#[test]
fn copies_of_another_instance_are_left_to_it() {
    let mut cluster = Cluster::new(&[K47, K48], &[]);
    cluster.publish();
    settled(&mut cluster);
    let writes = cluster.writes;
    let own = std::mem::replace(&mut cluster.world.instance, "gpu".parse().unwrap());
    for image in cluster.world.resolved.images.values_mut() {
        image.as_mut().unwrap().version = "2".to_owned();
    }
    cluster.publish();
    cluster.converge();
    insta::assert_snapshot!(now(&mut cluster), @"hold: farrier, another farrier instance in this cluster, owns the copies, such as DaemonSet mft-6-1-0-47-amd64-a9f97555: remove the rollout from the definitions of one instance; to take over the copies, remove the annotation farrier.dev/rollout from each");
    assert_eq!(cluster.writes, writes);
    cluster.world.instance = own;
    settled(&mut cluster);
    assert!(cluster.writes > writes);
}

/// `kubectl delete --cascade=orphan` of the original removes the owners of its copies.
#[test]
fn a_copy_that_lost_its_owner_is_not_settled() {
    let mut cluster = Cluster::new(&[K47], &[K47]);
    cluster.publish();
    settled(&mut cluster);
    let copy = cluster.copies()[0].to_owned();
    cluster.object(&copy).unwrap()["metadata"].as_object_mut().unwrap().remove("ownerReferences");
    insta::assert_snapshot!(now(&mut cluster), @"hold: DaemonSet mft-6-1-0-47-amd64-a9f97555 is a copy that lost its owner, so farrier does not update it; delete DaemonSet mft-6-1-0-47-amd64-a9f97555, and farrier creates another copy");
    let images = cluster.world.resolved.images.values_mut();
    images.for_each(|image| image.as_mut().unwrap().version = "2".to_owned());
    assert!(now(&mut cluster).starts_with("pending: "), "the next image is still to be built");
}

/// Without its kernel label the node has neither the copy's pod nor, because of the fence, the original's.
#[test]
fn a_node_that_lost_its_labels_and_its_pod_is_not_settled() {
    let mut cluster = Cluster::new(&[K47, K47], &[]);
    cluster.publish();
    settled(&mut cluster);
    let (writes, labels) = (cluster.writes, cluster.world.snapshot.nodes[1].labels.clone());
    cluster.world.snapshot.nodes[1].labels.remove(KERNEL_LABEL);
    cluster.settle();
    insta::assert_snapshot!(now(&mut cluster), @"hold: kernel of node n1 unknown: label feature.node.kubernetes.io/kernel-version.full is missing; correct its labels (`farrier why node/n1`), or let ignoreNodes in site.yaml ignore it");
    cluster.converge();
    assert_eq!(cluster.writes, writes);
    cluster.world.snapshot.nodes[1].labels = labels;
    cluster.settle();
    settled(&mut cluster);
    // A node whose pod is still there misses nothing.
    cluster.world.snapshot.nodes[1].labels.remove(KERNEL_LABEL);
    settled(&mut cluster);
}

#[test]
fn an_image_that_does_not_get_ready_gives_its_node_back_and_is_not_tried_again() {
    let mut cluster = Cluster::new(&[K47, K47], &[K47]);
    cluster.publish();
    let bad: Vec<String> = cluster.modules.keys().filter(|image| *image != OLD).cloned().collect();
    cluster.broken.extend(bad);
    // The contents of the old image are unknown: it may have modules.
    cluster.converge();
    cluster.pass_time(601);
    let planned = cluster.converge();
    let RolloutDecision::Hold(reason @ HoldReason::CopyFailed { .. }) = planned.decision else { panic!() };
    let digest = regex::Regex::new("@sha256:[0-9a-f]{64}").unwrap();
    insta::assert_snapshot!(digest.replace_all(&reason.to_string(), "@DIGEST"), @"registry.test/drivers/mft@DIGEST did not work for 6.1.0-47-amd64 (debian 12, amd64): the pod on node n0 was not ready within 10m: driver: Error: exit code 1; it is not retried until there is another image");
    assert!(cluster.all_selected().values().all(|images| images == &[OLD.to_owned()]));
    // A new image clears the failure.
    cluster
        .world
        .resolved
        .images
        .values_mut()
        .for_each(|image| image.as_mut().unwrap().version = "2".to_owned());
    cluster.publish();
    settled(&mut cluster);
}

#[test]
fn no_node_is_ready_for_a_kernel_whose_image_failed_on_another_node() {
    let mut cluster = Cluster::new(&[K47, K47, K47], &[]);
    for node in &mut cluster.world.snapshot.nodes[1..] {
        node.annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), K48.to_owned());
    }
    cluster.publish();
    settled(&mut cluster);
    assert!(cluster.world.plan().nodes.iter().all(|node| node.ready));
    let for_k48 = cluster.modules.iter().filter(|(_, kernels)| kernels.contains(K48));
    cluster.broken.extend(for_k48.map(|(image, _)| image.clone()));
    cluster.set_kernel("n0", K48);
    cluster.settle();
    cluster.converge();
    cluster.pass_time(601);
    cluster.converge();
    let nodes = cluster.world.plan().nodes;
    let waiting = nodes.iter().filter(|node| node.may_boot == BootReadiness::Wait);
    assert_eq!(waiting.count(), 2, "{nodes:?}");
    let why = missing_images(nodes[0].next.as_ref().unwrap());
    assert!(why.contains("did not work for 6.1.0-48-amd64"), "{why}");
}

#[test]
fn a_new_image_that_fails_is_replaced_by_the_one_before() {
    let mut cluster = Cluster::new(&[K47, K47], &[]);
    cluster.publish();
    settled(&mut cluster);
    let good = cluster.all_selected();
    cluster
        .world
        .resolved
        .images
        .values_mut()
        .for_each(|image| image.as_mut().unwrap().version = "2".to_owned());
    let known: Vec<String> = cluster.modules.keys().cloned().collect();
    cluster.publish();
    let new: Vec<String> = cluster.modules.keys().filter(|image| !known.contains(image)).cloned().collect();
    cluster.broken.extend(new);
    cluster.converge();
    assert_ne!(cluster.all_selected(), good);
    cluster.pass_time(601);
    // The registry may be unavailable by now, or may have lost the previous image.
    let changes = cluster.plan().changes;
    let [restored @ Change::Copy(_)] = &changes[..] else { panic!("{changes:?}") };
    assert!(
        restored.required_images().is_empty() && restored.sets_image(&cluster.world.snapshot),
        "{restored:?}"
    );
    cluster.apply(restored);
    cluster.settle();
    cluster.plan();
    assert!(!restored.sets_image(&cluster.world.snapshot), "the copy already has that image");
    assert!(matches!(cluster.converge().decision, RolloutDecision::Hold(HoldReason::CopyFailed { .. })));
    assert_eq!(cluster.all_selected(), good);
}

#[test]
fn an_outage_of_the_registry_fails_no_copy() {
    let has_failed = |planned: &PlannedRollout| {
        matches!(planned.decision, RolloutDecision::Hold(HoldReason::CopyFailed { .. }))
    };
    let mut cluster = Cluster::new(&[K47], &[K47]);
    cluster.publish();
    cluster.broken.extend(cluster.modules.keys().filter(|image| *image != OLD).cloned());
    cluster.pull_failure = Some(PullFailure::Unanswered);
    for _ in 0..20 {
        assert!(!has_failed(&cluster.converge()));
        cluster.pass_time(200);
    }
    cluster.pull_failure = None;
    cluster.settle();
    assert!(!has_failed(&cluster.converge()), "the pod has time to start");
    cluster.pass_time(601);
    assert!(has_failed(&cluster.converge()));
}

#[test]
fn a_copy_goes_after_its_grace_time_and_not_while_a_node_may_run_its_kernel() {
    let mut cluster = Cluster::new(&[K47, K48], &[]);
    cluster.publish();
    settled(&mut cluster);
    cluster.set_kernel("n1", K47);
    cluster.settle();
    settled(&mut cluster);
    let writes = cluster.writes;
    cluster.pass_time(3600);
    assert!(cluster.plan().changes.is_empty());
    // Feature discovery restarts: the labels are gone, but nodeInfo still names the kernel.
    let label = cluster.world.snapshot.nodes[1].labels.remove(KERNEL_LABEL).unwrap();
    cluster.world.snapshot.nodes[1].kernel_version = K48.to_owned();
    cluster.converge();
    cluster.pass_time(90_000);
    cluster.converge();
    assert_eq!(cluster.copies().len(), 2);
    cluster.world.snapshot.nodes[1].kernel_version = K47.to_owned();
    cluster.world.snapshot.nodes[1].labels.insert(KERNEL_LABEL.to_owned(), label);
    cluster.settle();
    settled(&mut cluster);
    cluster.pass_time(90_000);
    settled(&mut cluster);
    assert_eq!((cluster.copies().len(), cluster.writes - writes), (1, 3), "kept, unused again, deleted");
}

#[test]
fn the_times_of_copies_are_looked_at_when_they_have_passed() {
    let next_look = |cluster: &mut Cluster| {
        cluster.plan();
        next_deadline(&cluster.world.definitions, &cluster.world.snapshot, cluster.world.now)
    };
    let mut cluster = Cluster::new(&[K47], &[K47]);
    cluster.publish();
    cluster.broken.extend(cluster.modules.keys().filter(|image| *image != OLD).cloned());
    cluster.converge();
    // First the deadline of the image, then the deadline of the pod, which was created later.
    for _ in 0..2 {
        let wait = next_look(&mut cluster).expect("a deadline is ahead");
        cluster.pass_time(wait.as_secs().try_into().unwrap());
    }
    let planned = cluster.converge();
    assert!(matches!(planned.decision, RolloutDecision::Hold(HoldReason::CopyFailed { .. })));

    let mut cluster = Cluster::new(&[K47, K48], &[]);
    cluster.publish();
    settled(&mut cluster);
    assert_eq!(next_look(&mut cluster), None);
    cluster.set_kernel("n1", K47);
    cluster.settle();
    settled(&mut cluster);
    let wait = next_look(&mut cluster).expect("the grace time of a copy is ahead");
    cluster.pass_time(wait.as_secs().try_into().unwrap());
    settled(&mut cluster);
    assert_eq!(cluster.copies().len(), 1);
}

#[test]
fn labels_that_vanish_tear_nothing_down() {
    let mut cluster = Cluster::new(&[K47, K48, K48], &[]);
    cluster.publish();
    settled(&mut cluster);
    let writes = cluster.writes;
    for node in &mut cluster.world.snapshot.nodes {
        node.labels.retain(|key, _| key.starts_with("farrier.dev/"));
    }
    cluster.pass_time(864_000);
    assert!(cluster.plan().changes.is_empty());
    assert_eq!((cluster.copies().len(), cluster.writes), (2, writes));
}

#[test]
fn the_owners_changes_reach_the_copies() {
    let mut cluster = Cluster::new(&[K47, K48], &[]);
    cluster.publish();
    settled(&mut cluster);
    cluster.object("mft").unwrap()["spec"]["template"]["spec"]["hostPID"] = true.into();
    settled(&mut cluster);
    for copy in cluster.copies().into_iter().map(str::to_owned).collect::<Vec<_>>() {
        assert_eq!(cluster.object(&copy).unwrap()["spec"]["template"]["spec"]["hostPID"], true);
    }
}

#[test]
fn no_image_gives_a_node_with_a_new_kernel_back_unless_the_old_image_is_known_to_lack_it() {
    for (old, back) in [(vec![K48], true), (vec![], false)] {
        let mut cluster = Cluster::new(&[K47, K47], &old);
        cluster.publish();
        settled(&mut cluster);
        cluster.set_kernel("n1", K48);
        cluster.settle();
        cluster.converge();
        let n1 = cluster.all_selected().remove("n1").unwrap();
        assert_eq!(n1, if back { vec![OLD.to_owned()] } else { vec![] });
        cluster.publish();
        settled(&mut cluster);
    }
}

#[test]
fn a_deleted_original_gets_no_copies() {
    let mut cluster = Cluster::new(&[K47, K48], &[]);
    cluster.publish();
    step(&mut cluster);
    cluster.object("mft").unwrap()["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
    insta::assert_snapshot!(now(&mut cluster), @"hold: it is being deleted");
    assert!(cluster.plan().changes.is_empty());
}

#[test]
fn two_releases_that_one_label_stands_for_are_not_handed_over() {
    let mut cluster = Cluster::new(&["6.1.0+acme", "6.1.0~acme"], &["6.1.0+acme"]);
    cluster.world.image("mft").spec.tags = vec!["{{version}}-{{kernel_release}}".to_owned()];
    cluster.publish();
    let planned = cluster.converge();
    assert!(matches!(planned.decision, RolloutDecision::Hold(_)), "{:?}", planned.decision);
    assert!(cluster.copies().is_empty());
}

#[test]
fn a_rollback_ends_with_the_original_as_it_was() {
    let mut cluster = Cluster::new(&[K47, K48, K48], &[K47]);
    let before = cluster.object("mft").unwrap()["spec"].clone();
    cluster.publish();
    settled(&mut cluster);
    let original = ("kube-system".to_owned(), "mft".to_owned());
    assert_eq!(per_kernel_originals(&cluster.world.snapshot), [original].into());
    for round in 0.. {
        assert!(round < 10);
        let world = &cluster.world;
        let changes = rollback_per_kernel(&world.snapshot, world.now, "kube-system", "mft").unwrap();
        if changes.is_empty() {
            break;
        }
        for change in changes {
            cluster.apply(&change);
            assert!(cluster.all_selected().values().all(|images| images.len() == 1));
        }
        cluster.settle();
        assert!(!matches!(cluster.plan().decision, RolloutDecision::Settled { .. }));
    }
    assert_eq!(cluster.object("mft").unwrap()["spec"], before);
    assert!(cluster.copies().is_empty());
    insta::assert_snapshot!(now(&mut cluster), @"hold: it was rolled back; remove its annotation farrier.dev/per-kernel to roll it out again");
}

#[test]
fn marks_of_a_daemon_set_that_is_gone_do_not_take_nodes_from_the_next() {
    let mut cluster = Cluster::new(&[K47, K47], &[K47]);
    cluster.publish();
    let label = handover_label("kube-system", "mft");
    cluster.world.snapshot.nodes[1].labels.insert(label, "handed-over".to_owned());
    let mut last = cluster.all_selected();
    for _ in 0..20 {
        for change in cluster.plan().changes {
            cluster.apply(&change);
            let selected = cluster.all_selected();
            check(&cluster, &last, &selected).unwrap();
            last = selected;
        }
        cluster.settle();
    }
    settled(&mut cluster);
}

/// Another client may delete the copies again and again, or a webhook may remove their annotations.
#[test]
fn labels_of_nodes_do_not_wait_for_copies_that_cannot_be_written() {
    let mut cluster = Cluster::new(&[K47, K47], &[K47]);
    cluster.publish();
    let label = handover_label("kube-system", "mft");
    cluster.world.snapshot.nodes[1].labels.insert(label, "handed-over".to_owned());
    let mut planned = cluster.plan();
    let snapshot = &cluster.world.snapshot;
    assert!(planned.is_rewrite(snapshot), "{:?}", planned.changes);
    assert!(planned.has_applies());
    let mut not_kept = planned.clone();
    not_kept.hold_applies(HoldReason::NotKept { field: String::new() });
    planned.hold_rewrites(snapshot);
    for PlannedRollout { changes, .. } in [planned, not_kept] {
        assert!(matches!(&changes[..], [Change::Node(_)]), "{changes:?}");
    }
}

/// Checks the invariants after a single change.
fn check(
    cluster: &Cluster,
    before: &BTreeMap<String, Vec<String>>,
    after: &BTreeMap<String, Vec<String>>,
) -> Result<(), TestCaseError> {
    for (node, images) in after {
        prop_assert!(images.len() <= 1, "two DaemonSets select {}: {:?}", node, images);
        let had = before[node].iter().any(|image| cluster.has_modules(image, node));
        let has = images.iter().any(|image| cluster.has_modules(image, node));
        prop_assert!(!had || has, "{} loses its modules: {:?} -> {:?}", node, before[node], images);
    }
    Ok(())
}

/// Event in the cluster between two plans.
#[derive(Clone, Debug)]
enum Event {
    Kernel(usize, usize),
    Reboot(usize, usize),
    Discovered(usize),
    Publish,
    Break(usize),
    Time(i64),
    Cordon(usize),
    Settle,
}

const KERNELS: [&str; 4] = [K47, K48, "6.1.0-49-amd64", "6.1.192-acme+"];

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0..5_usize, 0..4_usize).prop_map(|(node, kernel)| Event::Kernel(node, kernel)),
        (0..5_usize, 0..4_usize).prop_map(|(node, kernel)| Event::Reboot(node, kernel)),
        (0..5_usize).prop_map(Event::Discovered),
        Just(Event::Publish),
        (0..6_usize).prop_map(Event::Break),
        (0..1000_i64).prop_map(Event::Time),
        Just(Event::Time(100_000)),
        (0..5_usize).prop_map(Event::Cordon),
        Just(Event::Settle),
    ]
}

fn happen(cluster: &mut Cluster, event: &Event) {
    let count = cluster.world.snapshot.nodes.len();
    match *event {
        Event::Kernel(node, kernel) => {
            cluster.set_kernel(&format!("n{}", node % (count + 1)), KERNELS[kernel]);
        }
        Event::Reboot(node, kernel) => {
            cluster.world.snapshot.nodes[node % count].kernel_version = KERNELS[kernel].to_owned();
        }
        Event::Discovered(node) => {
            let node = &cluster.world.snapshot.nodes[node % count];
            let (name, kernel) = (node.name.clone(), node.kernel_version.clone());
            cluster.set_kernel(&name, &kernel);
        }
        Event::Publish => cluster.publish(),
        Event::Break(image) => {
            let images: Vec<String> = cluster.modules.keys().filter(|image| *image != OLD).cloned().collect();
            if let Some(image) = images.get(image) {
                cluster.broken.insert(image.clone());
            }
        }
        Event::Time(seconds) => cluster.pass_time(seconds),
        Event::Cordon(node) => {
            let node = &mut cluster.world.snapshot.nodes[node % count];
            node.unschedulable = !node.unschedulable;
        }
        Event::Settle => cluster.settle(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// The loop is killed after any change and restarts from the state of the cluster.
    #[test]
    fn whatever_happens_no_node_loses_what_it_has(
        fleet in prop::collection::vec(0..4_usize, 1..5),
        old in prop::collection::btree_set(0..4_usize, 0..4),
        rounds in prop::collection::vec((event(), prop::collection::vec(any::<bool>(), 6)), 0..40),
    ) {
        let releases: Vec<&str> = fleet.iter().map(|kernel| KERNELS[*kernel]).collect();
        let old: Vec<&str> = old.iter().map(|kernel| KERNELS[*kernel]).collect();
        let mut cluster = Cluster::new(&releases, &old);
        for (event, survives) in &rounds {
            happen(&mut cluster, event);
            let mut before = cluster.all_selected();
            for (change, survives) in cluster.plan().changes.iter().zip(survives.iter().chain([&false])) {
                cluster.apply(change);
                let after = cluster.all_selected();
                check(&cluster, &before, &after)?;
                before = after;
                if !survives {
                    break;
                }
            }
        }
        // Everything calms down: labels agree, no node is under maintenance, images work.
        cluster.broken.clear();
        for node in cluster.world.snapshot.nodes.clone() {
            cluster.set_kernel(&node.name, &node.kernel_version);
        }
        cluster.world.resolved.images.values_mut().for_each(|image| image.as_mut().unwrap().version = "9".to_owned());
        cluster.publish();
        cluster.settle();
        settled(&mut cluster);
        for node in cluster.world.snapshot.nodes.clone() {
            let images = cluster.selected(&node);
            prop_assert!(images.len() == 1 && cluster.has_modules(&images[0], &node.name), "{:?}", images);
        }
        prop_assert!(cluster.plan().changes.is_empty());
    }
}
