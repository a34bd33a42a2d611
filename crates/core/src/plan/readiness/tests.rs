use super::{
    super::{
        ImageContents, Instance, NEXT_KERNEL_ANNOTATION, PAUSED_ANNOTATION, Plan, SkipReason, UPGRADE,
        UpdateStrategy,
        fixtures::{K47, K48, World, name},
        table,
    },
    *,
};

fn world() -> World {
    let mut world = World::new(&[K47]);
    world.snapshot.nodes[0].annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), K48.to_owned());
    world
}

fn change(plan: &Plan) -> Option<&NodeChange> {
    assert_eq!(plan.nodes.len(), 1, "{:?}", plan.nodes);
    match plan.nodes[0].change.as_ref()? {
        Change::Node(change) => Some(change),
        other => panic!("{other:?}"),
    }
}

/// Applies the node change as the API server would.
fn carry_out(world: &mut World, plan: &Plan) {
    let NodeChange { labels, annotations, .. } = change(plan).unwrap().clone();
    let node = &mut *world.snapshot.nodes[0];
    for (map, changes) in [(&mut node.labels, labels), (&mut node.annotations, annotations)] {
        for (key, value) in changes {
            match value {
                Some(value) => map.insert(key, value),
                None => map.remove(&key),
            };
        }
    }
}

