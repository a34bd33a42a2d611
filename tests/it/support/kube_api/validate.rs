//! Defaults and validation of the objects that farrier writes, like the real server's.

use serde_json::{Map, Value, json};

use super::{
    answer::{Failure, Problem},
    kinds::Kind,
};

/// Sets the server's defaults.
pub fn set_defaults(kind: &Kind, object: &mut Value) {
    if !matches!(kind.kind.as_str(), "DaemonSet" | "Job") {
        return;
    }
    let spec = &mut object["spec"];
    if kind.kind == "Job" {
        default(spec, "backoffLimit", &json!(6));
        default(spec, "completionMode", &json!("NonIndexed"));
        default(spec, "completions", &json!(1));
        default(spec, "manualSelector", &json!(false));
        default(spec, "parallelism", &json!(1));
        default(spec, "podReplacementPolicy", &json!("TerminatingOrFailed"));
        default(spec, "suspend", &json!(false));
        set_pod_defaults(&mut spec["template"]["spec"]);
        return;
    }
    default(spec, "revisionHistoryLimit", &json!(10));
    default(spec, "updateStrategy", &json!({"type": "RollingUpdate"}));
    if spec["updateStrategy"]["type"] == "RollingUpdate" {
        default(&mut spec["updateStrategy"], "rollingUpdate", &json!({}));
        default(&mut spec["updateStrategy"]["rollingUpdate"], "maxUnavailable", &json!(1));
        default(&mut spec["updateStrategy"]["rollingUpdate"], "maxSurge", &json!(0));
    }
    let Some(pod) = spec.get_mut("template").and_then(|template| template.get_mut("spec")) else { return };
    default(pod, "restartPolicy", &json!("Always"));
    set_pod_defaults(pod);
}

fn set_pod_defaults(pod: &mut Value) {
    if !pod.is_object() {
        return;
    }
    default(pod, "terminationGracePeriodSeconds", &json!(30));
    default(pod, "dnsPolicy", &json!("ClusterFirst"));
    default(pod, "securityContext", &json!({}));
    default(pod, "schedulerName", &json!("default-scheduler"));
    for list in ["containers", "initContainers"] {
        for container in pod.get_mut(list).and_then(Value::as_array_mut).into_iter().flatten() {
            let latest = container["image"].as_str().is_some_and(|image| {
                !image.contains('@') && !image.rsplit('/').next().is_some_and(|name| name.contains(':'))
                    || image.ends_with(":latest")
            });
            let policy = if latest { "Always" } else { "IfNotPresent" };
            default(container, "resources", &json!({}));
            default(container, "terminationMessagePath", &json!("/dev/termination-log"));
            default(container, "terminationMessagePolicy", &json!("File"));
            default(container, "imagePullPolicy", &json!(policy));
        }
    }
}

fn default(value: &mut Value, name: &str, to: &Value) {
    if let Some(map) = value.as_object_mut() {
        map.entry(name.to_owned()).or_insert_with(|| to.clone());
    }
}

/// Rejects what the server rejects.
pub fn validate(kind: &Kind, name: &str, old: Option<&Value>, new: &Value) -> Result<(), Failure> {
    let mut problems = Vec::new();
    let metadata = &new["metadata"];
    if !is_object_name(name) {
        let why = format!(
            "Invalid value: {name:?}: a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character"
        );
        problems.push(Problem("metadata.name".to_owned(), "FieldValueInvalid", why));
    }
    labels("metadata.labels", &metadata["labels"], &mut problems);
    annotations(&metadata["annotations"], &mut problems);
    if let Some(uid) = old.and_then(|old| old["metadata"]["uid"].as_str())
        && metadata["uid"].as_str().is_some_and(|given| given != uid)
    {
        let why = format!("Invalid value: {}: field is immutable", metadata["uid"]);
        problems.push(Problem("metadata.uid".to_owned(), "FieldValueInvalid", why));
    }
    match kind.kind.as_str() {
        "DaemonSet" => daemon_set(old, &new["spec"], &mut problems),
        "Job" => job(old, &new["spec"], &mut problems),
        _ => {}
    }
    if problems.is_empty() { Ok(()) } else { Err(Failure::invalid(kind, name, &problems)) }
}

fn daemon_set(old: Option<&Value>, spec: &Value, problems: &mut Vec<Problem>) {
    let selector = &spec["selector"];
    let template = &spec["template"];
    let mut invalid = |field: &str, value: &Value, why: &str| {
        problems.push(Problem(
            field.to_owned(),
            "FieldValueInvalid",
            format!("Invalid value: {value}: {why}"),
        ));
    };
    // The real server uses this message for a missing selector, too.
    if selector.is_null() || old.is_some_and(|old| old["spec"]["selector"] != *selector) {
        invalid("spec.selector", selector, "field is immutable");
    } else if selector["matchLabels"].as_object().is_none_or(Map::is_empty)
        && selector["matchExpressions"].as_array().is_none_or(Vec::is_empty)
    {
        invalid("spec.selector", selector, "empty selector is invalid for daemonset");
    }
    let given = &template["metadata"]["labels"];
    let wanted = selector["matchLabels"].as_object();
    if selector.is_null() || wanted.into_iter().flatten().any(|(key, value)| given.get(key) != Some(value)) {
        invalid("spec.template.metadata.labels", given, "`selector` does not match template `labels`");
    }
    pod_template(template, problems);
}

