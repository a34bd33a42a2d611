//! Tests the fake API server itself. Each expectation was verified against a real server.

mod pods;

use std::time::Duration;

use crate::support::kube_api::{ApiFailure, FakeApi, Fate, Kind, Requests, objects};
use kube::{
    Api, Client,
    api::{DynamicObject, Patch, PatchParams},
    core::{ApiResource, GroupVersionKind},
};
use serde_json::{Value, json};

fn daemon_sets(client: &Client) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("apps", "v1", "DaemonSet");
    Api::namespaced_with(client.clone(), "drivers", &ApiResource::from_gvk(&kind))
}

/// Applies an object and returns the resulting object, or the status code and the message.
async fn apply(api: &FakeApi, force: bool, object: Value) -> Result<Value, (u16, String)> {
    let mut params = PatchParams::apply("farrier");
    params.force = force;
    let name = object["metadata"]["name"].as_str().unwrap().to_owned();
    match daemon_sets(&api.client()).patch(&name, &params, &Patch::Apply(object)).await {
        Ok(object) => Ok(serde_json::to_value(object).unwrap()),
        Err(kube::Error::Api(status)) => Err((status.code, status.message.clone())),
        Err(fault) => panic!("{fault}"),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "calls read better")]
fn config(metadata: Value, pod: Value) -> Value {
    let mut object = json!({"apiVersion": "apps/v1", "kind": "DaemonSet", "metadata": metadata});
    if !pod.is_null() {
        object["spec"]["template"]["spec"] = pod;
    }
    object
}

fn entry<'a>(object: &'a Value, manager: &str) -> &'a Value {
    let entries = object["metadata"]["managedFields"].as_array().unwrap();
    &entries.iter().find(|entry| entry["manager"] == manager).unwrap()["fieldsV1"]
}

fn with_daemon_set() -> FakeApi {
    let api = FakeApi::start();
    api.create_as("owner", objects::daemon_set("drivers", "ofed", "example.test/ofed:1"));
    api
}

#[tokio::test]
async fn an_apply_owns_exactly_what_it_names() {
    let api = with_daemon_set();
    let applied = apply(
        &api,
        true,
        config(
            json!({"name": "ofed", "annotations": {"farrier.dev/record": "r"}}),
            json!({"containers": [{"name": "driver", "image": "example.test/ofed:2"}]}),
        ),
    )
    .await
    .unwrap();
    assert_eq!(applied["metadata"]["generation"], 2);
    let container = &applied["spec"]["template"]["spec"]["containers"][0];
    assert_eq!(container["image"], "example.test/ofed:2");
    assert_eq!(container["imagePullPolicy"], "IfNotPresent", "fields of other managers are unchanged");
    assert_eq!(
        *entry(&applied, "farrier"),
        json!({
            "f:metadata": {"f:annotations": {"f:farrier.dev/record": {}}},
            "f:spec": {"f:template": {"f:spec": {"f:containers": {
                "k:{\"name\":\"driver\"}": {".": {}, "f:image": {}, "f:name": {}},
            }}}},
        })
    );
    let owner = &entry(&applied, "owner")["f:spec"]["f:template"]["f:spec"]["f:containers"];
    assert!(owner["k:{\"name\":\"driver\"}"]["f:image"].is_null(), "the owner still owns the image");
    assert!(owner["k:{\"name\":\"driver\"}"]["f:name"].is_object(), "both managers own an equal value");
}

#[tokio::test]
async fn an_apply_without_force_names_the_other_manager_and_the_field() {
    let api = with_daemon_set();
    let image = json!({"containers": [{"name": "driver", "image": "example.test/ofed:2"}]});
    let refused = apply(&api, false, config(json!({"name": "ofed"}), image)).await.unwrap_err();
    let field = ".spec.template.spec.containers[name=\"driver\"].image";
    let message = format!("Apply failed with 1 conflict: conflict with \"owner\" using apps/v1: {field}");
    assert_eq!(refused, (409, message));
    // Applying an equal value is not a conflict.
    let same = json!({"containers": [{"name": "driver", "image": "example.test/ofed:1"}]});
    apply(&api, false, config(json!({"name": "ofed"}), same)).await.unwrap();
}