#[test]
fn a_node_is_marked_when_everything_is_there_and_then_left() {
    let mut world = world();
    let plan = world.plan();
    assert!(!plan.nodes[0].ready);
    assert_eq!(change(&plan), None);
    insta::assert_snapshot!(table(&plan), @r"
    IMAGE  KERNEL                             NODES  ACTION  WHY
    mft    6.1.0-47-amd64 (debian 12, amd64)  1      build   not in the registry
    mft    6.1.0-48-amd64 (debian 12, amd64)  0      build   not in the registry; announced by node n0

    IMAGE  ROLLOUT                                      ACTION         WHY
    mft    DaemonSet kube-system/mft, container driver  rewrite later  after registry.test/drivers/mft:4.33.0-6.1.0-47-amd64-debian12-amd64 is published

    NODES  NEXT KERNEL                        REBOOT  WHY
    n0     6.1.0-48-amd64 (debian 12, amd64)  wait    mft: it is not built yet

    2 to build, 1 to rewrite after their build
    ");

    world.publish(Verdict::Loads);
    let plan = world.plan();
    assert!(plan.nodes[0].ready && !plan.is_idle());
    assert_eq!(change(&plan).unwrap().labels[READY_FOR].as_deref(), Some(K48));
    carry_out(&mut world, &plan);
    assert_eq!(change(&world.plan()), None);
}

#[test]
fn the_mark_goes_with_the_image_and_with_the_announcement() {
    let mut world = world();
    world.publish(Verdict::Loads);
    let plan = world.plan();
    carry_out(&mut world, &plan);

    let mut lost = world.clone();
    lost.observed.published.clear();
    assert_eq!(change(&lost.plan()).unwrap().annotations[READY_FOR], None);

    let node = &mut world.snapshot.nodes[0];
    node.annotations.remove(NEXT_KERNEL_ANNOTATION);
    let plan = world.plan();
    assert_eq!(change(&plan).unwrap().labels[READY_FOR], None);
    carry_out(&mut world, &plan);
    assert!(world.plan().nodes.is_empty());
}

#[test]
fn what_is_not_known_changes_no_mark() {
    let mut world = world();
    world.publish(Verdict::Loads);
    let plan = world.plan();
    let unmarked = world.clone();
    carry_out(&mut world, &plan);
    for (mut world, marked) in [(world.clone(), true), (unmarked, false)] {
        for reference in std::mem::take(&mut world.observed.published).into_keys() {
            world.observed.unreachable.insert(reference, "connection refused".to_owned());
        }
        let plan = world.plan();
        assert!(!plan.nodes[0].ready);
        assert_eq!(change(&plan), None, "marked: {marked}");
    }
    // NFD restarts: the node has no platform for a while.
    world.snapshot.nodes[0].labels.retain(|key, _| key == READY_FOR);
    assert!(world.plan().nodes.is_empty());
}

/// An outage of a registry or mirror fails the lookup of headers before the lookup of the image.
#[test]
fn an_input_that_could_not_be_looked_up_changes_no_mark() {
    let mut world = world();
    world.publish(Verdict::Loads);
    let plan = world.plan();
    carry_out(&mut world, &plan);
    let kernel = world.plan().nodes[0].next.clone().unwrap().kernel.clone();
    let detail = "connection refused".to_owned();
    world.resolved.headers.insert(kernel, Err(SkipReason::Headers { detail }));
    assert_eq!(answer(&world.plan()), (false, BootReadiness::Wait), "the headers are gone");
    world.resolved.unreachable = true;
    let plan = world.plan();
    assert_eq!((answer(&plan), change(&plan)), ((false, BootReadiness::Unknown), None));
}

#[test]
fn only_what_a_rollout_would_take_makes_a_node_ready() {
    for (verdict, deny, ready) in [
        (Verdict::Loads, true, true),
        (Verdict::Unknown, false, true),
        (Verdict::Unknown, true, false),
        (Verdict::Refused, false, false),
    ] {
        let mut world = world();
        if deny {
            world.deny_unknown();
        }
        world.publish(verdict);
        assert_eq!(world.plan().nodes[0].ready, ready, "{verdict:?}, deny: {deny}");
    }
    let mut world = world();
    world.publish(Verdict::Loads);
    world.location.pullable = false;
    assert!(!world.plan().nodes[0].ready);
}

#[test]
fn an_image_that_is_not_for_the_kernel_is_missing_there() {
    let mut world = world();
    world.image("mft").spec.kernels = Some("<6.0".parse().unwrap());
    let plan = world.plan();
    assert!(!plan.nodes[0].ready);
    let next = plan.nodes[0].next.as_ref().unwrap();
    assert_eq!(table::missing_images(next), "mft: the image is for kernels <6.0");
    assert_eq!(next.needs[0].image, name("mft"));
}

fn answer(plan: &Plan) -> (bool, BootReadiness) {
    (plan.nodes[0].ready, plan.nodes[0].may_boot)
}

#[test]
fn a_node_that_calls_for_nothing_has_a_mark_of_its_own() {
    let mut world = world();
    world.snapshot.nodes[0].labels.remove("pci");
    let plan = world.plan();
    assert_eq!(answer(&plan), (false, BootReadiness::NoDriver));
    let marks: BTreeMap<_, _> = [(NO_DRIVER_FOR.to_owned(), Some(K48.to_owned()))].into();
    let written = change(&plan).unwrap();
    assert_eq!((&written.labels, &written.annotations), (&marks, &marks));
    let tables = table::tables(&plan);
    let text = super::super::text(tables.iter().find(|table| table.header[0] == "NODES").unwrap());
    insta::assert_snapshot!(text, @r"
    NODES  NEXT KERNEL                        REBOOT     WHY
    n0     6.1.0-48-amd64 (debian 12, amd64)  no driver  no driver image selects the node
    ");
    carry_out(&mut world, &plan);
    assert_eq!(change(&world.plan()), None);

    // The node calls for an image after all: the mark is removed before the image is available.
    world.snapshot.nodes[0].labels.insert("pci".to_owned(), "yes".to_owned());
    let plan = world.plan();
    assert_eq!(answer(&plan), (false, BootReadiness::Wait));
    assert_eq!(change(&plan).unwrap().labels, [(NO_DRIVER_FOR.to_owned(), None)].into());
}

#[test]
fn no_node_boots_a_kernel_that_no_family_knows() {
    let mut world = world();
    let node = &mut world.snapshot.nodes[0];
    node.labels.remove("pci");
    node.labels.insert(super::super::OS_ID_LABEL.to_owned(), "unknown-os".to_owned());
    let plan = world.plan();
    assert_eq!((answer(&plan), change(&plan)), ((false, BootReadiness::Wait), None));
    let next = plan.nodes[0].next.as_ref().unwrap();
    assert_eq!(next.blocker, Some(Blocker::NoFamily));
    let json = serde_json::to_value(&plan.nodes[0]).unwrap();
    assert_eq!((&json["mayBoot"], &json["next"]["doubt"]["reason"]), (&"wait".into(), &"no-family".into()));
}

#[test]
fn a_node_whose_hardware_labels_have_not_come_waits() {
    let mut world = world();
    let node = &mut world.snapshot.nodes[0];
    node.labels.remove("pci");
    node.has_hardware_labels = false;
    let plan = world.plan();
    assert_eq!((answer(&plan), change(&plan)), ((false, BootReadiness::Unknown), None));
    assert!(table::missing_images(plan.nodes[0].next.as_ref().unwrap()).contains("no hardware label"));
}

/// When NFD restarts, the GPU Operator sets `nvidia.com/gpu.present` to `false`, and to `true` some time after NFD.
#[test]
fn a_gpu_node_that_the_gpu_operator_has_not_labeled_waits() {
    let mut world = world();
    let selector = serde_json::json!({"matchLabels": {"nvidia.com/gpu.present": "true", "pci": "yes"}});
    world.image("mft").spec.nodes = serde_json::from_value(selector).unwrap();
    let pci = "feature.node.kubernetes.io/pci-10de.present".to_owned();
    world.snapshot.nodes[0].labels.insert(pci.clone(), "true".to_owned());
    for present in [None, Some("false")] {
        let present = present.map(str::to_owned).into_iter();
        world.snapshot.nodes[0]
            .labels
            .extend(present.map(|value| ("nvidia.com/gpu.present".to_owned(), value)));
        let plan = world.plan();
        assert_eq!((answer(&plan), change(&plan)), ((false, BootReadiness::Unknown), None));
        let why = table::missing_images(plan.nodes[0].next.as_ref().unwrap());
        assert!(why.contains("check that the GPU Operator runs"), "{why}");
    }
    let mut other = world.clone();
    other.snapshot.nodes[0].labels.remove("pci");
    assert_eq!(answer(&other.plan()), (false, BootReadiness::NoDriver), "another label excludes the node");
    world.snapshot.nodes[0].labels.remove(&pci);
    assert_eq!(answer(&world.plan()), (false, BootReadiness::NoDriver), "the node has no GPU");
}

#[test]
fn labels_that_are_away_for_a_while_take_no_readiness_away() {
    let mut world = world();
    world.publish(Verdict::Loads);
    let plan = world.plan();
    carry_out(&mut world, &plan);
    let node = &mut world.snapshot.nodes[0];
    node.labels.remove("pci");
    node.has_hardware_labels = false;
    assert_eq!(change(&world.plan()), None);
    // The hardware labels come back, without the device.
    world.snapshot.nodes[0].has_hardware_labels = true;
    let marks = [(NO_DRIVER_FOR.to_owned(), Some(K48.to_owned())), (READY_FOR.to_owned(), None)];
    assert_eq!(change(&world.plan()).unwrap().labels, marks.into());
}

#[test]
fn two_farriers_do_not_write_each_others_marks() {
    let mut gpu = world();
    gpu.instance = "gpu".parse().unwrap();
    gpu.publish(Verdict::Loads);
    let plan = gpu.plan();
    assert_eq!(change(&plan).unwrap().labels, [(format!("{READY_FOR}.gpu"), Some(K48.to_owned()))].into());
    carry_out(&mut gpu, &plan);
    // The other instance has other images, and none for the kernel.
    let mut other = gpu.clone();
    other.instance = Instance::default();
    other.observed.published.clear();
    assert_eq!(change(&other.plan()), None);
    assert_eq!(change(&gpu.plan()), None);
}

/// With one image for all nodes, the first node that boots the kernel gets the image of the other nodes.
#[test]
fn a_node_waits_while_other_nodes_need_the_only_image_of_their_daemon_set() {
    let with = |strategy: serde_json::Value| {
        let mut world = World::new(&[K47, K47]);
        world.snapshot.nodes[0].annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), K48.to_owned());
        let mut rollout =
            serde_json::json!({"namespace": "kube-system", "daemonSet": "mft", "container": "driver"});
        rollout.as_object_mut().unwrap().extend(strategy.as_object().unwrap().clone());
        world.image("mft").spec.rollout = vec![serde_json::from_value(rollout).unwrap()];
        world.publish(Verdict::Loads);
        world
    };
    let world = with(serde_json::json!({"strategy": "image"}));
    let plan = world.plan();
    assert_eq!((answer(&plan), change(&plan)), ((false, BootReadiness::Wait), None));
    insta::assert_snapshot!(table::missing_images(plan.nodes[0].next.as_ref().unwrap()), @"mft: DaemonSet kube-system/mft, container driver has one image for all its nodes, and another node runs 6.1.0-47-amd64 (debian 12, amd64); use strategy per-kernel or union, or boot all nodes at once");
    for strategy in ["union", "per-kernel"] {
        assert!(with(serde_json::json!({"strategy": strategy})).plan().nodes[0].ready, "{strategy}");
    }
    // The last node that boots the kernel is ready, and so is one that shares no DaemonSet with the others.
    for change in [
        |node: &mut NodeFacts| *node = (*super::super::fixtures::node("n1", K48)).clone(),
        |node: &mut NodeFacts| drop(node.labels.remove("pci")),
    ] {
        let mut world = world.clone();
        change(&mut world.snapshot.nodes[1]);
        assert!(world.plan().nodes[0].ready);
    }
    // The own mark is removed when another node of the DaemonSet changes its kernel.
    let mut marked = world.clone();
    marked.snapshot.nodes.pop();
    let plan = marked.plan();
    carry_out(&mut marked, &plan);
    marked.snapshot.nodes.push(super::super::fixtures::node("n1", K47));
    assert_eq!(change(&marked.plan()).unwrap().labels[READY_FOR], None);
}

