use serde_json::{Value, json};

use super::*;
use crate::{
    kmod::Verdict,
    plan::{
        Change, PodCount, RolloutDecision, Table,
        fixtures::{K47, World, pod},
        tables,
    },
};

/// A published image for a live DaemonSet with three pods, whose manifest has these fields.
fn world(manifest: Value) -> World {
    let mut world = World::live(&[K47, K47, K47]);
    world.publish(Verdict::Loads);
    let live = world.snapshot.daemon_sets[0].live.as_mut().unwrap();
    live.desired = 3;
    let labels = manifest["metadata"]["labels"].as_object().into_iter().flatten();
    live.labels = labels.map(|(key, value)| (key.clone(), value.as_str().unwrap().to_owned())).collect();
    live.manifest = manifest.into();
    world
}

/// A pod with an image from another registry.
fn vendor_pod(world: &World) -> PodFacts {
    let images = [("driver".to_owned(), "vendor.example/driver:1".to_owned())].into();
    PodFacts { images, ..pod(&world.snapshot.daemon_sets[0], "n0", true) }
}

fn warnings(world: &World) -> Vec<RolloutWarning> {
    world.plan().rollouts.swap_remove(0).warnings
}

fn codes(world: &World) -> Vec<&'static str> {
    warnings(world).into_iter().map(|warning| warning.code).collect()
}

fn owned(labels: &Value, annotations: &Value) -> World {
    world(
        json!({"metadata": {"namespace": "kube-system", "name": "mft", "labels": labels, "annotations": annotations}}),
    )
}

#[test]
fn a_daemon_set_of_helm_or_argo_cd_is_said() {
    let tracking = "argocd.argoproj.io/tracking-id";
    for (labels, annotations, expected) in [
        (json!({}), json!({}), None),
        // Not only Helm and Argo CD set these labels.
        (json!({"app.kubernetes.io/instance": "x", "app.kubernetes.io/managed-by": "me"}), json!({}), None),
        (json!({"app.kubernetes.io/managed-by": "Helm"}), json!({}), Some("helm")),
        (json!({}), json!({"meta.helm.sh/release-name": "nic"}), Some("helm")),
        (json!({}), json!({tracking: "nic:apps/DaemonSet:kube-system/mft"}), Some("argo-cd")),
        // An id that was copied from another object.
        (json!({}), json!({tracking: "nic:apps/DaemonSet:kube-system/other"}), None),
        (json!({"argocd.argoproj.io/instance": "nic"}), json!({}), Some("argo-cd")),
        // Argo CD renders a chart, and no Helm release exists.
        (
            json!({"app.kubernetes.io/managed-by": "Helm"}),
            json!({tracking: "nic:apps/DaemonSet:kube-system/mft"}),
            Some("argo-cd"),
        ),
    ] {
        let found = codes(&owned(&labels, &annotations));
        let expected: Vec<&str> = expected.into_iter().chain(["restarts-pods"]).collect();
        assert_eq!(found, expected, "{labels} {annotations}");
    }
}

#[test]
fn each_warning_has_a_code_a_message_and_a_remedy() {
    let mut world = owned(
        &json!({"app.kubernetes.io/managed-by": "Helm"}),
        &json!({"meta.helm.sh/release-name": "nic", "argocd.argoproj.io/tracking-id": "prod:apps/DaemonSet:kube-system/mft"}),
    );
    world.snapshot.pods = vec![vendor_pod(&world)];
    let Table { rows, .. } = &tables(&world.plan())[1];
    insta::assert_snapshot!(rows[0][3].split_once('\n').unwrap().1, @r"
    warning[argo-cd]: Argo CD application prod manages the DaemonSet: the next sync reverts the write, or selfHeal does so at once
    -> use strategy git, or add {group: apps, kind: DaemonSet, managedFieldsManagers: [farrier]} to ignoreDifferences of the application, with the sync option RespectIgnoreDifferences=true
    warning[no-pull-secrets]: the DaemonSet's pods have no imagePullSecrets, and registry.test refuses pulls without credentials
    -> add imagePullSecrets to the pod template or to its ServiceAccount, unless the nodes have credentials of their own
    warning[restarts-pods]: the updateStrategy restarts 3 pods, 1 at a time, and each restart reloads a node's driver
    -> to choose order and time, use updateStrategy OnDelete, and `upgrade` in the rollout
    ");
    let json = serde_json::to_value(&world.plan().rollouts[0]).unwrap();
    assert_eq!(json["warnings"][1]["code"], RolloutWarning::PULL_SECRETS);
    let keys: Vec<_> = json["warnings"][1].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["code", "hint", "message"]);
}

