use super::*;
use crate::{
    image::{DaemonSetContainer, GitLocation, ManifestObject, OperatorResource},
    kmod::Verdict,
    plan::{
        ManifestFacts, ResourceFacts,
        fixtures::{K47, K48, World, daemon_set, live_daemon_set, node, resource},
    },
};

fn location() -> GitLocation {
    GitLocation {
        repository: "ssh://git@git.test/clusters".parse().unwrap(),
        branch: "main".parse().unwrap(),
        path: Some("prod/drivers".parse().unwrap()),
        values: None,
    }
}

/// Returns a world with one DaemonSet in a repository, with nodes and a published image.
fn world(message: Option<&str>, proposals: Option<&str>) -> World {
    let mut world = World::new(&[K47]);
    world.publish(Verdict::Loads);
    world.image("mft").spec.rollout = vec![RolloutSpec::Git {
        location: location(),
        target: ManifestObject::DaemonSet(DaemonSetContainer {
            namespace: "kube-system".parse().unwrap(),
            daemon_set: "mft".parse().unwrap(),
            container: "driver".parse().unwrap(),
        }),
        message: message.map(|text| text.parse().unwrap()),
        proposals: proposals.map(|text| text.parse().unwrap()),
    }];
    let facts = ManifestFacts { daemon_sets: vec![daemon_set("mft")], ..ManifestFacts::default() };
    world.manifests.insert(ManifestLocation::Git(location()), Ok(facts));
    world
}

#[test]
fn a_manifest_or_a_daemon_set_with_the_annotation_is_paused() {
    let mut paused = world(None, None);
    repository(&mut paused).daemon_sets[0].paused = true;
    assert_eq!(planned(&paused).decision, RolloutDecision::Hold(HoldReason::Paused));
    let mut live = live_daemon_set("mft");
    live.live.as_mut().unwrap().annotations.insert("farrier.dev/paused".to_owned(), "true".to_owned());
    let mut paused = world(None, None);
    paused.snapshot.daemon_sets = vec![live];
    assert_eq!(planned(&paused).decision, RolloutDecision::Hold(HoldReason::Paused));
}

fn planned(world: &World) -> PlannedRollout {
    world.plan().rollouts.swap_remove(0)
}

fn repository(world: &mut World) -> &mut ManifestFacts {
    world.manifests.get_mut(&ManifestLocation::Git(location())).unwrap().as_mut().unwrap()
}

/// Returns the planned commit and the image that it sets.
fn to_commit(world: &mut World) -> (GitCommit, String) {
    let rollout = planned(world);
    let RolloutDecision::Rewrite { to, .. } = &rollout.decision else { panic!("{rollout:?}") };
    let spec = world.image("mft").spec.rollout[0].clone();
    (git_commit(&spec, &rollout, &rollout.changes[0]).unwrap(), to.to_string())
}

