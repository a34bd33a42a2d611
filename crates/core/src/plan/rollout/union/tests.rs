mod taken_back;

use std::collections::{BTreeMap, BTreeSet};

use super::super::{
    super::{
        LiveDaemonSet, OS_VERSION_LABEL, ObjectVersion, OwnedFields, PodCount, PodFacts,
        fixtures::{K47, K48, World, node},
        images_in_use, next_deadline,
    },
    *,
};
use crate::{
    image::{Digest, Version},
    kernel::Architecture,
    kmod::Verdict,
    plan::{ExceededLimit, ImageContents, Published, UpdateStrategy, union::MAX_MEMBERS},
};

const OLD: &str = "registry.test/old:1";

/// Returns a union rollout over live nodes with these kernels, with all their images published.
fn world(releases: &[&str], update: UpdateStrategy) -> World {
    let mut world = World::new(releases);
    world.image("mft").spec.rollout = vec![
        serde_json::from_value(serde_json::json!({
            "strategy": "union", "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
            "dropAfter": "1d",
        }))
        .unwrap(),
    ];
    world.snapshot.daemon_sets[0].live = Some(LiveDaemonSet {
        version: ObjectVersion { uid: "u1".to_owned(), resource_version: "1".to_owned() },
        annotations: BTreeMap::new(),
        labels: BTreeMap::new(),
        match_labels: BTreeMap::new(),
        update,
        max_unavailable: PodCount::Number(1),
        desired: 0,
        deleting: false,
        owned: OwnedFields::default(),
        manifest: std::sync::Arc::default(),
    });
    world.publish(Verdict::Loads);
    world
}

/// Publishes the union images that the plan asks for; images for several architectures get an index.
fn publish_union(world: &mut World) {
    let unions = world.plan().unions;
    for union in &unions {
        publish_one(world, union);
    }
    let Some(PlannedUnion { reference, .. }) = unions.first() else { return };
    let contents = PlannedUnion::contents(unions.clone());
    let pinned = world.observed.published[reference].pinned(reference).to_string();
    world.observed.contents.insert(pinned, contents);
}

/// Publishes one union image, in addition to existing ones.
fn publish_one(world: &mut World, union: &PlannedUnion) {
    let mut published = Published {
        digest: Digest::of(union.input_hash.to_string().as_bytes()),
        input_hash: Some(union.input_hash),
        declared_hash: None,
        exposed: None,
        verdict: Some(Verdict::Loads),
        kernel_release: None,
        platforms: BTreeMap::new(),
    };
    let there = world.observed.published.get(&union.reference).map(|there| there.platforms.clone());
    let mut platforms = there.unwrap_or_default();
    platforms.insert(union.architecture, published.clone());
    if platforms.len() > 1 {
        (published.digest, published.input_hash) = (Digest::of(b"index"), None);
    }
    published.platforms = platforms;
    world.observed.published.insert(union.reference.clone(), published);
}

/// Applies the changes of the DaemonSet; returns the pods that were to be restarted.
fn apply(world: &mut World) -> Vec<String> {
    let mut restarted = Vec::new();
    for change in world.plan().rollouts.swap_remove(0).changes {
        match change {
            Change::DaemonSet(change) => {
                let found = &mut world.snapshot.daemon_sets[0];
                if let Some(image) = change.images.get("driver") {
                    found.containers[0].image.clone_from(image);
                }
                found.live.as_mut().unwrap().annotations = change.annotations;
            }
            Change::Restart(pod) => restarted.push(pod.name),
            other => panic!("{other:?}"),
        }
    }
    restarted
}

fn decision(world: &World) -> RolloutDecision {
    world.plan().rollouts.swap_remove(0).decision
}

fn held(world: &World) -> BTreeSet<String> {
    let contents = &world.observed.contents[&world.snapshot.daemon_sets[0].containers[0].image];
    let all = contents.platforms.values().chain([contents]);
    all.flat_map(|image| image.kernels.clone()).collect()
}

fn old_holds(world: &mut World, kernels: &[&str]) {
    let kernels = kernels.iter().map(|kernel| (*kernel).to_owned()).collect();
    world.observed.contents.insert(OLD.to_owned(), ImageContents { kernels, ..ImageContents::default() });
}

