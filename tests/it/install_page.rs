//! The commands of docs/deploy.md that make and delete objects, played by `ci/install` with the real kubectl. On a real cluster it
//! plays all of the page.
use std::{path::Path, process::Command};

use crate::support::kube_api::FakeApi;

#[test]
fn the_page_on_deployment_makes_the_objects_that_it_says_and_deletes_them() {
    let api = FakeApi::start();
    let directory = tempfile::tempdir().unwrap();
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = Command::new(root.join("ci/install"))
        .arg("--kubeconfig")
        .arg(api.kubeconfig(directory.path()))
        .arg("--objects")
        .env("FARRIER_INSTALL_STATE", directory.path().join("state"))
        .env("HOME", directory.path())
        .output()
        .unwrap();
    let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    assert!(output.status.success(), "{said}");
    let left: Vec<String> = ["deployments.apps", "clusterroles.rbac.authorization.k8s.io", "secrets"]
        .iter()
        .flat_map(|resource| api.list(resource))
        .map(|object| object["metadata"]["name"].to_string())
        .collect();
    // The Secret is the namespace's, which the fake does not empty.
    assert_eq!(left, ["\"farrier-registry\""], "{said}");
}