fn held(world: &World) -> String {
    match planned(world).decision {
        RolloutDecision::Hold(why) => why.to_string(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_cluster_is_watched_until_it_has_what_was_committed() {
    let mut world = world(None, None);
    let (GitCommit { branch, message }, to) = to_commit(&mut world);
    assert_eq!(branch, "main");
    let subject = "DaemonSet kube-system/mft: mft for container driver";
    assert_eq!(message, format!("{subject}\n\nfrom registry.test/old:1\nto {to}\n"));

    repository(&mut world).daemon_sets[0].containers[0].image.clone_from(&to);
    let waits =
        "the repository has the image, but the cluster has not applied it yet: it has registry.test/old:1";
    assert_eq!(held(&world), waits);
    world.snapshot.daemon_sets[0].containers[0].name = "other".to_owned();
    assert!(held(&world).ends_with("its DaemonSet has no such container"));
    let taken_over = world.snapshot.daemon_sets.pop().unwrap();
    assert!(held(&world).ends_with("it has no such DaemonSet"));

    world.snapshot.daemon_sets.push(taken_over);
    let container = &mut world.snapshot.daemon_sets[0].containers[0];
    (container.name, container.image) = ("driver".to_owned(), to.clone());
    let settled = planned(&world);
    assert!(matches!(settled.decision, RolloutDecision::AlreadySet { .. }) && settled.changes.is_empty());

    // A cluster that cannot be read may have any image. A directory of manifests has no DaemonSets that follow a
    // repository.
    world.snapshot.unseen.insert(ObservedKind::DaemonSets, "forbidden".to_owned());
    assert!(held(&world).contains("forbidden"));
    world.snapshot.unseen.clear();
    world.snapshot.daemon_sets.clear();
    world.snapshot.read_only_nodes = true;
    assert!(matches!(planned(&world).decision, RolloutDecision::AlreadySet { .. }));
}

/// Argo CD and Flux can add the namespace. farrier does not read their objects.
#[test]
fn a_manifest_without_a_namespace_is_said() {
    let mut world = world(None, None);
    "default".clone_into(&mut repository(&mut world).daemon_sets[0].namespace);
    let why = held(&world);
    assert!(
        why.contains("did you mean default/mft? A manifest without a namespace counts as `default`"),
        "{why}"
    );
}

#[test]
fn a_change_is_proposed_once() {
    let mut world = world(Some("{image} {to}: {daemonSet}, {container}, {what} {"), Some("farrier/"));
    let (GitCommit { branch, message }, to) = to_commit(&mut world);
    let digest = to.split_once("sha256:").unwrap().1;
    assert_eq!(branch, format!("farrier/kube-system-mft-driver-{}", &digest[..12]));
    assert_eq!(message.lines().next().unwrap(), format!("mft {to}: kube-system/mft, driver, {{what}} {{"));

    repository(&mut world).proposals.insert("farrier/kube-system-mft-driver-000000000000".to_owned());
    assert!(matches!(planned(&world).decision, RolloutDecision::Rewrite { .. }));
    repository(&mut world).proposals.insert(branch.clone());
    assert_eq!(held(&world), format!("branch {branch} has the change and waits to be merged"));
    assert!(planned(&world).changes.is_empty());
}

#[test]
fn a_repository_that_cannot_be_read_is_said() {
    let mut world = world(None, None);
    world.manifests.insert(ManifestLocation::Git(location()), Err("fetch: no route".to_owned()));
    assert_eq!(held(&world), "manifests cannot be read: fetch: no route");
    // The cluster's DaemonSets are no substitute for the repository.
    world.manifests.clear();
    assert!(held(&world).contains("was not read"));
}

/// An overlay changes which nodes the DaemonSet selects, so the kernels of the manifest's nodes are not those of the cluster's.
#[test]
fn the_reach_in_the_cluster_counts() {
    let mut world = world(None, None);
    world.snapshot.nodes.push(node("n1", K48));
    world.publish(Verdict::Loads);
    world.snapshot.nodes[1].labels.insert("pool".to_owned(), "b".to_owned());
    let mut live = live_daemon_set("mft");
    live.placement.node_selector = [("pool".to_owned(), "b".to_owned())].into();
    world.snapshot.daemon_sets = vec![live];
    world.snapshot.nodes[1].labels.remove("pci");
    assert!(
        held(&world).contains("only the cluster's reaches n1, only the manifest's reaches n0;"),
        "{}",
        held(&world)
    );
    // A DaemonSet that is not in the cluster yet has no other reach.
    world.snapshot.daemon_sets.clear();
    assert!(matches!(planned(&world).decision, RolloutDecision::Rewrite { .. }));
}

/// Returns a world with a NicClusterPolicy in a repository, and the policy there.
fn policy_world(proposals: Option<&str>) -> World {
    let mut world = world(None, proposals);
    world.image("mft").spec.tags =
        vec!["{{version}}-{{kernel_label}}-{{os_id}}{{os_version}}-{{arch}}".to_owned()];
    world.publish(Verdict::Loads);
    let rollout = &mut world.image("mft").spec.rollout[0];
    let RolloutSpec::Git { target, .. } = rollout else { panic!("{rollout:?}") };
    let named = serde_json::json!({"strategy": "custom-resource", "resource": "NicClusterPolicy", "name": "nic-cluster-policy"});
    let named: RolloutSpec = serde_json::from_value(named).unwrap();
    *target = ManifestObject::Resource(named.resource().unwrap().clone());
    let driver =
        serde_json::json!({"ofedDriver": {"repository": "nvcr.test/x", "image": "driver", "version": "1"}});
    let live = resource(OperatorResource::NicClusterPolicy, "nic-cluster-policy", driver);
    world.snapshot.daemon_sets.clear();
    world.snapshot.resources = vec![live.clone()];
    let found = repository(&mut world);
    (found.daemon_sets, found.resources) = (Vec::new(), vec![ResourceFacts { version: None, ..live }]);
    world
}

#[test]
fn a_resource_in_a_repository_is_a_target_as_in_the_cluster() {
    let mut world = policy_world(Some("farrier/"));
    let rollout = planned(&world);
    let RolloutDecision::Steps { now } = &rollout.decision else { panic!("{rollout:?}") };
    insta::assert_snapshot!(now[0], @"set spec.ofedDriver: nvcr.test/x/driver version 1 -> registry.test/drivers/mft version 4.33.0, forcePrecompiled");
    let [Change::Resource(change)] = &rollout.changes[..] else { panic!("{rollout:?}") };
    assert!(change.version.is_none() && change.annotations.is_empty(), "version control is the history");
    assert_eq!(change.expected.as_ref().unwrap()["version"], "1");
    let spec = world.image("mft").spec.rollout[0].clone();
    let GitCommit { branch, message } = git_commit(&spec, &rollout, &rollout.changes[0]).unwrap();
    assert!(branch.starts_with("farrier/NicClusterPolicy-nic-cluster-policy-"), "{branch}");
    insta::assert_snapshot!(message.trim_end(), @r"
    NicClusterPolicy nic-cluster-policy: mft

    from nvcr.test/x/driver version 1
    to registry.test/drivers/mft version 4.33.0, forcePrecompiled
    ");
    repository(&mut world).proposals.insert(branch);
    assert!(held(&world).ends_with("waits to be merged"));

    let mut world = policy_world(None);
    let Change::Resource(change) = planned(&world).changes.remove(0) else { panic!("no resource") };
    repository(&mut world).resources[0].spec = change.spec.clone().into();
    assert!(held(&world).ends_with("it has nvcr.test/x/driver version 1"), "{}", held(&world));
    world.snapshot.resources[0].spec = change.spec.into();
    assert!(matches!(planned(&world).decision, RolloutDecision::Settled { .. }));
    world.snapshot.resources.clear();
    assert!(held(&world).ends_with("it has no such resource"));
}

#[test]
fn a_resource_in_a_repository_holds_for_its_manifest() {
    let mut world = policy_world(None);
    world.snapshot.resources[0].spec = serde_json::json!({
        "ofedDriver": {}, "tolerations": [{"operator": "Exists"}],
    })
    .into();
    let mut tainted = node("n1", K48);
    tainted.taints = vec![crate::plan::Taint {
        key: "a".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Default::default()
    }];
    world.snapshot.nodes.push(tainted);
    assert!(held(&world).contains("only the cluster's reaches n1"), "{}", held(&world));

    let mut world = policy_world(None);
    repository(&mut world).resources[0]
        .why_not_editable
        .insert("image".to_owned(), "the value has a tag (line 3)".to_owned());
    assert_eq!(held(&world), "its image cannot be set: the value has a tag (line 3)");
    let annotation = ("farrier.dev/paused".to_owned(), "true".to_owned());
    let mut world = policy_world(None);
    repository(&mut world).resources[0].annotations.extend([annotation]);
    assert_eq!(planned(&world).decision, RolloutDecision::Hold(HoldReason::Paused));
    repository(&mut world).resources.clear();
    assert_eq!(held(&world), "there is no such resource");
    repository(&mut world).skipped.push("a.yaml:1: no".to_owned());
    assert_eq!(held(&world), "there is no such object; skipped: a.yaml:1: no");
}