#[test]
fn one_image_for_all_kernels() {
    let mut world = world(&[K47, K48, K48], UpdateStrategy::RollingUpdate);
    let plan = world.plan();
    let digest = regex::Regex::new("sha256:[0-9a-f]{64}").unwrap();
    let table = crate::plan::table(&plan);
    insta::assert_snapshot!(digest.replace_all(&table, "DIGEST"));
    assert!(
        matches!(&plan.rollouts[0].decision, RolloutDecision::Pending { on } if *on == plan.unions[0].reference)
    );
    publish_union(&mut world);
    let RolloutDecision::Rewrite { to, .. } = decision(&world) else { panic!("not rewritten") };
    assert!(matches!(to.version, crate::image::Version::Digest(_)));
    apply(&mut world);
    assert!(matches!(decision(&world), RolloutDecision::AlreadySet { .. }) && world.plan().unions.is_empty());
    assert_eq!(held(&world).len(), 2);
}

#[test]
fn the_grace_time_of_a_kernel_that_left_is_looked_at_when_it_has_passed() {
    let mut world = world(&[K47, K48], UpdateStrategy::RollingUpdate);
    publish_union(&mut world);
    apply(&mut world);
    // The rewrite's own deadline has passed.
    world.now += jiff::SignedDuration::from_hours(1);
    let next = |world: &World| next_deadline(&world.definitions, &world.snapshot, world.now);
    assert_eq!(next(&world), None);
    world.snapshot.nodes[0] = node("n0", K48);
    apply(&mut world);
    let wait = next(&world).expect("the grace time is ahead");
    world.now += jiff::SignedDuration::try_from(wait).unwrap();
    assert_eq!(world.plan().unions.len(), 1, "one without the kernel, after {wait:?}");
}

#[test]
fn a_kernel_that_left_is_dropped_after_its_grace_time() {
    let mut world = world(&[K47, K48], UpdateStrategy::RollingUpdate);
    publish_union(&mut world);
    apply(&mut world);
    let both = world.snapshot.daemon_sets[0].containers[0].image.clone();
    world.snapshot.nodes[0] = node("n0", K48);
    assert_eq!(world.plan().rollouts[0].changes.len(), 1, "the start of the grace time is recorded");
    apply(&mut world);
    world.now += jiff::SignedDuration::from_hours(23);
    assert!(world.plan().rollouts[0].changes.is_empty() && world.plan().unions.is_empty());
    // The kernel comes back, and its grace time restarts when it leaves again.
    world.snapshot.nodes[0] = node("n0", K47);
    apply(&mut world);
    world.snapshot.nodes[0] = node("n0", K48);
    apply(&mut world);
    world.now += jiff::SignedDuration::from_hours(23);
    assert!(world.plan().is_idle());
    assert_eq!(world.snapshot.daemon_sets[0].containers[0].image, both);
    world.now += jiff::SignedDuration::from_hours(2);
    publish_union(&mut world);
    apply(&mut world);
    assert_eq!(held(&world), [K48.to_owned()].into());
    assert!(world.plan().is_idle(), "{:?}", world.plan().rollouts);
}

/// A single node that boots kernel after kernel could fill the image with its former kernels.
#[test]
fn kernels_that_left_never_make_the_image_too_large() {
    let mut world = world(&[K47, K47], UpdateStrategy::OnDelete);
    for turn in 0..MAX_MEMBERS + 20 {
        world.snapshot.nodes[1] = node("n1", &format!("6.1.0-{}-amd64", 100 + turn));
        world.now += jiff::SignedDuration::from_mins(1);
        world.publish(Verdict::Loads);
        publish_union(&mut world);
        apply(&mut world);
        let decision = decision(&world);
        assert!(!matches!(decision, RolloutDecision::Hold(_)), "{turn}: {decision:?}");
        // Images that are no longer used are not looked up either.
        let used = world.snapshot.daemon_sets[0].containers[0].image.clone();
        world.observed.contents.retain(|image, _| *image == used);
    }
    let held = held(&world);
    assert_eq!(held.len(), MAX_MEMBERS);
    assert!(held.contains(K47) && held.contains("6.1.0-219-amd64") && !held.contains("6.1.0-100-amd64"));
}

