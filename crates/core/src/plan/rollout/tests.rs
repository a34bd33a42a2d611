use proptest::{
    prelude::{any, prop, prop_assert, prop_assert_eq, proptest},
    strategy::Strategy as _,
};

use super::{
    super::{
        HoldReason, KERNEL_LABEL, OS_ID_LABEL, Operator, Outcome, Phase, Requirement, SelectorTerm,
        SkippedNode,
        fixtures::{K47, K48, World, daemon_set, image, live_daemon_set, node},
        node_target,
    },
    *,
};
use crate::{
    image::{DaemonSetContainer, ManifestObject, Version},
    kmod::Verdict,
    plan::{CowArc, ManifestFacts, NodeAffinity, NodeFacts, NodeReach, Owner, Published},
};

/// Returns the reason of the one rollout's hold, after a change to a world in which it would be rewritten.
fn hold(change: fn(&mut World)) -> HoldReason {
    let mut world = World::new(&[K47, K47]);
    world.publish(Verdict::Loads);
    assert!(matches!(world.plan().rollouts[0].decision, RolloutDecision::Rewrite { .. }));
    change(&mut world);
    match world.plan().rollouts.swap_remove(0).decision {
        RolloutDecision::Hold(reason) => reason,
        other => panic!("not held: {other:?}"),
    }
}

fn own(world: &mut World, kind: &str) {
    world.snapshot.daemon_sets[0].owner =
        Some(Owner { kind: kind.to_owned(), name: "policy".parse().unwrap() });
}

fn republish(world: &mut World, change: fn(&mut Published)) {
    world.observed.published.values_mut().for_each(change);
}

#[test]
fn every_reason_to_hold_says_what_is_the_matter() {
    let reasons = [
        hold(|w| w.snapshot.writable = "drivers,gpu".parse().unwrap()),
        hold(|w| w.snapshot.daemon_sets.clear()),
        hold(|w| "mtf".clone_into(&mut w.snapshot.daemon_sets[0].name)),
        hold(|w| "drivers".clone_into(&mut w.snapshot.daemon_sets[0].namespace)),
        hold(|w| w.snapshot.daemon_sets.push(daemon_set("mft"))),
        hold(|w| w.snapshot.daemon_sets[0].containers[0].name = "main".to_owned()),
        hold(|w| {
            let twice = w.snapshot.daemon_sets[0].containers[0].clone();
            w.snapshot.daemon_sets[0].containers.push(twice);
        }),
        hold(|w| {
            w.snapshot.daemon_sets[0].containers[0].why_not_editable = Some("it is anchored".to_owned());
        }),
        hold(|w| {
            let mut other = image("other");
            other.spec.rollout = w.image("mft").spec.rollout.clone();
            w.definitions.images.insert(other.metadata.name.clone(), other);
        }),
        hold(|w| own(w, "NicClusterPolicy")),
        hold(|w| own(w, "ClusterPolicy")),
        hold(|w| own(w, "NVIDIADriver")),
        hold(|w| own(w, "Widget")),
        hold(|w| {
            w.snapshot.daemon_sets[0].placement.affinity =
                NodeAffinity::Unsupported("operator Near".to_owned());
        }),
        hold(|w| w.snapshot.nodes.iter_mut().for_each(|n| drop(n.labels.remove("pci")))),
        hold(|w| drop(w.snapshot.nodes[1].labels.remove(KERNEL_LABEL))),
        hold(|w| drop(w.snapshot.nodes[1].labels.remove(OS_ID_LABEL))),
        hold(|w| w.snapshot.nodes[1].kernel_version.clear()),
        hold(|w| w.snapshot.nodes[1] = node("n1", K48)),
        hold(|w| w.image("mft").spec.kernels = Some(">=6.2".parse().unwrap())),
        hold(|w| w.definitions.families.clear()),
        hold(|w| {
            w.image("mft").spec.nodes.match_labels = [("a".parse().unwrap(), "b".parse().unwrap())].into();
        }),
        hold(|w| republish(w, |p| p.verdict = Some(Verdict::Refused))),
        hold(|w| {
            republish(w, |p| p.verdict = Some(Verdict::Unknown));
            w.deny_unknown();
        }),
        hold(|w| republish(w, |p| p.verdict = None)),
        hold(|w| republish(w, |p| p.kernel_release = Some("6.1.0-47-amd64+".to_owned()))),
        hold(|w| republish(w, |p| p.kernel_release = None)),
        hold(|w| w.location.pullable = false),
    ];
    let digest = regex::Regex::new("@sha256:[0-9a-f]{64}").unwrap();
    let text: Vec<String> = reasons.iter().map(ToString::to_string).collect();
    insta::assert_snapshot!(digest.replace_all(&text.join("\n"), "@DIGEST"));
}

