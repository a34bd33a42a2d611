//! `farrier rollback` uses the records on the objects and needs no definitions.
use std::{
    path::Path,
    process::{Command, Output},
};

use serde_json::{Value, json};

use crate::support::{
    kube_api::{
        FakeApi, Fate, Kind, Requests,
        objects::{daemon_set, node, resource},
    },
    live::{DRIVER, Live, NAMESPACE, OLD_IMAGE},
};

const NEW_IMAGE: &str = "registry.example/drivers/driver@sha256:1";

/// Runs the program as an administrator would: with a kubeconfig and without definitions.
fn farrier(directory: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_farrier"));
    command
        .args(args)
        .args(["--cluster", "kube"])
        .env("KUBECONFIG", directory.join("kubeconfig"))
        .env("FARRIER_CACHE_DIR", directory.join("cache"))
        .env("HOME", directory)
        .env_remove("FARRIER_DEFINITIONS")
        .env_remove("FARRIER_LOG");
    command
}

fn rollback(directory: &Path, args: &[&str]) -> Command {
    farrier(directory, &[&["rollback"], args].concat())
}

fn done(output: &Output) -> String {
    let (stdout, stderr) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{stdout}{stderr}");
    stdout.into_owned()
}

fn recorded(mut object: Value, field: &str, set: &Value, replaced: &Value) -> Value {
    let entry = json!({"set": set, "replaced": replaced, "at": "2026-11-01T00:00:00Z", "state": "good"});
    object["metadata"]["annotations"] = json!({"farrier.dev/record": json!({field: entry}).to_string()});
    object
}