/// A node with a rejected kernel does not hold a rollout, and its kernel is not kept.
#[test]
fn a_node_that_is_not_believed_holds_no_union() {
    let mut world = world(&[K47, K48], UpdateStrategy::RollingUpdate);
    world.snapshot.nodes[1].rejected_claims.kernel = Some(ExceededLimit::Distinct(1));
    publish_union(&mut world);
    apply(&mut world);
    assert_eq!(held(&world), [K47.to_owned()].into());
}

/// A kernel whose claim becomes rejected is dropped like a kernel that no node runs.
#[test]
fn a_kernel_that_is_not_believed_any_more_is_dropped_after_its_grace_time() {
    let mut world = world(&[K47, K48], UpdateStrategy::RollingUpdate);
    publish_union(&mut world);
    apply(&mut world);
    assert_eq!(held(&world).len(), 2);
    world.snapshot.nodes[1].rejected_claims.kernel = Some(ExceededLimit::Distinct(1));
    apply(&mut world);
    world.now += jiff::SignedDuration::from_hours(25);
    publish_union(&mut world);
    apply(&mut world);
    assert_eq!(held(&world), [K47.to_owned()].into());
}

#[test]
fn an_announced_kernel_is_in_the_image_before_a_node_runs_it() {
    let mut world = world(&[K47], UpdateStrategy::OnDelete);
    world.announce(K48);
    assert!(matches!(decision(&world), RolloutDecision::Pending { .. }));
    world.publish(Verdict::Loads);
    publish_union(&mut world);
    apply(&mut world);
    assert_eq!(held(&world), [K47.to_owned(), K48.to_owned()].into());
}

/// Ubuntu 22.04 and 24.04 have kernels of one release, compiled by different compilers.
#[test]
fn modules_of_one_system_are_not_taken_for_those_of_another() {
    let mut world = world(&[K47, K47], UpdateStrategy::RollingUpdate);
    publish_union(&mut world);
    let mut mixed = world.clone();
    mixed.snapshot.nodes[1].labels.insert(OS_VERSION_LABEL.to_owned(), "13".to_owned());
    for _ in 0..2 {
        let RolloutDecision::Hold(HoldReason::NoUnion { detail }) = decision(&mixed) else {
            panic!("not held")
        };
        let [bookworm, trixie] = ["12", "13"].map(|version| format!("{K47} (debian {version}, amd64)"));
        assert_eq!(detail, format!("the modules for {bookworm} and for {trixie} have one directory"));
        mixed.publish(Verdict::Loads);
    }
    // An announcement takes nothing from nodes that run a kernel.
    world.announce(K47);
    let announced = world.definitions.announced.values_mut().next().unwrap();
    let mut list = serde_json::to_value(&*announced).unwrap();
    list["spec"]["kernels"][0]["osVersion"] = "13".into();
    *announced = serde_json::from_value(list).unwrap();
    world.publish(Verdict::Loads);
    assert!(matches!(decision(&world), RolloutDecision::Rewrite { .. }));
}

#[test]
fn a_kernel_without_an_image_holds_what_could_harm_its_nodes() {
    for (update, old, holds) in [
        (UpdateStrategy::RollingUpdate, Some(&[][..]), true),
        (UpdateStrategy::OnDelete, None, true),
        (UpdateStrategy::OnDelete, Some(&[K48][..]), true),
        (UpdateStrategy::OnDelete, Some(&[K47][..]), false),
    ] {
        let mut world = world(&[K47, K48], update);
        world.image("mft").spec.kernels = None;
        world.observed.published.values_mut().for_each(|published| {
            if published.kernel_release.as_deref() == Some(K48) {
                published.verdict = Some(Verdict::Refused);
            }
        });
        if let Some(old) = old {
            old_holds(&mut world, old);
        }
        publish_union(&mut world);
        let decision = decision(&world);
        assert_eq!(
            matches!(decision, RolloutDecision::Hold(HoldReason::NotPassed { .. })),
            holds,
            "{decision:?}"
        );
        assert_eq!(matches!(decision, RolloutDecision::Rewrite { .. }), !holds, "{decision:?}");
    }
}