#[test]
fn an_unknown_verdict_passes_where_it_is_allowed() {
    let mut world = World::new(&[K47]);
    world.publish(Verdict::Unknown);
    assert!(matches!(world.plan().rollouts[0].decision, RolloutDecision::Rewrite { .. }));
    assert!(!world.plan().has_failures());
    world.deny_unknown();
    let plan = world.plan();
    assert!(matches!(plan.rollouts[0].decision, RolloutDecision::Hold(HoldReason::UnknownDenied { .. })));
    assert!(plan.count(Phase::Missing) == 0, "a policy is not an input: nothing is rebuilt");
    assert!(matches!(plan.cells[0].outcome, Outcome::UpToDate { denied: true, .. }) && plan.has_failures());
    let mut publish_only = world.clone();
    publish_only.image("mft").spec.rollout.clear();
    assert!(publish_only.plan().has_failures(), "also without a rollout");
    republish(&mut world, |published| published.verdict = Some(Verdict::Refused));
    assert!(matches!(world.plan().rollouts[0].decision, RolloutDecision::Hold(_)));
}

#[test]
fn nodes_outside_the_daemon_set_do_not_matter() {
    let mut world = World::new(&[K47, K48, K48]);
    world.publish(Verdict::Loads);
    let by_name = Requirement {
        key: "metadata.name".to_owned(),
        operator: Operator::In,
        values: vec!["n1".to_owned(), "n2".to_owned()],
    };
    world.snapshot.daemon_sets[0].placement.affinity =
        NodeAffinity::Terms(vec![SelectorTerm { expressions: Vec::new(), fields: vec![by_name] }]);
    let RolloutDecision::Rewrite { to, .. } = &world.plan().rollouts[0].decision else { panic!("held") };
    let plan = world.plan();
    let wanted = plan.cells_in(Phase::Published).find(|cell| cell.target.release.as_str() == K48).unwrap();
    let Outcome::UpToDate { published: wanted, .. } = &wanted.outcome else { panic!("{wanted:?}") };
    assert_eq!(to.version, Version::Digest(wanted.digest.clone()));
}

#[test]
fn a_place_that_is_written_in_two_ways_is_one_place() {
    let of = |entry: serde_json::Value| {
        let names = serde_json::json!({"namespace": "n", "daemonSet": "d", "container": "c"});
        let mut whole = names.as_object().unwrap().clone();
        whole.extend(entry.as_object().unwrap().clone());
        RolloutTarget::of(&serde_json::from_value(whole.into()).unwrap())
    };
    let git = |repository: &str, branch: &str, path: &str| {
        let place = serde_json::json!({
            "strategy": "git", "repository": repository, "branch": branch, "path": path,
        });
        of(place)
    };
    let file = |path: &str| of(serde_json::json!({"strategy": "file", "path": path}));
    let one = git("https://git.test/a", "main", "prod");
    for same in
        [git("https://git.test/a.git", "main", "prod/ds.yaml"), git("https://git.test/a/", "main", "prod")]
    {
        assert!(one.may_share_field(&same) && same.may_share_field(&one), "{same}");
    }
    for other in [
        git("https://git.test/b", "main", "prod"),
        git("https://git.test/a", "next", "prod"),
        git("https://git.test/a", "main", "production"),
        file("prod"),
    ] {
        assert!(!one.may_share_field(&other), "{other}");
    }
    // The repository's DaemonSet is the cluster's; a directory may be for another cluster.
    let live = of(serde_json::json!({"strategy": "image"}));
    assert!(live.may_share_field(&one) && one.may_share_field(&live) && !live.may_share_field(&file("prod")));
    assert!(file("./prod/").may_share_field(&file("prod/ds.yaml")));
    assert!(!file("prod").may_share_field(&file("test")));
}

