//! What `farrier doctor --probe-writes` says about each registry of docs/registries.md that is tested.

use serde_json::Value;

use super::*;
use crate::support::{
    registry_quirks::{Quirk, registry_with},
    scripted_registry::{HARBOR, Script, ScriptedRegistry, ZOT},
    site::{Run, Site, with_immutable_tags},
};

/// Runs doctor and returns each finding about the registry, as `check: result`.
async fn findings(host: &str) -> (Vec<String>, String) {
    findings_of(Site::new(), host).await
}

async fn findings_of(site: Site, host: &str) -> (Vec<String>, String) {
    let mut command = site.command(&["doctor", "-o", "json", "--probe-writes"]);
    command.env_remove("FARRIER_CLUSTER").env("FARRIER_REGISTRY", format!("{host}/drivers"));
    let run = tokio::task::spawn_blocking(move || (Run::of(command.spawn().unwrap()), site)).await.unwrap().0;
    let found = run.json();
    let checks = ["registry", "push", "trial image", "trial tag", "trial referrer", "trial deletion"];
    let of_registry = |found: &&Value| checks.contains(&found["check"].as_str().unwrap());
    let found: Vec<&Value> = found.as_array().unwrap().iter().filter(of_registry).collect();
    let result = |found: &&Value| {
        format!("{}: {}", found["check"].as_str().unwrap(), if found["ok"] == true { "ok" } else { "wrong" })
    };
    (found.iter().map(result).collect(), format!("{found:#?}"))
}

const ALL_OK: [&str; 6] = [
    "registry: ok",
    "push: ok",
    "trial image: ok",
    "trial tag: ok",
    "trial referrer: ok",
    "trial deletion: ok",
];

async fn is_all_ok(host: &str) -> String {
    let (found, text) = findings(host).await;
    assert_eq!(found, ALL_OK, "{text}");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn docker_registry_deletes_what_it_may() {
    let server = RegistryProcess::start(Wants { deletion: true, ..Wants::default() });
    let text = is_all_ok(&server.host).await;
    assert!(text.contains("nothing is left") && text.contains("repositories of the definitions: "), "{text}");
    let name = regex::Regex::new(r#""([^" ]+) accepts manifests"#).unwrap();
    let names = plain().tags(&name.captures(&text).unwrap()[1].parse().unwrap()).await.unwrap();
    assert!(names.is_empty(), "{names:?}");
    let server = RegistryProcess::start(Wants::default());
    let text = is_all_ok(&server.host).await;
    assert!(text.contains("left in "), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn gitlab_quay_and_artifactory_keep_documents_by_tags() {
    let quirks: [&[Quirk]; 3] = [
        &[Quirk::PullNeedsRepository, Quirk::FallbackTagIsSubject],
        &[Quirk::PullNeedsRepository],
        &[Quirk::ReferrersStatus(406)],
    ];
    for quirks in quirks {
        let server = RegistryProcess::start(Wants { deletion: true, ..Wants::default() });
        is_all_ok(&registry_with(&server.host, quirks).await).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ecr_needs_the_repository_first() {
    let server = RegistryProcess::start(Wants::default());
    let (found, text) = findings(&registry_with(&server.host, &[Quirk::PushNeedsRepository]).await).await;
    assert_eq!(found, ["registry: ok", "push: wrong", "trial image: wrong"], "{text}");
    assert!(text.contains("create the repository drivers/"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_proxy_that_limits_bodies_is_named() {
    let server = RegistryProcess::start(Wants::default());
    let (found, text) = findings(&registry_with(&server.host, &[Quirk::BodyLimit(100)]).await).await;
    assert_eq!(found, ["registry: ok", "push: ok", "trial image: wrong"], "{text}");
    assert!(text.contains("client_max_body_size"), "{text}");
}

#[tokio::test(flavor = "multi_thread")]
async fn zot_and_harbor_list_referrers() {
    let probe = |script: Script| async move {
        let server = RegistryProcess::start(Wants { deletion: true, ..Wants::default() });
        let scripted = ScriptedRegistry::start(&server.host, script).await;
        findings(&scripted.host).await
    };
    let (found, text) = probe(ZOT).await;
    assert_eq!(found, ALL_OK, "{text}");
    // Harbor with an immutability rule for all tags.
    let (found, text) = probe(HARBOR).await;
    assert_eq!(found[3], "trial tag: wrong", "{text}");
    assert_eq!((found[2].as_str(), found[4].as_str()), ("trial image: ok", "trial referrer: ok"), "{text}");
    assert!(text.contains("immutableTags: true"), "{text}");
    // The same registry, with the setting for it.
    let server = RegistryProcess::start(Wants { deletion: true, ..Wants::default() });
    let scripted = ScriptedRegistry::start(&server.host, HARBOR).await;
    let site = Site::new();
    site.define("site.yaml", &with_immutable_tags(&scripted.host, ""));
    let (found, text) = findings_of(site, &scripted.host).await;
    assert_eq!(found, ALL_OK, "{text}");
    assert!(text.contains("nothing is left"), "{text}");
}