#[tokio::test]
async fn what_a_manager_gives_up_goes_unless_another_owns_it() {
    let api = with_daemon_set();
    let terms = json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "k", "operator": "Exists"}]}]});
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}});
    let image = json!([{"name": "driver", "image": "example.test/ofed:1"}]);
    apply(
        &api,
        true,
        config(
            json!({"name": "ofed", "annotations": {"a": "1", "b": "1"}}),
            json!({"affinity": affinity, "containers": image}),
        ),
    )
    .await
    .unwrap();
    let metadata = json!({"name": "ofed", "annotations": {"a": "1"}});
    let applied = apply(&api, true, config(metadata, Value::Null)).await.unwrap();
    assert_eq!(applied["metadata"]["annotations"], json!({"a": "1"}));
    let pod = &applied["spec"]["template"]["spec"];
    assert_eq!(pod["containers"][0]["image"], "example.test/ofed:1", "the owner also owns the field");
    assert!(pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"].is_null());

    // A field taken with force has only one owner. Giving up the image would remove it, and the server refuses that.
    let image = json!({"containers": [{"name": "driver", "image": "example.test/ofed:2"}]});
    apply(&api, true, config(json!({"name": "ofed"}), image)).await.unwrap();
    let (code, message) = apply(&api, true, config(json!({"name": "ofed"}), Value::Null)).await.unwrap_err();
    assert_eq!(code, 422);
    assert!(message.ends_with("spec.template.spec.containers[0].image: Required value"), "{message}");
}

#[tokio::test]
async fn an_apply_of_the_same_writes_nothing() {
    let api = with_daemon_set();
    let metadata = json!({"name": "ofed", "annotations": {"a": "1"}});
    let first = apply(&api, true, config(metadata.clone(), Value::Null)).await.unwrap();
    let second = apply(&api, true, config(metadata, Value::Null)).await.unwrap();
    assert_eq!(first["metadata"]["resourceVersion"], second["metadata"]["resourceVersion"]);
}

#[tokio::test]
async fn preconditions_of_an_apply() {
    let api = with_daemon_set();
    let try_with = async |name: &str, precondition: &str, value: &str| {
        let mut metadata = json!({"name": name, "annotations": {"a": "1"}});
        metadata[precondition] = json!(value);
        apply(&api, true, config(metadata, Value::Null)).await.unwrap_err()
    };
    let (code, message) = try_with("ofed", "resourceVersion", "1").await;
    assert_eq!(code, 409);
    assert!(message.starts_with(
        "Operation cannot be fulfilled on daemonsets.apps \"ofed\": the object has been modified"
    ));
    let (code, message) = try_with("ofed", "uid", "another").await;
    assert_eq!(code, 422);
    assert!(message.ends_with("metadata.uid: Invalid value: \"another\": field is immutable"), "{message}");
    // Only a uid prevents apply from recreating a deleted object.
    let (code, message) = try_with("gone", "uid", "u").await;
    assert_eq!(code, 409);
    assert!(
        message
            .ends_with("uid mismatch: the provided object specified uid u, and no existing object was found")
    );
    let (code, _) = try_with("gone", "resourceVersion", "5").await;
    assert_eq!(code, 422, "the server tries to create the object, which lacks a selector");
}

#[tokio::test]
async fn a_merge_patch_takes_fields_over() {
    let api = with_daemon_set();
    apply(&api, true, config(json!({"name": "ofed", "annotations": {"a": "1"}}), Value::Null)).await.unwrap();
    let patch = json!({"metadata": {"annotations": {"a": "2"}}});
    let patched = api.patch_as("other", "daemonsets.apps", "drivers", "ofed", &patch);
    assert_eq!(*entry(&patched, "other"), json!({"f:metadata": {"f:annotations": {"f:a": {}}}}));
    let entries = patched["metadata"]["managedFields"].as_array().unwrap();
    assert!(!entries.iter().any(|entry| entry["manager"] == "farrier"), "{entries:?}");
}

#[tokio::test]
async fn lists_come_in_pages_until_the_token_expires() {
    let api = FakeApi::start();
    api.load((0..25).map(|number| objects::node(&format!("n{number:02}"), "6.1.0-1-amd64")));
    let client = api.client();
    let page = async |token: &str| -> Result<Value, kube::Error> {
        let path = format!("/api/v1/nodes?limit=10&continue={token}");
        client.request(http_get(&path)).await
    };
    let first = page("").await.unwrap();
    assert_eq!(first["items"].as_array().unwrap().len(), 10);
    assert_eq!(first["metadata"]["remainingItemCount"], 15);
    assert!(first["items"][0].get("kind").is_none(), "items of built-in kinds have no kind");
    let second = page(first["metadata"]["continue"].as_str().unwrap()).await.unwrap();
    assert_eq!(second["items"][0]["metadata"]["name"], "n10");
    let token = second["metadata"]["continue"].as_str().unwrap();
    api.expire_continue_tokens();
    match page(token).await {
        Err(kube::Error::Api(status)) => assert_eq!((status.code, status.reason.as_str()), (410, "Expired")),
        other => panic!("{other:?}"),
    }
}