/// Operators' resources, each with the path of its driver's fields.
fn policies() -> [(Kind, &'static str); 4] {
    [
        (Kind::nic_cluster_policy(), "/spec/ofedDriver"),
        (Kind::nic_node_policy(), "/spec/ofedDriver"),
        (Kind::cluster_policy(), "/spec/driver"),
        (Kind::nvidia_driver(), "/spec"),
    ]
}

fn images(api: &FakeApi) -> Vec<String> {
    let image = |object: &Value| object.pointer("/spec/template/spec/containers/0/image").cloned();
    let all = api.list("daemonsets.apps");
    all.iter().filter_map(image).map(|image| image.as_str().unwrap().to_owned()).collect()
}

#[test]
fn everything_that_carries_a_record_is_taken_back_without_any_definition() {
    let (api, directory) = (FakeApi::start(), tempfile::tempdir().unwrap());
    api.kubeconfig(directory.path());
    for number in 0..51 {
        let object = daemon_set(&format!("drivers-{}", number % 3), &format!("d{number}"), NEW_IMAGE);
        api.create(recorded(object, "driver", &NEW_IMAGE.into(), &OLD_IMAGE.into()));
    }
    api.create(daemon_set("drivers-0", "none-of-ours", NEW_IMAGE));
    let driver = |version: &str| json!({"repository": "r.example", "image": "driver", "version": version});
    for (kind, path) in policies() {
        api.install(kind.clone());
        let spec = match path.rsplit_once('/').unwrap().1 {
            "spec" => driver("new"),
            section => json!({section: driver("new")}),
        };
        let object = resource(&kind.api_version(), &kind.kind, "policy", &spec);
        api.create(recorded(object, "spec", &driver("new"), &driver("old")));
    }

    let shown = done(&rollback(directory.path(), &["--dry-run"]).output().unwrap());
    assert_eq!(shown.matches("restored").count(), 55, "{shown}");
    let all_writes = || {
        let is_policy = |resource: &str| policies().iter().any(|(kind, _)| kind.resource() == resource);
        let written = |resource: &str| resource == "daemonsets.apps" || is_policy(resource);
        api.writes().iter().filter(|record| written(&record.resource)).count()
    };
    assert_eq!(all_writes(), 0);

    let rolled = done(&rollback(directory.path(), &["-o", "json"]).output().unwrap());
    let rolled: Value = serde_json::from_str(&rolled).unwrap();
    assert_eq!(rolled.as_array().unwrap().len(), 55);
    let is_old = |image: &&String| *image == OLD_IMAGE;
    assert_eq!((images(&api).iter().filter(is_old).count(), images(&api).len()), (51, 52));
    for (kind, path) in policies() {
        let object = api.get(&kind.resource(), "", "policy").unwrap();
        assert_eq!(object.pointer(&format!("{path}/version")), Some(&"old".into()), "{object}");
    }
    // A rollback lists no pods, because there may be thousands.
    assert_eq!(api.count(&Requests::any().resource("pods")), 0);

    assert_eq!(all_writes(), 55);
    let shown = done(&rollback(directory.path(), &[]).output().unwrap());
    assert_eq!(shown.matches("it was rolled back before").count(), 55, "{shown}");
    assert_eq!(all_writes(), 55);
}

/// Two teams run a farrier each: a rollback without named objects restores only what its farrier has set.
#[test]
fn what_another_farrier_set_stays() {
    let (api, directory) = (FakeApi::start(), tempfile::tempdir().unwrap());
    api.kubeconfig(directory.path());
    for (name, by) in [("ours", "farrier-gpu"), ("theirs", "farrier")] {
        let entry = json!({
            "set": NEW_IMAGE, "replaced": OLD_IMAGE, "at": "2026-11-01T00:00:00Z", "state": "good", "by": by,
        });
        let mut object = daemon_set("drivers", name, NEW_IMAGE);
        let record = json!({"driver": entry}).to_string();
        object["metadata"]["annotations"] = json!({"farrier.dev/record": record});
        api.create(object);
    }
    let restored = || images(&api).iter().filter(|image| *image == OLD_IMAGE).count();
    let output = rollback(directory.path(), &["--instance", "gpu"]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("stay unchanged: drivers/theirs (farrier)\n"), "{said}");
    let shown = done(&output);
    assert!(shown.contains("drivers/ours") && !shown.contains("drivers/theirs"), "{shown}");
    assert_eq!(restored(), 1);
    // Without `--instance`, the only farrier of a cluster may be taken for another one.
    let output = rollback(directory.path(), &["--instance", "net"]).output().unwrap();
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(output.status.code(), Some(1), "{shown}");
    assert!(shown.contains(", except objects of another farrier, has a record"), "{shown}");
    // Named objects are restored, even if another farrier has set them.
    let output = rollback(directory.path(), &["--instance", "gpu", "drivers/theirs"]).output().unwrap();
    assert!(!String::from_utf8_lossy(&output.stderr).contains("another farrier"));
    done(&output);
    assert_eq!(restored(), 2);
}

/// The options of kubectl: the namespace of an object, a kubeconfig, and a context without `--cluster`.
#[test]
fn a_namespace_selects_objects_in_the_cluster_of_a_context() {
    let (api, directory) = (FakeApi::start(), tempfile::tempdir().unwrap());
    let kubeconfig = api.kubeconfig(directory.path()).display().to_string();
    for (namespace, name) in [("a", "one"), ("a", "two"), ("b", "one"), ("b", "three")] {
        let object = daemon_set(namespace, name, NEW_IMAGE);
        api.create(recorded(object, "driver", &NEW_IMAGE.into(), &OLD_IMAGE.into()));
    }
    let run = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_farrier"));
        command.args(args).args(["--kubeconfig", &kubeconfig]).env("HOME", directory.path());
        for name in ["KUBECONFIG", "FARRIER_CLUSTER", "FARRIER_DEFINITIONS"] {
            command.env_remove(name);
        }
        command.env("FARRIER_CACHE_DIR", directory.path().join("cache")).output().unwrap()
    };
    let objects = |args: &[&str]| done(&run(&[&["rollback", "-o", "name", "--dry-run"], args].concat()));
    assert_eq!(objects(&["-n", "a"]), "a/one\na/two\n");
    assert_eq!(objects(&["-n", "b", "three", "a/two"]), "a/two\nb/three\n");
    assert_eq!(objects(&["-n", "c"]), "");
    let of_context = ["upgrade", "history", "--context", "test", "-n", "b", "-o", "name"];
    assert_eq!(done(&run(&of_context)), "b/one\nb/three\n");
    for (args, words) in [
        (&["rollback", "--context", "other"][..], "other"),
        (&["status", "--registry", "oci:r", "--cluster", "dir:.", "--context", "test"], "is no live cluster"),
        (&["upgrade", "pause", "-n", "a", "four"], "a/four"),
    ] {
        let output = run(args);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {said}");
        assert!(said.contains(words), "{args:?}: {said}");
    }
    done(&run(&["rollback", "-n", "b"]));
    assert_eq!(images(&api).iter().filter(|image| *image == OLD_IMAGE).count(), 2);
}