#[test]
fn nodes_of_unknown_kernels_are_not_harmed() {
    let mut world = world(&[K47, K48], UpdateStrategy::RollingUpdate);
    world.snapshot.nodes[1].kernel_version = K47.to_owned();
    for node in &mut world.snapshot.nodes {
        node.os_image = "Debian GNU/Linux 12 (bookworm)".to_owned();
    }
    assert!(matches!(decision(&world), RolloutDecision::Hold(HoldReason::UnknownNode { .. })));
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().update = UpdateStrategy::OnDelete;
    assert!(matches!(decision(&world), RolloutDecision::Pending { .. }), "the image has what the node runs");
    let mut devuan = world.clone();
    devuan.snapshot.nodes[1].os_image = "Devuan GNU/Linux 5 (daedalus)".to_owned();
    assert!(matches!(decision(&devuan), RolloutDecision::Hold(HoldReason::UnknownNode { .. })));
    world.snapshot.nodes[1].kernel_version = "6.1.0-49-amd64".to_owned();
    assert!(matches!(decision(&world), RolloutDecision::Hold(HoldReason::UnknownNode { .. })));
}

/// The modules of a kernel stay in the image while the only node with the kernel has no labels.
#[test]
fn a_node_that_lost_its_labels_keeps_the_modules_that_it_has() {
    let pci = "feature.node.kubernetes.io/pci-15b3.present";
    let mut world = world(&[K47, K48], UpdateStrategy::RollingUpdate);
    world.snapshot.daemon_sets[0].placement.node_selector = [(pci.to_owned(), "true".to_owned())].into();
    for node in &mut world.snapshot.nodes {
        node.labels.insert(pci.to_owned(), "true".to_owned());
    }
    publish_union(&mut world);
    apply(&mut world);
    world.snapshot.nodes[1].labels.clear();
    assert!(matches!(decision(&world), RolloutDecision::AlreadySet { .. }), "{:?}", decision(&world));
    // A node of another system has the same release, but needs other modules.
    world.snapshot.nodes[1].kernel_version = K47.to_owned();
    world.snapshot.nodes[1].os_image = "Devuan GNU/Linux 5 (daedalus)".to_owned();
    for resolved in world.resolved.images.values_mut().flatten() {
        resolved.version = "5".to_owned();
    }
    world.publish(Verdict::Loads);
    assert!(matches!(decision(&world), RolloutDecision::Hold(HoldReason::Unlabeled { .. })));
}

/// Returns a world whose first node has one architecture, and all others the other.
fn two_architectures(releases: &[&str], update: UpdateStrategy) -> World {
    let mut world = world(releases, update);
    world.image("mft").spec.tags = vec!["{{version}}-{{kernel_label}}-{{arch}}".to_owned()];
    for number in 1..releases.len() {
        to_arm64(&mut world, number);
    }
    world.publish(Verdict::Loads);
    world
}

fn to_arm64(world: &mut World, number: usize) {
    let node = &mut world.snapshot.nodes[number];
    node.architecture = "arm64".to_owned();
    node.labels.insert("kubernetes.io/arch".to_owned(), "arm64".to_owned());
}

fn members(union: &PlannedUnion) -> Vec<&str> {
    union.members.iter().map(|member| member.kernel.as_str()).collect()
}

#[test]
fn nodes_of_two_architectures_get_an_index_with_the_kernels_of_each() {
    // Both architectures have one release in common, as with Ubuntu.
    let mut world = two_architectures(&[K47, K47, K48], UpdateStrategy::RollingUpdate);
    let unions = world.plan().unions;
    let [amd64, arm64] = unions.as_slice() else { panic!("{unions:?}") };
    assert_eq!((amd64.architecture, arm64.architecture), (Architecture::Amd64, Architecture::Arm64));
    assert_eq!((members(amd64), members(arm64)), (vec![K47], vec![K47, K48]));
    assert_eq!(amd64.reference, arm64.reference);
    assert_ne!(amd64.members[0].digest, arm64.members[0].digest);

    // No field is set to an index that lacks an architecture; the missing image is published first.
    publish_one(&mut world, &unions[0]);
    assert!(matches!(decision(&world), RolloutDecision::Pending { .. }));
    assert_eq!(world.plan().unions, unions[1..]);
    publish_union(&mut world);
    let RolloutDecision::Rewrite { to, .. } = decision(&world) else { panic!("not rewritten") };
    assert_eq!(to.version, Version::Digest(Digest::of(b"index")));
    world.observed.contents.insert(to.to_string(), PlannedUnion::contents(unions.clone()));
    apply(&mut world);
    assert!(world.plan().is_idle(), "{:?}", world.plan());

    // An index with an unplanned image is not rolled out.
    let index = world.observed.published.get_mut(&unions[0].reference).unwrap();
    index.platforms.get_mut(&Architecture::Arm64).unwrap().input_hash = None;
    let RolloutDecision::Hold(reason) = decision(&world) else { panic!("not held") };
    assert!(matches!(reason, HoldReason::NoUnion { .. }), "{reason:?}");
}