fn http_get(path: &str) -> axum::http::Request<Vec<u8>> {
    axum::http::Request::get(path).body(Vec::new()).unwrap()
}

/// Lines of a watch in order of arrival.
struct Lines {
    response: reqwest::Response,
    rest: Vec<u8>,
}

impl Lines {
    async fn open(api: &FakeApi, query: &str) -> Self {
        let response = reqwest::get(format!("{}{query}", api.url())).await.unwrap();
        Self { response, rest: Vec::new() }
    }

    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                let mut event: Value = serde_json::from_slice(&line).unwrap();
                return Some((event["type"].as_str().unwrap().to_owned(), event["object"].take()));
            }
            self.rest.extend(self.response.chunk().await.unwrap()?);
        }
    }
}

#[tokio::test]
async fn a_watch_goes_on_where_a_list_ended_and_sees_objects_come_and_go_with_their_labels() {
    let api = FakeApi::start();
    api.create(objects::node("a", "6.1.0-1-amd64"));
    let list: Value = api.client().request(http_get("/api/v1/nodes")).await.unwrap();
    let version = list["metadata"]["resourceVersion"].as_str().unwrap();
    let query = format!("/api/v1/nodes?watch=true&labelSelector=pool%3Dgpu&resourceVersion={version}");
    let mut lines = Lines::open(&api, &query).await;
    let label = |value: Value| {
        api.patch_as("me", "nodes", "", "a", &json!({"metadata": {"labels": {"pool": value}}}));
    };
    label(json!("gpu"));
    assert_eq!(lines.next().await.unwrap().0, "ADDED");
    api.set_kernel("a", "6.1.0-2-amd64");
    let (what, node) = lines.next().await.unwrap();
    assert_eq!(
        (what.as_str(), &node["status"]["nodeInfo"]["kernelVersion"]),
        ("MODIFIED", &json!("6.1.0-2-amd64"))
    );
    assert_eq!(lines.next().await.unwrap().0, "MODIFIED");
    label(Value::Null);
    let (what, node) = lines.next().await.unwrap();
    assert_eq!(what, "DELETED");
    assert_eq!(
        node["metadata"]["resourceVersion"],
        api.get("nodes", "", "a").unwrap()["metadata"]["resourceVersion"]
    );
    // A second watch from the same version gets the same events.
    let mut again = Lines::open(&api, &query).await;
    assert_eq!(again.next().await.unwrap().0, "ADDED");
}

#[tokio::test]
async fn a_watch_from_a_forgotten_version_is_expired_and_bookmarks_keep_up() {
    let api = FakeApi::start();
    let query = "/api/v1/nodes?watch=1&allowWatchBookmarks=true&resourceVersion=102";
    let mut lines = Lines::open(&api, query).await;
    api.create(objects::daemon_set("drivers", "ofed", "example.test/ofed:1"));
    api.bookmark();
    let (what, bookmark) = lines.next().await.unwrap();
    assert_eq!(what, "BOOKMARK");
    let version: u64 = bookmark["metadata"]["resourceVersion"].as_str().unwrap().parse().unwrap();
    assert!(version > 102);
    api.compact();
    let (what, status) = lines.next().await.unwrap();
    assert_eq!(
        (what.as_str(), &status["code"], &status["reason"]),
        ("ERROR", &json!(410), &json!("Expired"))
    );
    assert!(lines.next().await.is_none(), "the watch has ended");
}