#[test]
fn where_nothing_is_found_it_is_said_what_was_looked_for_and_where() {
    let (api, directory) = (FakeApi::start(), tempfile::tempdir().unwrap());
    api.kubeconfig(directory.path());
    api.create(daemon_set(NAMESPACE, DRIVER, NEW_IMAGE));
    let shown = done(&rollback(directory.path(), &[]).output().unwrap());
    let wanted = format!("nothing to roll back in the Kubernetes cluster at {}", api.url());
    assert!(shown.starts_with(&wanted), "{shown}");
    assert!(shown.contains("no DaemonSet in any namespace and no NicClusterPolicy, "), "{shown}");
    assert!(shown.contains("farrier.dev/record"), "{shown}");
    // A resource that cannot be listed causes a warning.
    api.deny("list", "daemonsets.apps");
    let output = rollback(directory.path(), &[]).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("warning: ") && said.contains("cannot be seen: "), "{said}");
    assert_eq!(output.status.code(), Some(1), "{said}");
}

#[test]
fn a_rollout_by_kernel_is_taken_back_without_its_definition() {
    const A: &str = "6.1.0-901-amd64";
    const B: &str = "6.1.0-902-amd64";
    let mut live = Live::new([node("a", A), node("b", B)], "per-kernel");
    live.api.run_daemon_sets(true, |_| Fate::Ready);
    live.publish();
    live.start(&[]);
    let on_nodes = |live: &Live| -> Vec<String> {
        let pods = live.api.list("pods");
        pods.iter().map(|pod| pod["spec"]["containers"][0]["image"].as_str().unwrap().to_owned()).collect()
    };
    live.until("each node runs its kernel's image", |live| {
        let images = on_nodes(live);
        images.len() == 2 && images.iter().all(|image| image != OLD_IMAGE)
    });
    live.kill();
    assert_eq!(live.api.list("daemonsets.apps").len(), 3);

    let shown = done(&rollback(&live.site.path(""), &[]).output().unwrap());
    assert!(
        shown.contains("a DaemonSet for each kernel -> the DaemonSet itself, on all its nodes"),
        "{shown}"
    );
    assert_eq!(live.api.list("daemonsets.apps").len(), 1);
    assert_eq!(on_nodes(&live), [OLD_IMAGE, OLD_IMAGE]);
    let handed_over = |node: &Value| {
        let labels = node["metadata"]["labels"].as_object().unwrap();
        labels.keys().any(|label| label.starts_with("farrier.dev/driver."))
    };
    assert!(!live.api.list("nodes").iter().any(handed_over));
    let original = live.api.get("daemonsets.apps", NAMESPACE, DRIVER).unwrap();
    let affinity = original.pointer("/spec/template/spec/affinity/nodeAffinity");
    assert!(affinity.is_none_or(|affinity| affinity == &json!({})), "{original}");

    for words in ["pause", "resume", "resume"] {
        let words = ["upgrade", words, "drivers/driver"];
        let output = live.command(&words).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(0), "{words:?}: {said}");
    }
    let original = live.api.get("daemonsets.apps", NAMESPACE, DRIVER).unwrap();
    let annotations = &original["metadata"]["annotations"];
    assert!(annotations["farrier.dev/per-kernel"].is_null(), "{original}");
}

/// Returns the requirement that keeps `kube-system/driver` off nodes that have been handed over.
fn fence() -> Value {
    json!({"key": "farrier.dev/driver.65a82f45", "operator": "DoesNotExist"})
}