#[test]
fn one_architecture_keeps_the_name_that_it_had() {
    let mut world = world(&[K47, K48], UpdateStrategy::RollingUpdate);
    let unions = world.plan().unions;
    let [union] = unions.as_slice() else { panic!("{unions:?}") };
    let short = union.input_hash.short();
    assert_eq!(union.reference.to_string(), format!("registry.test/drivers/mft:4.33.0-union-{short}"));
    publish_union(&mut world);
    apply(&mut world);
    let image = &world.snapshot.daemon_sets[0].containers[0].image;
    assert!(image.ends_with(&Digest::of(union.input_hash.to_string().as_bytes()).to_string()), "{image}");
}

#[test]
fn kernels_leave_the_image_of_their_own_architecture() {
    let mut world = two_architectures(&[K47, K47, K48], UpdateStrategy::RollingUpdate);
    publish_union(&mut world);
    apply(&mut world);
    let left = |world: &World| -> Vec<String> {
        let live = world.snapshot.daemon_sets[0].live.as_ref().unwrap();
        unused_kernels(&live.annotations).into_keys().collect()
    };
    // A node of the other architecture still runs the kernel.
    world.snapshot.nodes[1] = node("n1", K48);
    to_arm64(&mut world, 1);
    apply(&mut world);
    let key = format!("arm64/{K47}");
    assert_eq!(left(&world), std::slice::from_ref(&key));
    assert_eq!(release_of_key(&key), K47);
    world.now += jiff::SignedDuration::from_hours(25);
    let unions = world.plan().unions;
    assert_eq!(unions.iter().map(members).collect::<Vec<_>>(), [[K47], [K48]]);
    publish_union(&mut world);
    apply(&mut world);
    assert_eq!(left(&world), [""; 0]);

    // The last node of an architecture leaves: its image is kept for the grace time.
    let index = PlannedUnion::contents(unions);
    world.snapshot.nodes.truncate(1);
    world.observed.contents.insert(world.snapshot.daemon_sets[0].containers[0].image.clone(), index);
    apply(&mut world);
    assert_eq!(left(&world), [format!("arm64/{K48}")]);
    assert!(world.plan().is_idle(), "{:?}", world.plan());
    world.now += jiff::SignedDuration::from_hours(25);
    let unions = world.plan().unions;
    assert_eq!(unions.iter().map(members).collect::<Vec<_>>(), [[K47]]);
}

/// The contents of a pod's image are looked up for the architecture of its node.
#[test]
fn a_pod_is_restarted_for_a_kernel_that_only_the_other_architecture_had() {
    let mut world = two_architectures(&[K47, K48], UpdateStrategy::OnDelete);
    publish_union(&mut world);
    apply(&mut world);
    let old = world.snapshot.daemon_sets[0].containers[0].image.clone();
    world.snapshot.pods = (0..2).map(|n| pod(&format!("n{n}"), &old, true)).collect();
    assert_eq!(apply(&mut world), [""; 0]);
    let before = world.observed.contents[&old].clone();
    world.snapshot.nodes[1] = node("n1", K47);
    to_arm64(&mut world, 1);
    world.publish(Verdict::Loads);
    let unions = world.plan().unions;
    publish_one(&mut world, &unions[0]);
    publish_one(&mut world, &unions[1]);
    let reference = &unions[0].reference;
    let index = world.observed.published.get_mut(reference).unwrap();
    index.digest = Digest::of(b"the next index");
    let pinned = index.pinned(reference).to_string();
    world.observed.contents.insert(pinned, PlannedUnion::contents(unions));
    world.observed.contents.insert(old, before);
    apply(&mut world);
    assert_eq!(apply(&mut world), ["mft-n1"]);
}