#[tokio::test]
async fn faults_come_as_often_as_ordered_and_the_log_tells_them() {
    let api = with_daemon_set();
    let get = async || daemon_sets(&api.client()).get("ofed").await;
    api.fail(Requests::verb("get").resource("daemonsets.apps"), ApiFailure::Internal, 1);
    assert!(matches!(get().await, Err(kube::Error::Api(status)) if status.code == 500));
    get().await.unwrap();
    api.fail(Requests::verb("get"), ApiFailure::Drop, 1);
    assert!(!matches!(get().await, Ok(_) | Err(kube::Error::Api(_))), "no answer at all");
    api.set_user("somebody");
    api.deny("get", "daemonsets.apps");
    let Err(kube::Error::Api(status)) = get().await else { panic!("the request was not forbidden") };
    let message = "daemonsets.apps \"ofed\" is forbidden: User \"somebody\" cannot get resource \"daemonsets\" in \
                   API group \"apps\" in the namespace \"drivers\"";
    assert_eq!((status.code, status.message.as_str()), (403, message));
    api.allow("get", "daemonsets.apps");
    let statuses: Vec<u16> = api.requests().iter().map(|record| record.status).collect();
    assert_eq!(statuses, [500, 200, 0, 403]);
}

#[tokio::test]
async fn a_write_whose_answer_is_lost_was_made() {
    let api = with_daemon_set();
    api.fail(Requests::writes(), ApiFailure::LoseAnswer, 1);
    let params = PatchParams::apply("farrier");
    let object = config(json!({"name": "ofed", "annotations": {"a": "1"}}), Value::Null);
    daemon_sets(&api.client()).patch("ofed", &params, &Patch::Apply(object)).await.unwrap_err();
    let made = api.get("daemonsets.apps", "drivers", "ofed").unwrap();
    assert_eq!(made["metadata"]["annotations"]["a"], "1");
}

#[tokio::test]
async fn a_hanging_request_is_answered_when_it_is_let_go() {
    let api = with_daemon_set();
    let fault = api.fail_always(Requests::verb("get"), ApiFailure::Hang);
    let client = api.client();
    let asked = tokio::spawn(async move { daemon_sets(&client).get("ofed").await });
    api.until("the request has arrived", |api| api.count(&Requests::verb("get")) == 1).await;
    assert!(!asked.is_finished());
    api.take_back(fault);
    asked.await.unwrap().unwrap();
}

#[tokio::test]
async fn the_server_goes_away_and_comes_back_with_what_it_knew() {
    let api = with_daemon_set();
    let client = api.client();
    let mut lines = Lines::open(&api, "/api/v1/nodes?watch=1").await;
    api.until("the watch is open", |api| api.open_watches("nodes") == 1).await;
    api.go_away();
    assert!(lines.response.chunk().await.is_err(), "open watches end");
    assert_eq!(api.open_watches("nodes"), 0);
    daemon_sets(&client).get("ofed").await.unwrap_err();
    api.come_back();
    daemon_sets(&client).get("ofed").await.unwrap();
}

#[tokio::test]
async fn operators_kinds_come_and_go() {
    let api = FakeApi::start();
    let client = api.client();
    let path = "/apis/mellanox.com/v1alpha1/nicclusterpolicies";
    client.request::<Value>(http_get(path)).await.unwrap_err();
    assert!(client.list_api_group_resources("mellanox.com/v1alpha1").await.is_err());
    api.install(Kind::nic_cluster_policy());
    let resources = client.list_api_group_resources("mellanox.com/v1alpha1").await.unwrap();
    assert_eq!(resources.resources[0].kind, "NicClusterPolicy");
    let policy = objects::resource("mellanox.com/v1alpha1", "NicClusterPolicy", "policy", &json!({"a": [1]}));
    api.create(policy);
    let list: Value = client.request(http_get(path)).await.unwrap();
    assert_eq!(list["items"][0]["kind"], "NicClusterPolicy", "items of custom kinds have a kind");
    api.uninstall("nicclusterpolicies.mellanox.com");
    client.request::<Value>(http_get(path)).await.unwrap_err();
}