/// A chart can make several DaemonSets, or several containers, from one value. Rollouts that need different images would take turns
/// in overwriting the value.
#[test]
fn rollouts_of_one_chart_value_need_one_image() {
    let rollout = |path: &str, file: &str, value: &str, daemon_set: &str| -> RolloutSpec {
        let rollout = serde_json::json!({
            "strategy": "file", "path": path, "values": {"file": file, "path": value},
            "namespace": "kube-system", "daemonSet": daemon_set, "container": "driver",
        });
        serde_json::from_value(rollout).unwrap()
    };
    let mut world = World::new(&[K47, K48]);
    world.publish(Verdict::Loads);
    world.image("mft").spec.rollout = vec![
        rollout("apps/mofed", "values.yaml", "driver.image", "a"),
        rollout("apps", "mofed/values.yaml", "driver.image", "b"),
        rollout("./apps/mofed", "values.yaml", "driver.image", "c"),
        rollout("apps/mofed", "values.yaml", "other.image", "d"),
        rollout("apps/mofed", "other.yaml", "driver.image", "e"),
    ];
    let pools = [("a", "0"), ("b", "1"), ("c", "none"), ("d", "1"), ("e", "1")];
    for (spec, (name, pool)) in world.image("mft").spec.rollout.clone().iter().zip(pools) {
        let mut facts = daemon_set(name);
        facts.placement.node_selector.insert("pool".to_owned(), pool.to_owned());
        let facts = ManifestFacts { daemon_sets: vec![facts], ..ManifestFacts::default() };
        world.manifests.insert(ManifestLocation::of(spec).unwrap(), Ok(facts));
    }
    let rewritten = |world: &mut World, pools: [&str; 2]| -> Vec<bool> {
        for (node, pool) in world.snapshot.nodes.iter_mut().zip(pools) {
            node.labels.insert("pool".to_owned(), pool.to_owned());
        }
        let rollouts = world.plan().rollouts;
        rollouts.iter().map(|rollout| matches!(rollout.decision, RolloutDecision::Rewrite { .. })).collect()
    };
    assert_eq!(rewritten(&mut world, ["0", "1"]), [false, false, false, true, true]);
    let why = world.plan().rollouts[0].hold_text().unwrap();
    assert!(why.contains("its value also sets DaemonSet kube-system/b, container driver"), "{why}");
    world.snapshot.nodes[1] = node("n1", K47);
    assert_eq!(rewritten(&mut world, ["0", "1"]), [true, true, false, true, true]);
}

/// Whatever their strategies, two rollouts would take turns in overwriting the same field.
#[test]
fn two_strategies_do_not_share_a_field() {
    let mut world = World::new(&[K47]);
    world.publish(Verdict::Loads);
    let union = serde_json::json!({
        "strategy": "union", "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
    });
    world.image("mft").spec.rollout.push(serde_json::from_value(union).unwrap());
    let rollouts = world.plan().rollouts;
    assert_eq!(rollouts.len(), 2);
    for rollout in rollouts {
        assert!(
            matches!(rollout.decision, RolloutDecision::Hold(HoldReason::ClaimedTwice { .. })),
            "{rollout:?}"
        );
        assert!(rollout.changes.is_empty());
    }
}