#[test]
fn pods_without_pull_secrets_are_said_once_it_is_known() {
    let with_pods = |change: fn(&mut World)| {
        let mut world = world(json!({}));
        world.snapshot.pods = vec![vendor_pod(&world)];
        change(&mut world);
        codes(&world).contains(&RolloutWarning::PULL_SECRETS)
    };
    assert!(with_pods(|_| ()));
    assert!(!with_pods(|world| world.snapshot.pods.clear()), "its ServiceAccount may have some");
    assert!(!with_pods(|world| world.snapshot.pods[0].pull_secrets = 1));
    let template = json!({"spec": {"template": {"spec": {"imagePullSecrets": [{"name": "pull"}]}}}});
    let mut world = world(template);
    world.snapshot.pods = vec![vendor_pod(&world)];
    assert_eq!(codes(&world), ["restarts-pods"]);
    // A pod of another DaemonSet pulled from the registry without one, so the nodes have credentials.
    assert!(!with_pods(|world| {
        let mut other = world.snapshot.pods[0].clone();
        "uid-of-other".clone_into(&mut other.daemon_set);
        other.images.insert("driver".to_owned(), "registry.test/drivers/other:1".to_owned());
        world.snapshot.pods.push(other);
    }));
    for host in
        ["1.dkr.ecr.eu-1.amazonaws.com", "europe-docker.pkg.dev", "gcr.io", "eu.gcr.io", "x.azurecr.io"]
    {
        let mut world = self::world(json!({}));
        world.snapshot.pods = vec![vendor_pod(&world)];
        world.location.prefix = format!("{host}/drivers");
        assert_eq!(codes(&world), ["restarts-pods"], "{host}");
    }
}

#[test]
fn the_pods_that_restart_are_said() {
    let with = |update, max_unavailable, desired, upgrade: Option<Value>| {
        let mut world = world(json!({}));
        let live = world.snapshot.daemon_sets[0].live.as_mut().unwrap();
        (live.update, live.max_unavailable, live.desired) = (update, max_unavailable, desired);
        let mut rollout = serde_json::to_value(&world.image("mft").spec.rollout[0]).unwrap();
        rollout.as_object_mut().unwrap().extend(upgrade.map(|upgrade| ("upgrade".to_owned(), upgrade)));
        world.image("mft").spec.rollout = vec![serde_json::from_value(rollout).unwrap()];
        codes(&world)
    };
    for (update, count, desired, expected) in [
        (UpdateStrategy::RollingUpdate, PodCount::Number(1), 3, Some("restarts-pods")),
        (UpdateStrategy::RollingUpdate, PodCount::Number(1), 1, Some("restarts-pods")),
        (UpdateStrategy::RollingUpdate, PodCount::Percent(34), 3, Some("restarts-pods")),
        (UpdateStrategy::RollingUpdate, PodCount::Percent(100), 3, Some("restarts-all-pods")),
        (UpdateStrategy::RollingUpdate, PodCount::Number(9), 3, Some("restarts-all-pods")),
        (UpdateStrategy::RollingUpdate, PodCount::Number(1), 0, None),
        (UpdateStrategy::OnDelete, PodCount::Number(1), 3, Some("restarts-no-pod")),
    ] {
        assert_eq!(
            with(update, count, desired, None),
            Vec::from_iter(expected),
            "{update:?} {count:?} {desired}"
        );
    }
    assert!(with(UpdateStrategy::OnDelete, PodCount::Number(1), 3, Some(json!({"canary": 1}))).is_empty());
}

#[test]
fn only_the_first_write_is_warned_of() {
    let mut world = owned(&json!({}), &json!({"meta.helm.sh/release-name": "nic"}));
    assert_eq!(codes(&world), ["helm", "restarts-pods"]);
    let planned = world.plan().rollouts.swap_remove(0);
    assert!(matches!(planned.decision, RolloutDecision::Rewrite { .. }), "a warning holds nothing");
    for change in &planned.changes {
        assert!(matches!(change, Change::DaemonSet(_)));
        world.apply(change).unwrap();
    }
    assert!(codes(&world).is_empty());
    // Someone sets another image: the record shows that farrier has written the object.
    world.set_by_another("registry.test/foreign:1");
    assert!(codes(&world).is_empty());
    // A farrier image that another user set.
    let mut world = owned(&json!({}), &json!({"meta.helm.sh/release-name": "nic"}));
    world.set_by_another("registry.test/drivers/mft:1");
    assert!(codes(&world).is_empty());
    world.set_by_another("registry.test/drivers/mft-other:1");
    assert_eq!(codes(&world), ["helm", "restarts-pods"]);
}
