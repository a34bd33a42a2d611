//! The admission policies of deploy/, as far as their text tells without an API server: `ci/e2e admission` plays them on one.

use std::{fs, path::Path};

use farrier::{
    image::OperatorResource,
    plan::{COPY_OF_LABEL, RECORD_ANNOTATION},
};
use serde_json::Value;

/// The policies and bindings, in their order.
fn documents() -> Vec<Value> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let kustomize = root.join("kustomize/base/admission-policy.yaml");
    let chart = root.join("chart/farrier/files/admission-policy.yaml");
    assert_eq!(fs::canonicalize(chart).unwrap(), fs::canonicalize(&kustomize).unwrap(), "one text for both");
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
    assert_eq!((policies.len(), bindings.len()), (3, 3));
    for policy in &policies {
        let spec = &policy["spec"];
        assert_eq!(spec["failurePolicy"], "Fail");
        // Overlays and the chart replace these two by their places.
        assert_eq!(spec["matchConditions"].as_array().unwrap().len(), 1);
        let account = text(&spec["matchConditions"][0]["expression"]);
        assert_eq!(account, "request.userInfo.username == 'system:serviceaccount:farrier:farrier'");
        assert_eq!(spec["variables"][0]["name"], "images");
        assert_eq!(spec["variables"][0]["expression"], "['registry.example.com/drivers/']");
        for validation in spec["validations"].as_array().unwrap() {
            // farrier takes ` cannot ` for RBAC's words and `metadata.uid` for a race.
            let message = text(&validation["message"]);
            assert!(!message.contains(" cannot ") && !message.contains("metadata.uid"), "{message}");
        }
        let bound =
            bindings.iter().find(|binding| binding["spec"]["policyName"] == policy["metadata"]["name"]);
        let actions = bound.unwrap()["spec"]["validationActions"].as_array().unwrap().clone();
        assert!(actions.contains(&"Deny".into()), "{actions:?}");
    }
}

#[test]
fn the_policies_name_what_farrier_writes() {
    let resources = policy("farrier-resources")["spec"].clone();
    let rules = resources["matchConstraints"]["resourceRules"].as_array().unwrap().clone();
    for kind in OperatorResource::ALL {
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
    for name in ["farrier-nodes", "farrier-daemonsets", "farrier-resources"] {
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