#[test]
fn file_rollouts_look_into_their_own_directory() {
    let mut world = World::new(&[K47]);
    world.publish(Verdict::Loads);
    world.snapshot.daemon_sets.clear();
    let place = ManifestLocation::Local { path: "../gitops".into(), values: None };
    world.image("mft").spec.rollout = vec![RolloutSpec::File {
        path: "../gitops".parse().unwrap(),
        values: None,
        target: ManifestObject::DaemonSet(DaemonSetContainer {
            namespace: "kube-system".parse().unwrap(),
            daemon_set: "mft".parse().unwrap(),
            container: "driver".parse().unwrap(),
        }),
    }];
    let decision = |world: &World| world.plan().rollouts.swap_remove(0).decision;
    assert!(matches!(decision(&world), RolloutDecision::Hold(HoldReason::Unreadable { .. })));
    let facts = ManifestFacts { daemon_sets: vec![daemon_set("mft")], ..ManifestFacts::default() };
    world.manifests.insert(place.clone(), Ok(facts));
    assert!(matches!(decision(&world), RolloutDecision::Rewrite { .. }));
    let mut live = live_daemon_set("mft");
    world.snapshot.daemon_sets = vec![live.clone()];
    assert!(matches!(decision(&world), RolloutDecision::Rewrite { .. }));
    // An overlay of the manifest selects other nodes.
    live.placement.node_selector.insert("pool".to_owned(), "other".to_owned());
    world.snapshot.daemon_sets = vec![live];
    assert!(matches!(decision(&world), RolloutDecision::Hold(HoldReason::ReachDiffers { .. })));
    world.snapshot.daemon_sets.clear();
    let empty = ManifestFacts { skipped: vec!["a.yaml:1: no".to_owned(); 5], ..ManifestFacts::default() };
    world.manifests.insert(place.clone(), Ok(empty));
    let RolloutDecision::Hold(why) = decision(&world) else { panic!("it is not there") };
    insta::assert_snapshot!(why, @"there is no such object; skipped: a.yaml:1: no, a.yaml:1: no, a.yaml:1: no and 2 more");
    world.manifests.insert(place, Err("a.yaml:1:2: no".to_owned()));
    assert!(matches!(decision(&world), RolloutDecision::Hold(HoldReason::Unreadable { .. })));
}

/// farrier renders no chart and no patch, so only the cluster knows the nodes.
#[test]
fn a_manifest_without_known_nodes_takes_them_from_the_cluster() {
    let mut world = World::new(&[K47]);
    world.publish(Verdict::Loads);
    let file = serde_json::json!({
        "strategy": "file", "path": "gitops", "namespace": "kube-system", "daemonSet": "mft", "container": "driver",
        "values": {"file": "values.yaml", "path": "driver.image"},
    });
    world.image("mft").spec.rollout = vec![serde_json::from_value(file).unwrap()];
    let place = ManifestLocation::of(&world.image("mft").spec.rollout[0]).unwrap();
    let mut manifest = daemon_set("mft");
    manifest.placement.affinity = NodeAffinity::Unsupported("rendered".to_owned());
    let facts = ManifestFacts { daemon_sets: vec![manifest], ..ManifestFacts::default() };
    world.manifests.insert(place, Ok(facts));
    let decision = |world: &World| world.plan().rollouts.swap_remove(0).decision;
    let mut live = live_daemon_set("mft");
    live.placement.node_selector.insert("pool".to_owned(), "other".to_owned());
    world.snapshot.daemon_sets = vec![live];
    assert!(matches!(decision(&world), RolloutDecision::Hold(HoldReason::NoNodes)));
    world.snapshot.daemon_sets = vec![live_daemon_set("mft")];
    assert!(matches!(decision(&world), RolloutDecision::Rewrite { .. }));
    world.snapshot.daemon_sets.clear();
    assert!(matches!(decision(&world), RolloutDecision::Hold(HoldReason::Affinity { .. })));
}