fn affinity(expressions: &[Value]) -> Value {
    json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
        "nodeSelectorTerms": [{"matchExpressions": expressions}]}}})
}

/// The API server removes a field that its only owner no longer applies.
#[test]
fn fields_that_only_farrier_owns_outlive_its_annotations() {
    let (api, directory) = (FakeApi::start(), tempfile::tempdir().unwrap());
    api.kubeconfig(directory.path());
    let zone = json!({"key": "zone", "operator": "Exists"});
    let mut object = daemon_set("kube-system", "driver", OLD_IMAGE);
    object["spec"]["template"]["spec"]["affinity"] = affinity(std::slice::from_ref(&zone));
    api.create(object);
    let fenced = affinity(&[zone.clone(), fence()]);
    let pod = json!({"affinity": fenced, "containers": [{"name": "driver", "image": NEW_IMAGE}]});
    let applied = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "driver", "namespace": "kube-system"},
        "spec": {"template": {"spec": pod}},
    });
    let mut applied = recorded(applied, "driver", &NEW_IMAGE.into(), &OLD_IMAGE.into());
    applied["metadata"]["annotations"]["farrier.dev/per-kernel"] = "{}".into();
    api.apply_as("farrier", &applied);
    done(&rollback(directory.path(), &["kube-system/driver"]).output().unwrap());
    let annotations = json!({"farrier.dev/per-kernel": null, "farrier.dev/record": null});
    let patch = json!({"metadata": {"annotations": annotations}});
    api.patch_as("kubectl-annotate", "daemonsets.apps", "kube-system", "driver", &patch);

    api.install(Kind::cluster_policy());
    let driver = json!({"repository": "r.example", "image": "driver", "version": "new"});
    api.apply_as(
        "farrier",
        &resource("nvidia.com/v1", "ClusterPolicy", "policy", &json!({"driver": driver})),
    );

    for object in ["kube-system/driver", "ClusterPolicy/policy"] {
        done(&farrier(directory.path(), &["upgrade", "pause", object]).output().unwrap());
    }
    let found = api.get("daemonsets.apps", "kube-system", "driver").unwrap();
    assert_eq!(found["metadata"]["annotations"]["farrier.dev/paused"], "true");
    assert_eq!(found["spec"]["template"]["spec"]["affinity"], affinity(&[zone]));
    assert_eq!(images(&api), [OLD_IMAGE]);
    let policy = api.get(&Kind::cluster_policy().resource(), "", "policy").unwrap();
    assert_eq!(policy["spec"]["driver"], driver);
}

/// An apply that omits a field removes it only if no other manager owns it.
#[test]
fn a_fence_that_another_manager_owns_too_is_removed() {
    let (api, directory) = (FakeApi::start(), tempfile::tempdir().unwrap());
    api.kubeconfig(directory.path());
    api.create(daemon_set("kube-system", "driver", OLD_IMAGE));
    let mut applied = json!({
        "apiVersion": "apps/v1", "kind": "DaemonSet",
        "metadata": {"name": "driver", "namespace": "kube-system"},
        "spec": {"template": {"spec": {"affinity": affinity(&[fence()])}}},
    });
    api.apply_as("kubectl", &applied);
    applied["metadata"]["annotations"] = json!({"farrier.dev/per-kernel": "{}"});
    api.apply_as("farrier", &applied);
    let shown = done(&rollback(directory.path(), &[]).output().unwrap());
    assert!(shown.contains("restored"), "{shown}");
    let found = api.get("daemonsets.apps", "kube-system", "driver").unwrap();
    assert_eq!(found["spec"]["template"]["spec"]["affinity"], json!({"nodeAffinity": {}}));
}

#[test]
fn a_directory_of_manifests_has_its_own_history() {
    let dir = tempfile::tempdir().unwrap();
    let output = Command::new(env!("CARGO_BIN_EXE_farrier"))
        .args(["rollback", "kube-system/mft", "--cluster"])
        .arg(format!("dir:{}", dir.path().display()))
        .output()
        .unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{said}");
    assert!(said.contains("its history is version control (git revert)"), "{said}");
    assert!(said.contains("hint: revert the definition and its sources too"), "{said}");
}
