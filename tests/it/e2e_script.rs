//! Tests the functions of `ci/e2e` that handle a cluster's existing nodes and farriers, with the real kubectl.
use std::{path::Path, process::Command};

use serde_json::json;

use crate::support::kube_api::{FakeApi, objects::node};

const DEVICE: &str = "feature.node.kubernetes.io/pci-15b3.present";
const RUN: &str = "e2e.farrier.dev/run";

/// Runs commands with the functions and variables of a `ci/e2e` run, and returns their output.
fn run_with_e2e_functions(api: &FakeApi, commands: &str) -> String {
    let directory = tempfile::tempdir().unwrap();
    let script = format!(
        "set -euo pipefail; state={0}; . ci/lib.sh; need_kubectl; kubeconfig={1} run=abcde real_node=''\n\
         . ci/e2e.d/lib.sh\n{commands}",
        directory.path().display(),
        api.kubeconfig(directory.path()).display(),
    );
    let mut bash = Command::new("bash");
    let output = bash.args(["-c", &script]).current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{text}");
    text
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
fn foreign_nodes_with_the_hardware_hold_a_cluster_wide_resource() {
    let stand_ins = "check_hold() { echo held; }; check_resource_rollout() { echo set; }";
    let run = |api: &FakeApi| {
        run_with_e2e_functions(api, &format!("{stand_ins}; check_rollout_or_hold {DEVICE} x"))
    };
    let api = cluster();
    assert_eq!(run(&api), "set\n");
    api.load([node("real", "6.12.0-1-amd64")]);
    assert_eq!(run(&api), "held\n");
}

#[test]
fn survey_cluster_reports_foreign_nodes_and_farriers() {
    let api = cluster();
    api.load([node("real", "6.12.0-1-amd64")]);
    api.create(json!({
        "apiVersion": "apps/v1", "kind": "Deployment",
        "metadata": {"name": "farrier", "namespace": "platform", "labels": {"app.kubernetes.io/name": "farrier"}},
        "spec": {"replicas": 2, "selector": {"matchLabels": {"app": "farrier"}},
                 "template": {"metadata": {"labels": {"app": "farrier"}},
                              "spec": {"containers": [{"name": "farrier", "image": "farrier"}]}}},
    }));
    let text = run_with_e2e_functions(&api, "survey_cluster");
    for part in [
        "2 nodes are there",
        "hardware that the operators look for: own, real",
        "farrier runs here: platform/farrier",
    ] {
        assert!(text.contains(part), "{part:?} is not in: {text}");
    }
}

/// Without a separate instance name, the run's farriers and an installed farrier would revert each other's writes.
#[test]
fn a_run_sets_its_own_instance_name() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("ci/e2e");
    let text = std::fs::read_to_string(script).unwrap();
    assert!(text.contains("export FARRIER_INSTANCE=\"$run\""), "{text}");
}