#[tokio::test]
async fn large_nodes_are_listed_in_pages() {
    let api = FakeApi::start();
    let images: Vec<Value> =
        (0..160).map(|at| json!({"names": [format!("{at:0110}")], "sizeBytes": at})).collect();
    api.load((0..1_000).map(|number| {
        let mut node = objects::node(&format!("n{number:05}"), "6.1.0-1-amd64");
        node["status"]["images"] = json!(images);
        node
    }));
    let (mut listed, mut bytes, mut token) = (0, 0, String::new());
    loop {
        let path = format!("{}/api/v1/nodes?limit=250&continue={token}", api.url());
        let page = reqwest::get(path).await.unwrap().bytes().await.unwrap();
        bytes += page.len();
        let page: serde_json::Map<String, Value> = serde_json::from_slice(&page).unwrap();
        listed += page["items"].as_array().unwrap().len();
        match page["metadata"]["continue"].as_str() {
            Some(next) => token = next.to_owned(),
            None => break,
        }
    }
    assert_eq!(listed, 1_000);
    assert!(bytes > 20_000_000, "{bytes}");
    tokio::time::timeout(Duration::from_mins(1), async {
        let mut lines = Lines::open(&api, "/api/v1/nodes?watch=1&resourceVersion=1102").await;
        api.set_kernel("n00500", "6.1.0-2-amd64");
        assert_eq!(lines.next().await.unwrap().1["metadata"]["name"], "n00500");
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn events_are_found_by_what_they_are_about() {
    let api = FakeApi::start();
    for (about, reason) in [("build", "FailedCreate"), ("other", "FailedCreate"), ("build", "Completed")] {
        let object =
            json!({"kind": "Job", "name": about, "namespace": "builds", "uid": format!("u-{about}")});
        let metadata = json!({"name": format!("{about}.{}", reason.to_lowercase()), "namespace": "builds"});
        api.create(json!({
            "apiVersion": "v1", "kind": "Event", "metadata": metadata, "involvedObject": object, "reason": reason,
        }));
        api.create(json!({
            "apiVersion": "events.k8s.io/v1", "kind": "Event", "metadata": metadata, "regarding": object,
            "reason": reason,
        }));
    }
    let list = async |path: &str, selector: &str| -> Result<usize, String> {
        let selector = selector.replace('=', "%3D");
        let path = format!("/{path}/namespaces/builds/events?fieldSelector={selector}");
        match api.client().request::<Value>(http_get(&path)).await {
            Ok(list) => Ok(list["items"].as_array().unwrap().len()),
            Err(kube::Error::Api(status)) => Err(status.message.clone()),
            Err(fault) => panic!("{fault}"),
        }
    };
    assert_eq!(list("api/v1", "involvedObject.name=build").await, Ok(2));
    assert_eq!(list("api/v1", "involvedObject.uid=u-build,reason=FailedCreate").await, Ok(1));
    assert_eq!(list("apis/events.k8s.io/v1", "regarding.name=build").await, Ok(2));
    let refused = Err("field label not supported: involvedObject.name".to_owned());
    assert_eq!(list("apis/events.k8s.io/v1", "involvedObject.name=build").await, refused);
}

#[tokio::test]
async fn the_template_of_a_job_stays_but_for_its_place_while_it_is_suspended() {
    let api = FakeApi::start();
    let kind = GroupVersionKind::gvk("batch", "v1", "Job");
    let jobs: Api<DynamicObject> =
        Api::namespaced_with(api.client(), "default", &ApiResource::from_gvk(&kind));
    let apply = async |suspend: bool, pod: Value| {
        let spec = json!({"suspend": suspend, "template": {"spec": pod}});
        let job =
            json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "build"}, "spec": spec});
        match jobs.patch("build", &PatchParams::apply("farrier").force(), &Patch::Apply(job)).await {
            Ok(job) => Ok(serde_json::to_value(job).unwrap()),
            Err(kube::Error::Api(status)) => Err(status.message.clone()),
            Err(fault) => panic!("{fault}"),
        }
    };
    let pod = |image: &str, policy: &str| json!({"restartPolicy": policy, "containers": [{"name": "build", "image": image}]});
    let told = apply(true, pod("a:1", "Always")).await.unwrap_err();
    assert!(
        told.ends_with("restartPolicy: Required value: valid values: \"OnFailure\", \"Never\""),
        "{told}"
    );
    let made = apply(true, pod("a:1", "Never")).await.unwrap();
    let uid = &made["metadata"]["uid"];
    assert_eq!(made["spec"]["selector"]["matchLabels"]["batch.kubernetes.io/controller-uid"], *uid);
    assert_eq!(made["spec"]["template"]["metadata"]["labels"]["job-name"], "build");
    assert_eq!(made["spec"]["podReplacementPolicy"], "TerminatingOrFailed");
    let mut placed = pod("a:1", "Never");
    placed["nodeSelector"] = json!({"pool": "builds"});
    apply(false, placed.clone()).await.unwrap();
    placed["nodeSelector"] = json!({"pool": "others"});
    for pod in [placed, pod("a:2", "Never")] {
        let told = apply(false, pod).await.unwrap_err();
        assert!(told.ends_with("field is immutable"), "{told}");
    }
}
