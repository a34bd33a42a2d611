//! Static checks of the admission policies in deploy/. `ci/e2e admission` tests the same policies on a real API server.

use std::{fs, path::Path};

use farrier_core::{
    image::OperatorResource,
    plan::{COPY_OF_LABEL, RECORD_ANNOTATION},
};
use serde_json::Value;

/// Returns the policies and bindings in file order.
fn documents() -> Vec<Value> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let kustomize = root.join("kustomize/base/admission-policy.yaml");
    let chart = root.join("chart/farrier/files/admission-policy.yaml");
    assert_eq!(
        fs::canonicalize(chart).unwrap(),
        fs::canonicalize(&kustomize).unwrap(),
        "the chart and kustomize share one file"
    );
    let text = fs::read_to_string(kustomize).unwrap();
    let documents = text.split("\n---\n").skip(1);
    documents.map(|document| serde_saphyr::from_str(document).unwrap()).collect()
}

fn policy(name: &str) -> Value {
    let is =
        |found: &Value| found["kind"] == "ValidatingAdmissionPolicy" && found["metadata"]["name"] == name;
    documents().into_iter().find(is).unwrap()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

#[test]
fn each_policy_is_bound_and_denies_and_is_about_farrier_alone() {
    let (bindings, policies): (Vec<Value>, Vec<Value>) =
        documents().into_iter().partition(|found| found["kind"] == "ValidatingAdmissionPolicyBinding");
    assert_eq!((policies.len(), bindings.len()), (6, 6));
    for policy in &policies {
        let spec = &policy["spec"];
        assert_eq!(spec["failurePolicy"], "Fail");
        // Overlays and the chart patch these two variables by index.
        assert_eq!(spec["matchConditions"].as_array().unwrap().len(), 1);
        let account = text(&spec["matchConditions"][0]["expression"]);
        assert_eq!(account, "request.userInfo.username == 'system:serviceaccount:farrier:farrier'");
        assert_eq!(spec["variables"][0]["name"], "images");
        assert_eq!(spec["variables"][0]["expression"], "['registry.example.com/drivers/']");
        for validation in spec["validations"].as_array().unwrap() {
            // farrier recognizes RBAC refusals by ` cannot ` and races by `metadata.uid`, so no policy message may contain
            // either.
            let message = text(&validation["message"]);
            assert!(!message.contains(" cannot ") && !message.contains("metadata.uid"), "{message}");
        }
        let bound =
            bindings.iter().find(|binding| binding["spec"]["policyName"] == policy["metadata"]["name"]);
        let actions = bound.unwrap()["spec"]["validationActions"].as_array().unwrap().clone();
        assert!(actions.contains(&"Deny".into()), "{actions:?}");
    }
}

/// The API server finds the original of a copy among the DaemonSets of the copy's namespace.
/// In a namespace without DaemonSets the binding allows the first one.
#[test]
fn a_copy_is_compared_with_the_original_that_the_site_named() {
    let made = policy("farrier-daemonsets");
    let originals = &made["spec"]["variables"][1];
    assert_eq!((text(&originals["name"]), text(&originals["expression"])), ("originals", "[]"));
    // Prefixes for copies widen no other rule.
    let further = &made["spec"]["variables"][2];
    assert_eq!((text(&further["name"]), text(&further["expression"])), ("copyImages", "[]"));
    let all = documents().iter().map(Value::to_string).collect::<String>();
    assert_eq!(all.matches("variables.copyImages").count(), 1);
    let rules = made["spec"]["validations"].as_array().unwrap();
    let widened =
        rules.iter().find(|rule| text(&rule["expression"]).contains("variables.copyImages")).unwrap();
    assert!(text(&widened["expression"]).starts_with("!variables.isCopy ||"), "{widened}");
    let asked = made["spec"]["validations"].as_array().unwrap().iter().map(|rule| text(&rule["expression"]));
    let named = asked.filter(|rule| rule.contains("in variables.originals")).count();
    assert_eq!(named, 1);

    let copies = policy("farrier-copies")["spec"].clone();
    assert_eq!(copies["paramKind"], serde_json::json!({"apiVersion": "apps/v1", "kind": "DaemonSet"}));
    let selected = &copies["matchConstraints"]["objectSelector"]["matchExpressions"];
    assert_eq!(*selected, serde_json::json!([{"key": COPY_OF_LABEL, "operator": "Exists"}]));
    let is = |found: &Value| found["spec"]["policyName"] == "farrier-copies";
    let binding = documents().into_iter().find(is).unwrap();
    assert_eq!(
        binding["spec"]["paramRef"],
        serde_json::json!({"selector": {}, "parameterNotFoundAction": "Allow"})
    );
    // The rules cover exactly the fields of a pod template that farrier changes.
    let rules = copies["validations"].to_string();
    assert!(rules.contains("k in ['containers', 'initContainers', 'nodeSelector', 'affinity']"), "{rules}");
}

/// A check is a CronJob that the site supplies, so the policy lists the pod fields that it may set.
#[test]
fn a_check_has_no_secret_no_token_and_no_capability() {
    let policy = policy("farrier-jobs");
    let in_pods = list(&policy, "checkPodFields");
    assert_eq!(in_pods, ["nodeName", "volumes", "initContainers", "hostUsers", "hostNetwork", "hostPID"]);
    let expressions = policy["spec"]["variables"].to_string();
    assert!(expressions.contains("variables.isForecast ? ['hostNetwork', 'hostPID'] : []"), "{expressions}");
    let rules = policy["spec"]["validations"].to_string();
    for wanted in [
        "['name', 'emptyDir', 'configMap', 'downwardAPI']",
        "['prefix', 'configMapRef']",
        "['configMapKeyRef', 'fieldRef', 'resourceFieldRef']",
        "!variables.isCheck || variables.pod.?automountServiceAccountToken.orValue(true) == false",
        "(variables.isForecast || size(c.?securityContext.capabilities.add.orValue([])) == 0)",
        "!k.startsWith('container.apparmor.security.beta.kubernetes.io/')",
    ] {
        assert!(rules.contains(wanted), "{wanted} is not in {rules}");
    }
}

/// A container that moves to another list, or a mapping that takes another's place, runs at another time or for other kernels.
#[test]
fn containers_stay_in_their_list_and_mappings_in_their_place() {
    let rules = policy("farrier-daemonsets")["spec"]["validations"].to_string();
    assert!(rules.contains(
        "[[variables.pod.containers, variables.oldPod.containers], [variables.pod.?initContainers"
    ));
    let rules = policy("farrier-resources")["spec"]["validations"].to_string();
    let keys =
        |list: &str| format!("variables.{list}.map(m, [m.?regexp.orValue(''), m.?literal.orValue('')])");
    let wanted = format!("{} == {}", keys("mappings"), keys("oldMappings"));
    assert!(rules.contains(&wanted), "{wanted} is not in {rules}");
}

/// Overlays and the chart enable these variables by index or by name.
#[test]
fn cordons_and_checks_are_refused_by_default() {
    for (name, place, variable, component) in [
        ("farrier-nodes", 1, "cordons", "drain"),
        ("farrier-nodes", 2, "startupTaint", "startup-taint"),
        ("farrier-jobs", 1, "checks", "upgrade-checks"),
        ("farrier-jobs", 2, "forecasts", "upgrade-forecasts"),
    ] {
        let found = policy(name)["spec"]["variables"][place].clone();
        assert_eq!((text(&found["name"]), text(&found["expression"])), (variable, "false"));
        let file = format!("deploy/kustomize/components/{component}/kustomization.yaml");
        let patch = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap();
        assert!(patch.contains(name) && patch.contains(&format!("/variables/{place}/expression")), "{patch}");
    }
}

/// The policy names each form of the taint that farrier removes, and no other.
#[test]
fn only_startup_taints_are_removed() {
    let policy = policy("farrier-nodes");
    let rules = policy["spec"]["validations"].as_array().unwrap();
    let rule = rules
        .iter()
        .map(|rule| text(&rule["expression"]))
        .find(|rule| rule.contains("variables.taints"))
        .unwrap();
    let named: Vec<&str> = rule.split('\'').skip(1).step_by(2).collect();
    assert_eq!(named, farrier_startup_taint::TAINTS);
    assert!(rule.starts_with("variables.taints == (variables.startupTaint ?"), "{rule}");
    let rbac =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kustomize/components/startup-taint/rbac.yaml");
    let rbac = fs::read_to_string(rbac).unwrap();
    let granted: Value = serde_saphyr::from_str(rbac.split("\n---\n").next().unwrap()).unwrap();
    assert_eq!(
        granted["rules"],
        serde_json::json!([{"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}])
    );
}

#[test]
fn the_policies_name_what_farrier_writes() {
    let resources = policy("farrier-resources")["spec"].clone();
    let rules = resources["matchConstraints"]["resourceRules"].as_array().unwrap().clone();
    for kind in OperatorResource::TARGETS {
        let rule = rules.iter().find(|rule| rule["apiGroups"][0] == kind.group()).unwrap();
        let plurals = rule["resources"].as_array().unwrap();
        assert!(plurals.contains(&kind.plural().into()), "{kind}");
        let section =
            resources["variables"].as_array().unwrap().iter().find(|found| found["name"] == "section");
        let path = kind.driver_path().first().copied().unwrap_or_default();
        assert!(text(&section.unwrap()["expression"]).contains(&format!("'{path}'")), "{kind}");
    }
    let daemon_sets = policy("farrier-daemonsets").to_string();
    for key in [COPY_OF_LABEL, RECORD_ANNOTATION] {
        assert!(daemon_sets.contains(&format!("'{key}'")), "{key}");
    }
    for name in ["farrier-nodes", "farrier-daemonsets", "farrier-resources", "farrier-jobs"] {
        let rules = policy(name)["spec"]["matchConstraints"]["resourceRules"].clone();
        for rule in rules.as_array().unwrap() {
            let operations = rule["operations"].as_array().unwrap();
            assert!(
                ["CREATE", "UPDATE", "DELETE"].map(Value::from).iter().all(|word| operations.contains(word)),
                "{name}"
            );
        }
    }
}

/// Returns the Job from the snapshot of the Kubernetes engine's unit test.
fn build() -> Value {
    let name = "farrier_engines__kubernetes__job__tests__a_job_has_no_rights_and_says_what_it_needs.snap";
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("crates/engines/src/kubernetes/snapshots");
    let snapshot = fs::read_to_string(directory.join(name)).unwrap();
    serde_json::from_str(snapshot.splitn(3, "---\n").nth(2).unwrap()).unwrap()
}

/// Returns the quoted words in a variable's list.
fn list(policy: &Value, variable: &str) -> Vec<String> {
    let variables = policy["spec"]["variables"].as_array().unwrap();
    let found = variables.iter().find(|found| found["name"] == variable).unwrap();
    let words = text(&found["expression"]).split('\'').skip(1).step_by(2);
    words.map(str::to_owned).collect()
}

#[test]
fn the_fields_of_a_builds_pod_are_those_that_farrier_and_sites_set() {
    let (policy, job) = (policy("farrier-jobs"), build());
    let pod = job["spec"]["template"]["spec"].as_object().unwrap();
    let container = pod["containers"][0].as_object().unwrap();
    let (in_pods, in_containers) = (list(&policy, "podFields"), list(&policy, "containerFields"));
    for (fields, allowed) in [(pod, &in_pods), (container, &in_containers)] {
        for field in fields.keys() {
            assert!(allowed.contains(field), "{field}");
        }
    }
    let schema = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("schema/site.json")).unwrap();
    let schema: Value = serde_json::from_str(&schema).unwrap();
    let additions = schema["$defs"]["PodAdditions"]["properties"].as_object().unwrap();
    // And no field that gives a pod additional privileges.
    let servers = ["dnsPolicy"];
    for field in &in_pods {
        let known =
            additions.contains_key(field) || pod.contains_key(field) || servers.contains(&field.as_str());
        assert!(known, "{field}");
    }
    for field in additions.keys() {
        assert!(in_pods.contains(field), "{field}");
    }
    let labels = job["metadata"]["labels"].as_object().unwrap();
    let validations = policy["spec"]["validations"].to_string();
    assert!(
        validations.contains(
            &format!("'app.kubernetes.io/name'].orValue('') == {}", labels["app.kubernetes.io/name"])
                .replace('"', "'")
        )
    );
}

#[test]
fn farrier_may_run_the_runner_in_pods_and_nothing_else() {
    let validations = policy("farrier-exec")["spec"]["validations"].to_string();
    let job = build();
    let runner = text(&job["spec"]["template"]["spec"]["containers"][0]["command"][0]);
    assert!(validations.contains(&format!("command[0] == '{runner}'")), "{validations}");
}

/// The Role grants exactly the API calls that engine `kubernetes` makes in the namespace of builds.
#[test]
fn the_rights_in_the_namespace_of_builds_are_those_that_the_engine_uses() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/kustomize/builds");
    let rbac = fs::read_to_string(directory.join("rbac.yaml")).unwrap();
    let role: Value = serde_saphyr::from_str(rbac.split("\n---\n").next().unwrap()).unwrap();
    let line_of = |rule: &Value| format!("{}/{} {}", rule["apiGroups"], rule["resources"], rule["verbs"]);
    let rules: Vec<String> = role["rules"].as_array().unwrap().iter().map(line_of).collect();
    let wanted = [
        r#"["batch"]/["jobs"] ["get","create","delete"]"#,
        r#"[""]/["pods"] ["get","list","watch"]"#,
        r#"[""]/["pods/exec"] ["get","create"]"#,
        r#"[""]/["events"] ["list"]"#,
    ];
    assert_eq!(rules, wanted);
}