/// A Job's template is immutable, except for the scheduling fields of a suspended Job.
fn job(old: Option<&Value>, spec: &Value, problems: &mut Vec<Problem>) {
    let template = &spec["template"];
    let differs = |old: &Value| {
        let suspended = old["suspend"] == true;
        fixed(&old["template"], suspended) != fixed(template, suspended)
    };
    if old.is_some_and(|old| differs(&old["spec"])) {
        let why = format!("Invalid value: {template}: field is immutable");
        problems.push(Problem("spec.template".to_owned(), "FieldValueInvalid", why));
    }
    if !matches!(template["spec"]["restartPolicy"].as_str(), Some("Never" | "OnFailure")) {
        let why = "Required value: valid values: \"OnFailure\", \"Never\"".to_owned();
        problems.push(Problem("spec.template.spec.restartPolicy".to_owned(), "FieldValueRequired", why));
    }
    pod_template(template, problems);
}

fn fixed(template: &Value, suspended: bool) -> Value {
    let mut template = template.clone();
    if suspended {
        template["metadata"] = Value::Null;
        for field in ["nodeSelector", "affinity", "tolerations", "schedulingGates"] {
            template["spec"][field] = Value::Null;
        }
    }
    template
}

fn pod_template(template: &Value, problems: &mut Vec<Problem>) {
    labels("spec.template.labels", &template["metadata"]["labels"], problems);
    labels("spec.template.spec.nodeSelector", &template["spec"]["nodeSelector"], problems);
    if template["spec"]["containers"].as_array().is_none_or(Vec::is_empty) {
        required("spec.template.spec.containers", problems);
    }
    for list in ["containers", "initContainers"] {
        let containers = template["spec"][list].as_array();
        for (index, container) in containers.into_iter().flatten().enumerate() {
            for field in ["name", "image"] {
                if container[field].as_str().is_none_or(str::is_empty) {
                    required(&format!("spec.template.spec.{list}[{index}].{field}"), problems);
                }
            }
        }
    }
}

fn required(field: &str, problems: &mut Vec<Problem>) {
    problems.push(Problem(field.to_owned(), "FieldValueRequired", "Required value".to_owned()));
}

fn labels(field: &str, labels: &Value, problems: &mut Vec<Problem>) {
    for (key, value) in labels.as_object().into_iter().flatten() {
        if !is_qualified_name(key) {
            let why = format!(
                "Invalid value: {key:?}: name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character"
            );
            problems.push(Problem(field.to_owned(), "FieldValueInvalid", why));
        }
        let text = value.as_str().unwrap_or("\n");
        if !(text.is_empty() || is_name_part(text)) {
            let why = format!(
                "Invalid value: {text:?}: a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character"
            );
            problems.push(Problem(field.to_owned(), "FieldValueInvalid", why));
        }
    }
}

fn annotations(annotations: &Value, problems: &mut Vec<Problem>) {
    let mut size = 0;
    for (key, value) in annotations.as_object().into_iter().flatten() {
        size += key.len() + value.as_str().map_or(0, str::len);
        if !is_qualified_name(&key.to_lowercase()) {
            let why = format!(
                "Invalid value: {key:?}: name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character"
            );
            problems.push(Problem("metadata.annotations".to_owned(), "FieldValueInvalid", why));
        }
    }
    if size > 256 * 1024 {
        let why = "Too long: may not be more than 262144 bytes".to_owned();
        problems.push(Problem("metadata.annotations".to_owned(), "FieldValueTooLong", why));
    }
}

fn is_qualified_name(key: &str) -> bool {
    match key.split_once('/') {
        Some((prefix, name)) => is_object_name(prefix) && is_name_part(name),
        None => is_name_part(key),
    }
}

fn is_name_part(text: &str) -> bool {
    let alphanumeric = |byte: Option<&u8>| byte.is_some_and(u8::is_ascii_alphanumeric);
    let bytes = text.as_bytes();
    bytes.len() <= 63
        && alphanumeric(bytes.first())
        && alphanumeric(bytes.last())
        && bytes.iter().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(byte))
}

fn is_object_name(text: &str) -> bool {
    let plain = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    text.len() <= 253
        && text.split('.').all(|part| {
            let bytes = part.as_bytes();
            bytes.first().is_some_and(plain)
                && bytes.last().is_some_and(plain)
                && bytes.iter().all(|byte| plain(byte) || *byte == b'-')
        })
}