#[test]
fn a_node_waits_while_its_rollout_is_paused_and_the_current_image_is_not_for_its_kernel() {
    let mut world = World::live(&[K47]);
    world.snapshot.nodes[0].annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), K48.to_owned());
    let rollout = serde_json::json!({
        "strategy": "union", "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
    });
    world.image("mft").spec.rollout = vec![serde_json::from_value(rollout).unwrap()];
    world.publish(Verdict::Loads);
    assert!(world.plan().nodes[0].ready);
    let live = world.snapshot.daemon_sets[0].live.as_mut().unwrap();
    live.annotations.insert(PAUSED_ANNOTATION.to_owned(), "true".to_owned());
    let plan = world.plan();
    assert_eq!(answer(&plan), (false, BootReadiness::Wait));
    insta::assert_snapshot!(table::missing_images(plan.nodes[0].next.as_ref().unwrap()), @r#"mft: DaemonSet kube-system/mft, container driver: it is paused; to resume, remove its annotation farrier.dev/paused or set it to "false""#);
    let image = world.image_of("driver").to_owned();
    let contents = |kernels: &[&str]| {
        let kernels = kernels.iter().map(|kernel| (*kernel).to_owned()).collect();
        ImageContents { kernels, ..ImageContents::default() }
    };
    world.observed.contents.insert(image, contents(&[K47, K48]));
    assert!(world.plan().nodes[0].ready);

    // With `OnDelete`, the node keeps the image of its pod.
    world.run_pod("n0", true);
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().update = UpdateStrategy::OnDelete;
    assert!(world.plan().nodes[0].ready);
    let earlier = "registry.test/old:0".to_owned();
    world.snapshot.pods[0].images.insert("driver".to_owned(), earlier.clone());
    world.observed.contents.insert(earlier, contents(&[K47]));
    assert_eq!(answer(&world.plan()), (false, BootReadiness::Wait));
    world.snapshot.pods.clear();
    assert!(world.plan().nodes[0].ready, "the next pod has the image of the DaemonSet");
}

