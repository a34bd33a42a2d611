//! Tests the functions of `ci/e2e` that handle a cluster's existing nodes and farriers, with the real kubectl.
use std::{path::Path, process::Command};

use serde_json::json;

use crate::support::kube_api::{FakeApi, objects::node};

const DEVICE: &str = "feature.node.kubernetes.io/pci-15b3.present";
const RUN: &str = "e2e.farrier.dev/run";

/// Runs commands with the functions and the names of an `ci/e2e` run and returns their output.
fn plays(api: &FakeApi, commands: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let script = format!(
        "set -euo pipefail; state={0}; . ci/lib.sh; need_kubectl; kubeconfig={1} run=abcde real_node=''\n\
         . ci/e2e.d/lib.sh\n{commands}",
        directory.path().display(),
        api.kubeconfig(directory.path()).display(),
    );
    let mut bash = Command::new("bash");
    let output = bash.args(["-c", &script]).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{said}");
    said
}

/// Creates a cluster with one node of this run, which has a device.
fn cluster() -> FakeApi {
    let api = FakeApi::start();
    let mut own = node("own", "6.1.0-901-amd64");
    own["metadata"]["labels"][RUN] = "abcde".into();
    api.load([own]);
    api
}

/// An operator's cluster-wide resource also selects foreign nodes, for which no image exists.
#[test]
fn a_resource_for_all_nodes_is_played_as_held_where_others_have_the_hardware() {
    let stand_ins = "held_by_foreign_nodes() { echo held; }; play_resource() { echo set; }";
    let play = |api: &FakeApi| plays(api, &format!("{stand_ins}; play_where_possible {DEVICE} x"));
    let api = cluster();
    assert_eq!(play(&api), "set\n");
    api.load([node("real", "6.12.0-1-amd64")]);
    assert_eq!(play(&api), "held\n");
}

#[test]
fn what_is_in_the_way_is_said_at_the_start() {
    let api = cluster();
    api.load([node("real", "6.12.0-1-amd64")]);
    api.create(json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "farrier", "namespace": "platform", "labels": {"app.kubernetes.io/name": "farrier"}},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "farrier"}},
                 "template": {"metadata": {"labels": {"app": "farrier"}},
                              "spec": {"containers": [{"name": "farrier", "image": "farrier"}]}}},
    }));
    let said = plays(&api, "survey_cluster");
    for part in [
        "2 nodes are there",
        "hardware that the operators look for: own, real",
        "farrier runs here: platform/farrier",
    ] {
        assert!(said.contains(part), "{part:?} is not in: {said}");
    }
}

/// Without a separate instance name, the run's farriers and an installed farrier would revert each other's writes.
#[test]
fn the_farriers_of_a_run_have_its_name() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("ci/e2e");
    let text = std::fs::read_to_string(script).unwrap();
    assert!(text.contains("export FARRIER_INSTANCE=\"$run\""), "{text}");
}