/// Worlds with everything that could mislead: stale labels, several kernels, foreign and refused images.
fn worlds() -> impl proptest::strategy::Strategy<Value = World> {
    let release = prop::sample::select(vec![K47, K48, "6.1.0-acme+", "6.1.0-acme", "5.4.0 evil"]);
    let nodes = prop::collection::vec((release, 0..6u8), 0..6);
    let published = prop::collection::vec(0..9u8, 8);
    let reach = 0..5u8;
    (nodes, published, reach, any::<bool>()).prop_map(|(nodes, published, reach, deny)| {
        let releases: Vec<&str> = nodes.iter().map(|(release, _)| *release).collect();
        let mut world = World::new(&releases);
        if deny {
            world.deny_unknown();
        }
        world.publish(Verdict::Loads);
        for (published, what) in world.observed.published.values_mut().zip(published) {
            match what {
                0 => published.input_hash = None,
                1 => published.verdict = Some(Verdict::Unknown),
                2 => published.verdict = Some(Verdict::Refused),
                3 => published.verdict = None,
                4 => published.kernel_release = Some(K47.to_owned()),
                _ => {}
            }
        }
        for (facts, (_, what)) in world.snapshot.nodes.iter_mut().zip(&nodes) {
            match what {
                0 => drop(facts.labels.remove(KERNEL_LABEL)),
                1 => drop(facts.labels.insert(KERNEL_LABEL.to_owned(), K48.to_owned())),
                2 => drop(facts.labels.remove("pci")),
                3 => drop(facts.labels.insert("zone".to_owned(), "a".to_owned())),
                _ => {}
            }
        }
        let daemon_set = &mut world.snapshot.daemon_sets[0];
        let zone = |operator| Requirement {
            key: "zone".to_owned(),
            operator,
            values: if operator == Operator::In { vec!["a".to_owned()] } else { Vec::new() },
        };
        let term = |expressions, fields| NodeAffinity::Terms(vec![SelectorTerm { expressions, fields }]);
        match reach {
            0 => daemon_set.placement.affinity = term(vec![zone(Operator::In)], Vec::new()),
            1 => daemon_set.placement.affinity = term(vec![zone(Operator::DoesNotExist)], Vec::new()),
            2 => {
                let name = "metadata.name".to_owned();
                let values = vec!["n0".to_owned(), "n3".to_owned()];
                let first = Requirement { key: name, operator: Operator::In, values };
                daemon_set.placement.affinity = term(Vec::new(), vec![first]);
            }
            3 => daemon_set.placement.node_selector.clear(),
            _ => {}
        }
        world
    })
}

proptest! {
    /// Guarantee 1, stated without the planner's own helpers for choosing an image.
    #[test]
    fn no_rewrite_without_a_passing_image_for_every_reached_kernel(world in worlds()) {
        let plan = world.plan();
        let spec = &world.definitions.images.values().next().unwrap().spec;
        let allows_unknown = spec.check.unknown == crate::image::UnknownPolicy::Allow;
        for rollout in &plan.rollouts {
            let RolloutDecision::Rewrite { to, .. } = &rollout.decision else { continue };
            let daemon_set = &world.snapshot.daemon_sets[0];
            let is_reached = |node: &&CowArc<NodeFacts>| {
                !matches!(daemon_set.placement.reach(node, false), NodeReach::Excluded(_))
            };
            let reached: Vec<&CowArc<NodeFacts>> = world.snapshot.nodes.iter().filter(is_reached).collect();
            prop_assert!(!reached.is_empty());
            for node in reached {
                let target = node_target(node).unwrap();
                prop_assert_eq!(target.release.as_str(), &node.kernel_version);
                let good = world.observed.published.iter().any(|(reference, published)| {
                    let verdict = published.verdict == Some(Verdict::Loads)
                        || (allows_unknown && published.verdict == Some(Verdict::Unknown));
                    verdict
                        && reference.repository == to.repository
                        && Version::Digest(published.digest.clone()) == to.version
                        && published.kernel_release.as_ref() == Some(&node.kernel_version)
                        && published.input_hash.is_some()
                });
                prop_assert!(good, "{} is not for {}", to, node.kernel_version);
                let left = |l: &SkippedNode| l.node == node.name;
                prop_assert!(!plan.skipped_nodes.iter().any(left));
            }
        }
    }
}
