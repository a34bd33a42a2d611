//! The real program warns before it writes a DaemonSet for the first time.
use std::fs;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use farrier_store::registry::{CredentialFile, RegistryOptions};
use serde_json::{Value, json};

use crate::support::{
    kube_api::{Fate, objects::node},
    live::{DRIVER, Live, NAMESPACE},
    published::publish_planned_as,
    registry_process::{PASSWORD, USER, Wants},
    site::Site,
};

const A: &str = "6.1.0-901-amd64";

/// Creates a DaemonSet of a Helm release with a running pod, and an image in a registry.
fn live(password: bool) -> Live {
    let site = Site::with_registry(Wants { password, ..Wants::default() });
    let auth = BASE64_STANDARD.encode(format!("{USER}:{PASSWORD}"));
    let config = json!({"auths": {site.registry.host.clone(): {"auth": auth}}});
    fs::write(site.path("docker/config.json"), config.to_string()).unwrap();
    let live = Live::at(site, [node("n0", A)], "image");
    let release = json!({"metadata": {"annotations": {"meta.helm.sh/release-name": "network-operator"}}});
    live.api.patch_as("helm", "daemonsets.apps", NAMESPACE, DRIVER, &release);
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    live.api.settle();
    let credentials = CredentialFile::new(Some(live.site.path("docker/config.json"))).into();
    publish_planned_as(&live.plan(), &RegistryOptions { credentials, ..RegistryOptions::default() });
    live
}

fn codes(plan: &Value) -> Vec<&str> {
    let warnings = plan["rollouts"][0]["warnings"].as_array().into_iter().flatten();
    warnings.map(|warning| warning["code"].as_str().unwrap()).collect()
}

fn text(live: &Live, args: &[&str]) -> String {
    String::from_utf8_lossy(&live.command(args).output().unwrap().stdout).into_owned()
}

#[test]
fn the_first_write_is_warned_of_in_the_plan_in_why_and_in_the_log() {
    let mut live = live(true);
    let plan = live.plan();
    assert_eq!(plan["rollouts"][0]["decision"], "rewrite");
    assert_eq!(codes(&plan), ["helm", "no-pull-secrets", "restarts-pods"]);
    let said = text(&live, &["plan"]);
    for words in [
        "warning[helm]: Helm release network-operator manages the DaemonSet",
        "warning[no-pull-secrets]",
        "add imagePullSecrets",
    ] {
        assert!(said.contains(words), "{words}: {said}");
    }
    let why = text(&live, &["why", "node/n0"]);
    assert!(
        why.contains("warning[helm]") && why.contains("-> set the image in the release's values"),
        "{why}"
    );
    live.start(&["--interval", "1", "--log-format", "json"]);
    live.until("the rewrite", |live| live.image(DRIVER).contains("/drivers/driver@sha256:"));
    let log = live.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let warned: Vec<String> = lines
        .map(|line| line["fields"]["code"].as_str().or(line["code"].as_str()).unwrap_or_default().to_owned())
        .filter(|code| !code.is_empty())
        .collect();
    assert_eq!(warned, ["helm", "no-pull-secrets", "restarts-pods"], "{log}");
    assert_eq!(codes(&live.plan()), Vec::<&str>::new(), "only the first write is warned of");
}

/// The registry decides whether a pull secret is needed, and not whether farrier has credentials for it.
#[test]
fn a_registry_that_anyone_can_pull_from_needs_no_pull_secret() {
    assert_eq!(codes(&live(false).plan()), ["helm", "restarts-pods"]);
    // Once the ServiceAccount has a pull secret, so have its pods.
    let live = live(true);
    let pod = live.api.list("pods").remove(0);
    let name = pod["metadata"]["name"].as_str().unwrap();
    let secrets = json!({"spec": {"imagePullSecrets": [{"name": "pull"}]}});
    live.api.patch_as("serviceaccount", "pods", NAMESPACE, name, &secrets);
    assert_eq!(codes(&live.plan()), ["helm", "restarts-pods"]);
}