/// Returns a world with a node that is to boot another kernel, in a rollout with `upgrade`.
fn upgraded(strategy: &str, update: UpdateStrategy) -> World {
    let mut world = World::live(&[K47]);
    world.snapshot.nodes[0].annotations.insert(NEXT_KERNEL_ANNOTATION.to_owned(), K48.to_owned());
    world.snapshot.daemon_sets[0].live.as_mut().unwrap().update = update;
    let rollout = serde_json::json!({
        "strategy": strategy, "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
        "upgrade": {},
    });
    world.image("mft").spec.rollout = vec![serde_json::from_value(rollout).unwrap()];
    world.publish(Verdict::Loads);
    world
}

/// The rollout never sets the image for the new kernel.
#[test]
fn a_node_waits_while_its_rollout_is_held() {
    for strategy in ["union", "per-kernel", "image"] {
        let plan = upgraded(strategy, UpdateStrategy::RollingUpdate).plan();
        assert_eq!(answer(&plan), (false, BootReadiness::Wait), "{strategy}");
        let why = table::missing_images(plan.nodes[0].next.as_ref().unwrap());
        assert!(why.contains("`upgrade` needs updateStrategy.type OnDelete"), "{why}");
    }
}

#[test]
fn a_node_waits_while_the_upgrade_of_its_driver_is_stopped() {
    let mut world = upgraded("union", UpdateStrategy::OnDelete);
    assert!(world.plan().nodes[0].ready);
    let note = serde_json::json!({
        "rollout": "kube-system/mft", "state": "failed", "to": world.image_of("driver"),
        "since": "1970-01-01T00:00:00Z", "began": "1970-01-01T00:00:00Z",
    });
    world.snapshot.nodes[0].annotations.insert(UPGRADE.to_owned(), note.to_string());
    let plan = world.plan();
    assert_eq!(answer(&plan), (false, BootReadiness::Wait));
    let why = table::missing_images(plan.nodes[0].next.as_ref().unwrap());
    assert!(why.ends_with("stopped, because node n0 failed"), "{why}");
}