fn pod(node: &str, image: &str, ready: bool) -> PodFacts {
    PodFacts {
        namespace: "kube-system".to_owned(),
        name: format!("mft-{node}"),
        version: ObjectVersion { uid: node.to_owned(), resource_version: String::new() },
        daemon_set: "u1".to_owned(),
        node: node.to_owned(),
        bound: true,
        probed: Vec::new(),
        pull_secrets: 0,
        images: [("driver".to_owned(), image.to_owned())].into(),
        ready,
        stable_since: None,
        created: None,
        deleting: false,
        messages: Vec::new(),
        pull_failure: None,
    }
}

/// Returns a world with four nodes whose pods have an image for K47 only; three of the nodes already run K48.
fn after_upgrades() -> World {
    let mut world = world(&[K48, K48, K47, K48], UpdateStrategy::OnDelete);
    old_holds(&mut world, &[K47]);
    publish_union(&mut world);
    apply(&mut world);
    world.snapshot.pods = (0..4).map(|n| pod(&format!("n{n}"), OLD, true)).collect();
    world
}

#[test]
fn only_pods_whose_node_changed_kernel_are_restarted_one_at_a_time() {
    let mut world = after_upgrades();
    let new = world.snapshot.daemon_sets[0].containers[0].image.clone();
    let mut all = Vec::new();
    for _ in 0..5 {
        let restarted = apply(&mut world);
        assert!(restarted.len() <= 1, "{restarted:?}");
        for name in &restarted {
            let place = world.snapshot.pods.iter().position(|pod| pod.name == *name).unwrap();
            world.snapshot.pods[place].deleting = true;
            assert!(apply(&mut world).is_empty(), "one pod is already unavailable");
            world.snapshot.pods[place] = pod(&world.snapshot.pods[place].node.clone(), &new, false);
            assert!(apply(&mut world).is_empty(), "the new pod is not ready yet");
            world.snapshot.pods[place].ready = true;
        }
        all.extend(restarted);
    }
    assert_eq!(all, ["mft-n0", "mft-n1", "mft-n3"]);
    assert!(world.plan().is_idle());
}

#[test]
fn pods_that_do_not_work_anyhow_go_first_and_nodes_in_maintenance_wait() {
    let mut world = after_upgrades();
    world.snapshot.pods[3].ready = false;
    assert_eq!(apply(&mut world), ["mft-n3"]);
    world.snapshot.nodes[3].unschedulable = true;
    world.snapshot.pods[3].ready = true;
    world.snapshot.nodes[0]
        .labels
        .insert(crate::plan::UPGRADE_STATE_LABELS[0].to_owned(), "drain-required".to_owned());
    // The labels of interest tell the nodes apart.
    assert_eq!(apply(&mut world), ["mft-n1"]);
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().max_unavailable = PodCount::Percent(51);
    world.snapshot.nodes[3].unschedulable = false;
    assert_eq!(apply(&mut world), ["mft-n1", "mft-n3"]);
    world.observed.contents.remove(OLD);
    assert!(apply(&mut world).is_empty(), "the contents of the pod's image are unknown");
}

#[test]
fn a_dead_node_keeps_no_pod_that_does_not_work() {
    let mut world = after_upgrades();
    // The pod of a node with an unchanged kernel: its image has the modules, so a restart would not help.
    world.snapshot.pods[2].ready = false;
    assert_eq!(apply(&mut world), [""; 0], "one pod is already unavailable");
    world.snapshot.pods[0].ready = false;
    world.snapshot.pods[3].ready = false;
    assert_eq!(apply(&mut world), ["mft-n0", "mft-n3"]);
    world.snapshot.nodes[3].unschedulable = true;
    assert_eq!(apply(&mut world), ["mft-n0"]);
    // Working pods are restarted only while the number of unavailable pods permits.
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().max_unavailable = PodCount::Number(3);
    world.snapshot.pods[3].ready = true;
    assert_eq!(apply(&mut world), ["mft-n0", "mft-n1"]);
}

#[test]
fn images_in_use_are_those_of_the_containers_that_are_rolled_out() {
    let world = after_upgrades();
    let images = images_in_use(&world.snapshot, &world.definitions);
    assert_eq!(images, [OLD.to_owned(), world.snapshot.daemon_sets[0].containers[0].image.clone()].into());
}
